"""Encoding of K and V in plain order: the slots of a head one after the other. Quantized slots hold

int8  [head_dim] codes                          then scale and zero, float16 each
int4  [head_dim / 2], even dimension low        (config/kv_format.py defines them)

Slots of int4 hold transformed vectors. Attention reads them as stored (`decode_stored`), and transforms q and its
result instead.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from twostroke.config.kv_format import KVFormat, hadamard_block, hadamard_divisors, levels_of

_DTYPES: dict[KVFormat, torch.dtype] = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
}
_LARGEST_HALF = 65504.0
_INT4_LEVELS = levels_of("int4")


def encode(kv: Tensor, kv_format: KVFormat) -> Tensor:
    """Encode [n, head_dim] of any float type as slots, uint8 [n, slot bytes]."""
    dtype = _DTYPES.get(kv_format)
    if dtype is torch.float8_e4m3fn:
        kv = clamp_to_fp8(kv.float())
    if dtype is not None:
        return kv.to(dtype).contiguous().view(torch.uint8)
    kv = kv.float()
    codes, scale_and_zero = quantize(hadamard_transformed(kv) if kv_format == "int4" else kv, levels_of(kv_format))
    if kv_format == "int4":
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    return torch.cat([codes, scale_and_zero.view(torch.uint8)], dim=1)


def decode(slots: Tensor, kv_format: KVFormat, dtype: torch.dtype) -> Tensor:
    """Decode slots, uint8 [n, slot bytes], to [n, head_dim] in `dtype`, rounded once."""
    if kv_format == "int4":
        return inverse_hadamard(decode_stored(slots, kv_format, torch.float32)).to(dtype)
    return decode_stored(slots, kv_format, dtype)


def decode_stored(slots: Tensor, kv_format: KVFormat, dtype: torch.dtype) -> Tensor:
    """Decode slots to the stored vectors, [n, head_dim] in `dtype`; those of int4 stay transformed."""
    stored = _DTYPES.get(kv_format)
    if stored is not None:
        return slots.view(stored).to(dtype)
    codes = slots[:, :-4]
    if kv_format == "int4":
        codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)
    scale, zero = slots[:, -4:].contiguous().view(torch.float16).float().split(1, dim=1)
    return codes.float().mul_(scale).add_(zero).to(dtype)


def recode(
    slots: NDArray[np.uint8], kv_format: KVFormat, to_format: KVFormat, shift: NDArray[np.float32] | None = None
) -> NDArray[np.uint8]:
    """Convert slots [n, slot bytes] to another format: decode to float32 and encode again.

    Slots of the same format stay unchanged, because encoding decoded codes again may change them.

    Args:
        slots: in plain order.
        kv_format: format of the slots.
        to_format: format of the result.
        shift: [n, head_dim], added to the decoded numbers; None for no shift.
    """
    if kv_format == to_format:
        assert shift is None, f"a shift within {kv_format}"
        return slots
    numbers = decode(torch.from_numpy(slots), kv_format, torch.float32)
    return encode(numbers if shift is None else numbers + torch.from_numpy(shift), to_format).numpy()


def hadamard_transformed(x: Tensor) -> Tensor:
    """Transform vectors, float32 [..., head_dim], to the form that int4 stores."""
    block = hadamard_block(x.shape[-1])
    return _hadamard(x / hadamard_divisors(block)[0], block)


def inverse_hadamard(x: Tensor) -> Tensor:
    """Apply the inverse of `hadamard_transformed`; also applied to q where keys are stored transformed."""
    block = hadamard_block(x.shape[-1])
    return _hadamard(x, block) / hadamard_divisors(block)[1]


def _hadamard(x: Tensor, block: int) -> Tensor:
    """Apply an unnormalized Hadamard transform to each `block` numbers."""
    shape, stride = x.shape, 1
    while stride < block:
        first, second = x.reshape(-1, 2, stride).unbind(1)
        x = torch.stack((first + second, first - second), dim=1)
        stride *= 2
    return x.reshape(shape)


def clamp_to_fp8(x: Tensor) -> Tensor:
    """Clamp float32 to the range of fp8; non-finite numbers become NaN, so that their request ends with an error."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    return torch.where(x.isfinite(), x.clamp(-largest, largest), torch.nan)


def quantize(x: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Quantize x, float32 [n, head_dim], to codes uint8 of its shape and (scale, zero) float16 [n, 2]."""
    # NaN if any number is not finite, because 0 * x is NaN; so is the zero then. The last term makes -0 to +0.
    poison = (x * 0.0).sum(-1, keepdim=True) + 0.0
    lowest, highest = x.amin(-1, keepdim=True) + poison, x.amax(-1, keepdim=True)
    span = highest - lowest
    zero = lowest + span * (1 / 32) if levels == _INT4_LEVELS else lowest
    zero = (zero + 0.0).clamp_(-_LARGEST_HALF, _LARGEST_HALF).half()
    step = span * (1 / 16) if levels == _INT4_LEVELS else (highest - zero.float()) / levels
    scale = step.nan_to_num_(0.0).clamp_(0.0, _LARGEST_HALF).add_(0.0).half()
    inverse = torch.where(scale > 0, 1.0 / scale.float(), 0.0)
    codes = ((x - zero.float()) * inverse).clamp_(0.0, levels).nan_to_num_(0.0).round_().to(torch.uint8)
    return codes, torch.cat([scale, zero], dim=1)
