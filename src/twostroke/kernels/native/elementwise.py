"""Norm and rotation (csrc/kernels/elementwise.hpp)."""

from __future__ import annotations

import torch
from torch import Tensor

from twostroke.kernels.native.extension import TYPE_CODES, Kernels


class Elementwise:
    """Kernels of one level that work a row at a time; shapes and numerics are the reference's."""

    def __init__(self, kernels: Kernels) -> None:
        """Takes the level's kernels."""
        self._kernels = kernels

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x: [num_rows, n] with weight [n], or [num_rows, parts, n] with [parts, n]."""
        out = torch.empty_like(x)
        self._norm(x, weight, out, eps)
        return out

    def rms_norm_(self, x: Tensor, weight: Tensor, eps: float) -> None:
        """The same in place."""
        self._norm(x, weight, x, eps)

    def _norm(self, x: Tensor, weight: Tensor, out: Tensor, eps: float) -> None:
        parts, n = weight.shape if weight.dim() == 2 else (1, weight.shape[0])
        assert x.stride(-1) == 1, x.stride()
        self._kernels.rms_norm(
            x.data_ptr(),
            x.stride(0),
            weight.data_ptr(),
            out.data_ptr(),
            out.stride(0),
            x.shape[0],
            parts,
            n,
            eps,
            TYPE_CODES[x.dtype],
            TYPE_CODES[weight.dtype],
        )

    def rotate_heads_(self, x: Tensor, cos: Tensor, signed_sin: Tensor) -> None:
        """x: [num_tokens, heads, head_dim], tokens any distance apart."""
        num_tokens, heads, head_dim = x.shape
        assert x.stride(1) == head_dim, x.stride()
        self._kernels.rotate(
            x.data_ptr(),
            x.stride(0),
            num_tokens,
            heads,
            head_dim,
            cos.data_ptr(),
            signed_sin.data_ptr(),
            TYPE_CODES[x.dtype],
        )
