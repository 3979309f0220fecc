"""Norm and rotation (csrc/kernels/elementwise.hpp)."""

from __future__ import annotations

import torch
from torch import Tensor

from twostroke.kernels.native.extension import TYPE_CODES, Kernels


class Elementwise:
    """Kernels of one level that work a row at a time; shapes and numerics are the reference's."""

    def __init__(self, kernels: Kernels) -> None:
        """Takes the level's kernels."""
        self._rms_norm, self._rotate = kernels.rms_norm, kernels.rotate

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x: [num_rows, n] with weight [n], or [num_rows, parts, n] with [parts, n]."""
        out = torch.empty_like(x)
        self._norm(x, weight, out, eps)
        return out

    def rms_norm_(self, x: Tensor, weight: Tensor, eps: float) -> None:
        """The same in place."""
        self._norm(x, weight, x, eps)

    def _norm(self, x: Tensor, weight: Tensor, out: Tensor, eps: float) -> None:
        # each question to a tensor costs as much as the kernel takes for a row
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
        """x: [num_tokens, heads, head_dim], tokens any distance apart."""
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
