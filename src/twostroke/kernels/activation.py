"""Activations of an MLP, composed of operations that round alike wherever an element stands.

SiLU   x / (1 + exp(-x))
GELU   0.5 x (1 + tanh(u)) with u = sqrt(2 / pi) (x + 0.044715 x^3), which equals x / (1 + exp(-2 u))
       exactly: 0.5 x (1 + erf(x / sqrt(2)))
ReLU   max(x, 0), or its square

With a gate g and an up projection u: silu(g) u, gelu(g) u, or the clamped SwiGLU of gpt-oss,
g / (1 + exp(-1.702 g)) (1 + u), where g is at most 7 and u is from -7 to 7.
"""

from __future__ import annotations

import torch
from torch import Tensor

from twostroke.config.layer_spec import CLAMPED_SWIGLU, Activation, PlainActivation

_GELU_LINEAR, _GELU_CUBIC = 1.5957691216057308, 0.07135481282553325
"""2 sqrt(2 / pi), and 0.044715 times that."""
_SQRT_HALF = 0.5**0.5


def logistic(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x)) of floats [...], as a new tensor."""
    return torch.neg(x).exp_().add_(1.0).reciprocal_()


def gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """Return the up projection multiplied by its activated gate, float32 [...], as a new tensor."""
    if activation != "clamped_swiglu":
        return activated(gate, activation).mul_(up)
    limit, slope = CLAMPED_SWIGLU["swiglu_limit"], CLAMPED_SWIGLU["swiglu_alpha"]
    gate = gate.clamp(max=limit)
    return (gate / (gate * -slope).exp_().add_(1.0)).mul_(up.clamp(-limit, limit).add_(1.0))


def activated(x: Tensor, activation: PlainActivation) -> Tensor:
    """Return the activation of x, float32 [...], as a new tensor."""
    if activation == "relu":
        return x.relu()
    if activation == "relu2":
        return x.relu().square_()
    if activation == "gelu":
        return (x * _SQRT_HALF).erf_().add_(1.0).mul_(x).mul_(0.5)
    assert activation in ("silu", "gelu_tanh"), activation
    slope = x if activation == "silu" else (x * x).mul_(_GELU_CUBIC).add_(_GELU_LINEAR).mul_(x)
    return x / torch.neg(slope).exp_().add_(1.0)
