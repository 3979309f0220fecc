"""Norm, rotary embedding and activation, composed of operations that round alike wherever an element stands.

Torch runs the body of an array through vector code and its tail through scalar code. Additions, products, divisions and
square roots give equal results in both. `exp` does too, by measurement. `silu` and `sigmoid` do not and are not
used.
"""

from __future__ import annotations

from torch import Tensor

from twostroke.config.layer_spec import Activation
from twostroke.kernels.activation import gated


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Apply a root-mean-square norm over the last dimension (Zhang and Sennrich 2019, arXiv:1910.07467), in float32.

    Args:
        x: [..., n].
        weight: broadcastable to x, in the same type or in float32.
        eps: added to the mean of squares.

    Returns:
        [..., n] in x's type; rounded to the weight's type before the weight is applied, as transformers does.
    """
    wide = x.float()
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (wide * scale).to(weight.dtype).mul_(weight).to(x.dtype)


def rms_norm_(x: Tensor, weight: Tensor, eps: float) -> None:
    """Apply `rms_norm` in place."""
    x.copy_(rms_norm(x, weight, eps))


def rotate_heads_(x: Tensor, cos: Tensor, signed_sin: Tensor) -> None:
    """Apply rotary position embedding (Su et al. 2021, arXiv:2104.09864) in place, halves paired as in Llama.

    Args:
        x: [num_tokens, heads, head_dim].
        cos: [num_tokens, 1, head_dim], both halves equal.
        signed_sin: [num_tokens, 1, head_dim]: -sin for the first half, sin for the second.
    """
    half = x.shape[-1] // 2
    swapped = x.unflatten(-1, (2, half)).flip(-2).flatten(-2)
    x.mul_(cos).add_(swapped.mul_(signed_sin))


def gate_and_mul(gate_up: Tensor, activation: Activation) -> Tensor:
    """Apply `gated` in float32 to gate_up [num_tokens, 2 n], gate first; return [num_tokens, n] in its type."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gated(gate.float(), up.float(), activation).to(gate_up.dtype)
