"""Norms over the last dimension."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from twostroke.kernels.dispatch import NormWeight, Operators


class Norm(Protocol):
    """Either of them."""

    def __call__(self, x: Tensor) -> Tensor:
        """Norm x [..., n]."""
        ...


class RMSNorm:
    """Root-mean-square norm over the last dimension."""

    def __init__(self, weight: Tensor, eps: float, operators: Operators) -> None:
        """Takes weight, broadcastable to what will be normed."""
        self.weight, self.eps = weight, eps
        self._rms_norm, self._rms_norm_ = operators.rms_norm, operators.rms_norm_

    @property
    def bound(self) -> NormWeight:
        """For a back end that binds it."""
        return NormWeight(self.weight, self.eps)

    def __call__(self, x: Tensor) -> Tensor:
        """Norms x [..., n]."""
        return self._rms_norm(x, self.weight, self.eps)

    def apply_(self, x: Tensor) -> None:
        """Norms x [..., n] in place."""
        self._rms_norm_(x, self.weight, self.eps)


class LayerNorm:
    """Layer norm over the last dimension (Ba et al. 2016, arXiv:1607.06450), in float32, by torch's operators."""

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        """Takes weight and bias [n]."""
        self._weight, self._eps = weight.float(), eps
        self._bias = None if bias is None else bias.float()

    def __call__(self, x: Tensor) -> Tensor:
        """Norm x [..., n]; the result is rounded once."""
        wide = x.float()
        centred = wide - wide.mean(-1, keepdim=True)
        scale = centred.square().mean(-1, keepdim=True).add_(self._eps).rsqrt_()
        normed = centred.mul_(scale).mul_(self._weight)
        return (normed if self._bias is None else normed.add_(self._bias)).to(x.dtype)
