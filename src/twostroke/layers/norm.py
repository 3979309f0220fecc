"""RMSNorm."""

from __future__ import annotations

from torch import Tensor

from twostroke.kernels.dispatch import Operators


class RMSNorm:
    """Root-mean-square norm over the last dimension."""

    def __init__(self, weight: Tensor, eps: float, operators: Operators) -> None:
        """Takes weight, broadcastable to what will be normed."""
        self.weight, self.eps = weight, eps
        self._rms_norm, self._rms_norm_ = operators.rms_norm, operators.rms_norm_

    def __call__(self, x: Tensor) -> Tensor:
        """Norms x [..., n]."""
        return self._rms_norm(x, self.weight, self.eps)

    def apply_(self, x: Tensor) -> None:
        """Norms x [..., n] in place."""
        self._rms_norm_(x, self.weight, self.eps)
