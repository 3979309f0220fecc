"""Soft caps, which bend numbers towards a bound (Gemma 2, arXiv:2408.00118)."""

from __future__ import annotations

from torch import Tensor


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(x / cap), by tanh(y) = 1 - 2 / (1 + exp(2 y)), whose bits do not depend on an element's
    position.

    Args:
        x: float32 [...].
        cap: the bound.

    Returns:
        [...], from -cap to cap.
    """
    return (x * (2.0 / cap)).exp_().add_(1.0).reciprocal_().mul_(-2.0 * cap).add_(cap)
