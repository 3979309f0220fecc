"""Norm, rotation and activation, composed of operations that round alike wherever an element stands.

Torch runs the body of an array through vector code and its tail through scalar code. Additions, products, divisions
and square roots are exact either way; `exp` was measured to be; `silu` and `sigmoid` are not and are not used.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension (Zhang and Sennrich 2019, arXiv:1910.07467), in float32.

    Args:
        x: [..., n].
        weight: broadcastable to x, in the same type.
        eps: added to the mean of squares.

    Returns:
        [..., n] in x's type; rounded to it before the weight is applied, as transformers does.
    """
    wide = x.float()
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (wide * scale).to(x.dtype).mul_(weight)


def rms_norm_(x: Tensor, weight: Tensor, eps: float) -> None:
    """The same in place."""
    x.copy_(rms_norm(x, weight, eps))


def rotate_heads_(x: Tensor, cos: Tensor, signed_sin: Tensor) -> None:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864) in place, halves paired as in Llama.

    Args:
        x: [num_tokens, heads, head_dim].
        cos: [num_tokens, 1, head_dim], both halves alike.
        signed_sin: [num_tokens, 1, head_dim]: -sin for the first half, sin for the second.
    """
    half = x.shape[-1] // 2
    swapped = x.unflatten(-1, (2, half)).flip(-2).flatten(-2)
    x.mul_(cos).add_(swapped.mul_(signed_sin))


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, in float32. gate_up: [num_tokens, 2 n], gate first; returns [num_tokens, n] in its type."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.float()
    denominator = torch.neg(gate).exp_().add_(1.0)
    return (gate / denominator).mul_(up).to(gate_up.dtype)
