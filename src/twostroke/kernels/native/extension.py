"""Compiled module, helpers for its callers, and its operators without packed weights.

Those operators are norms, rotary embedding, activations, draws and quantizing. Importing this module fails if the
native module was not built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from twostroke.config.kv_format import KVFormat
from twostroke.kernels.native import _native as native
from twostroke.kernels.quantized_weight import DIVISORS, QuantizedWeight, per_channel

Kernels = native.Kernels

TYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}
"""Codes of the types in csrc/kernels/table.hpp."""

KV_FORMAT_CODES: dict[KVFormat, int] = {"f32": 0, "bf16": 1, "int8": 2, "int4": 3}
"""Codes of the KV formats in csrc/kernels/table.hpp."""


def set_num_threads(count: int) -> None:
    """Compute on `count` threads, and reduce torch to one.

    Torch's threads spin for a while after each operator, on the cores that the kernels need.
    """
    native.set_num_threads(count, [])
    torch.set_num_threads(1)


def pin_threads(cpus: Sequence[int]) -> None:
    native.set_num_threads(len(cpus), list(cpus))
    torch.set_num_threads(1)


def address(tensor: Tensor | None) -> int:
    """Return the address of a tensor's first byte; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def read_stream(piece: Tensor) -> int:
    """Read contiguous memory, a multiple of 64 bytes, on all threads (csrc/stream.hpp)."""
    return native.read_stream(piece.data_ptr(), piece.nbytes)


# ------------------------------------------------------------------ norm and rotation (csrc/kernels/elementwise.hpp)


class Elementwise:
    """Kernels of one level that work a row at a time; shapes and numerics are those of kernels/reference."""

    def __init__(self, kernels: Kernels) -> None:
        self._rms_norm, self._rotate = kernels.rms_norm, kernels.rotate

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Apply the norm to x [num_rows, n] with weight [n], or to [num_rows, parts, n] with [parts, n]."""
        out = torch.empty_like(x)
        self._norm(x, weight, out, eps)
        return out

    def rms_norm_(self, x: Tensor, weight: Tensor, eps: float) -> None:
        """Apply `rms_norm` in place."""
        self._norm(x, weight, x, eps)

    def _norm(self, x: Tensor, weight: Tensor, out: Tensor, eps: float) -> None:
        # each access to a tensor's attributes costs as much as the kernel takes for a row
        x_strides, (*parts, n) = x.stride(), weight.shape
        assert x_strides[-1] == 1, x_strides
        self._rms_norm(
            x.data_ptr(),
            x_strides[0],
            weight.data_ptr(),
            out.data_ptr(),
            out.stride()[0],
            x.shape[0],
            parts[0] if parts else 1,
            n,
            eps,
            TYPE_CODES[x.dtype],
            TYPE_CODES[weight.dtype],
        )

    def rotate_heads_(self, x: Tensor, cos: Tensor, signed_sin: Tensor) -> None:
        """Rotate x [num_tokens, heads, head_dim] in place; tokens may be any distance apart."""
        num_tokens, heads, head_dim = x.shape
        assert x.stride(1) == head_dim, x.stride()
        self._rotate(
            x.data_ptr(),
            x.stride(0),
            num_tokens,
            heads,
            head_dim,
            cos.data_ptr(),
            signed_sin.data_ptr(),
            TYPE_CODES[x.dtype],
        )


# ------------------------------------------------------------------ draws


def argmax(kernels: Kernels, logits: Tensor) -> Tensor:
    """Return the column of the largest logit of each row (see Argmax)."""
    return _winners(kernels.argmax, logits)


def gumbel_argmax(kernels: Kernels, logits: Tensor, *columns: Tensor) -> Tensor:
    """Draw from whole rows (see GumbelArgmax); the columns are its temperatures and keys."""
    return _winners(kernels.gumbel_argmax, logits, *columns)


def filtered_argmax(kernels: Kernels, logits: Tensor, *columns: Tensor) -> Tensor:
    """Draw from filtered rows (see FilteredArgmax); the columns are its arguments after the logits."""
    return _winners(kernels.filtered_argmax, logits, *columns)


def _winners(draw: Callable[..., None], logits: Tensor, *columns: Tensor) -> Tensor:
    """Return what a kernel draws: logits float32 [R, V] and columns of R numbers -> int64 [R]."""
    assert logits.dtype is torch.float32, logits.dtype
    assert logits.stride(1) == 1, logits.stride()
    winners = torch.empty(len(logits), dtype=torch.int64)
    kept = [column.contiguous() for column in columns]  # alive until the kernel has read them
    draw(logits.data_ptr(), logits.stride(0), *logits.shape, *(one.data_ptr() for one in kept), winners.data_ptr())
    return winners


# ------------------------------------------------------------------ quantizing weights


class Quantizer:
    """Quantization of weights [N, K] of float32 or bfloat16 to codes and scales."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def per_channel(self, weight: Tensor) -> QuantizedWeight:
        """Quantize as quantized_weight.quantize_per_channel does."""
        return per_channel(*self._quantize(weight, 0, 1), weight.dtype)

    def in_groups(self, weight: Tensor, group_size: int = 32) -> QuantizedWeight:
        """Quantize as quantized_weight.quantize_in_groups does."""
        codes, scales = self._quantize(weight, group_size, -(-weight.shape[1] // group_size))
        return QuantizedWeight(codes, scales, None, 4, group_size, weight.dtype)

    def _quantize(self, weight: Tensor, group_size: int, groups: int) -> tuple[Tensor, Tensor]:
        weight = weight.contiguous()
        n, k = weight.shape
        codes, scales = torch.empty(n, k, dtype=torch.uint8), torch.empty(n, groups, dtype=torch.float16)
        self._kernels.quantize_weight(
            weight.data_ptr(), codes.data_ptr(), scales.data_ptr(), n, k, group_size, DIVISORS, TYPE_CODES[weight.dtype]
        )
        return codes, scales
