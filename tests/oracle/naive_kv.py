"""K and V as stored, from the definition in config/kv_format.py and nothing else; numpy, one vector at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twostroke.config.kv_format import KVFormat

LEVELS = {"int8": 255, "int4": 15}
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Codes:
    """One vector, quantized."""

    codes: npt.NDArray[np.uint8]
    scale: np.float16
    zero: np.float16

    def values(self) -> npt.NDArray[np.float32]:
        return np.float32(self.zero) + np.float32(self.scale) * self.codes.astype(np.float32)


def block_of(head_dim: int) -> int:
    """Return how many numbers int4 transforms together."""
    powers = [2**n for n in range(10)]
    return head_dim if head_dim >= 16 and head_dim in powers else max(p for p in powers if head_dim // 2 % p == 0)


def transform(x: npt.NDArray[np.float32], divisor: int) -> npt.NDArray[np.float32]:
    """Return Hadamard's transform of each block of a vector, divided first."""

    def whole(part: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        if len(part) == 1:
            return part
        first, second = (whole(half) for half in np.split(part, 2))
        return np.concatenate([first + second, first - second])

    blocks = np.split(x / np.float32(divisor), len(x) // block_of(len(x)))
    with np.errstate(over="ignore", invalid="ignore"):
        return np.concatenate([whole(block) for block in blocks])


def transformed(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return the values that int4 stores of a vector."""
    return transform(x, 2 ** (round(np.log2(block_of(len(x)))) // 2))


def inverse_hadamard(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return the inverse transform."""
    return transform(x, 2 ** ((round(np.log2(block_of(len(x)))) + 1) // 2))


def quantize(x: npt.NDArray[np.float32], kv_format: KVFormat) -> Codes:
    """Quantize a vector of finite numbers."""
    levels = np.float32(LEVELS[kv_format])
    if kv_format == "int4":
        x = transformed(x)
        if not np.isfinite(x).all():
            return Codes(np.zeros(len(x), np.uint8), np.float16(0), np.float16(np.nan))
        with np.errstate(over="ignore"):
            span = x.max() - x.min()
        zero = np.float16(np.clip(x.min() + span / np.float32(32) + np.float32(0), -65504, 65504))
        scale = np.float16(np.clip(span / np.float32(16), 0, 65504) + np.float32(0))
    else:
        zero = np.float16(np.clip(x.min() + np.float32(0), -65504, 65504))
        scale = np.float16(np.clip((x.max() - np.float32(zero)) / levels, 0, 65504) + np.float32(0))
    if scale == 0:
        return Codes(np.zeros(len(x), np.uint8), scale, zero)
    steps = (x - np.float32(zero)) * (np.float32(1) / np.float32(scale))
    return Codes(np.rint(np.clip(steps, 0, levels)).astype(np.uint8), scale, zero)


def e4m3_values() -> npt.NDArray[np.float64]:
    """Return the values of the codes 0 to 0x7E by definition: 4 bits of exponent (bias 7), 3 of mantissa. [127]"""
    codes = np.arange(0x7F)
    exponent, mantissa = codes >> 3, codes & 7
    return np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))


def e4m3(x: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Return the nearest codes: the even one of two that are equally near, the last one beyond the range."""
    values, size = e4m3_values(), np.abs(x.astype(np.float64))
    above = np.clip(np.searchsorted(values, size), 1, 0x7E)
    below = above - 1
    middle = (values[above] + values[below]) / 2
    takes_upper = (size > middle) | ((size == middle) & (above % 2 == 0))
    codes = np.where(np.isfinite(x), np.where(takes_upper, above, below), 0x7F)
    return (codes | np.where(np.signbit(x), 0x80, 0)).astype(np.uint8)


def stored(x: Tensor, kv_format: KVFormat, dtype: torch.dtype) -> Tensor:
    """Return x [..., head_dim] as it reads after being stored, in the type of the computation."""
    if kv_format in DTYPES:
        return x.to(DTYPES[kv_format]).to(dtype)
    if kv_format == "fp8":
        codes = e4m3(x.float().numpy())
        signs = np.where(codes & 0x80, -1.0, 1.0)
        return torch.from_numpy(np.append(e4m3_values(), np.nan)[codes & 0x7F] * signs).to(dtype)
    rows = x.float().reshape(-1, x.shape[-1]).numpy()
    if not np.isfinite(rows).all():
        return torch.full_like(x, float("nan"))
    values = np.stack([quantize(row, kv_format).values() for row in rows])
    if kv_format == "int4":
        values = np.stack([inverse_hadamard(row) for row in values])
    return torch.from_numpy(values).view(x.shape).to(dtype)
