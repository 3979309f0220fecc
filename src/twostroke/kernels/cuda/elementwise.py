"""Norm, rotary embedding and activation on the card; shapes and numerics are those of kernels/reference."""

from __future__ import annotations

import torch
from torch import Tensor

from twostroke.config.layer_spec import Activation
from twostroke.kernels.cuda import elementwise_programs as programs
from twostroke.kernels.cuda.jit import NO_FP_FUSION, launch_options, power_of_two

_GATE_WIDTH = 1024


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Apply the norm to x [num_rows, n] with weight [n], or to [num_rows, parts, n] with [parts, n]."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _norm(x, weight, out, eps)
    return out


def rms_norm_(x: Tensor, weight: Tensor, eps: float) -> None:
    """Apply `rms_norm` in place."""
    _norm(x, weight, x, eps)


def _norm(x: Tensor, weight: Tensor, out: Tensor, eps: float) -> None:
    n = x.shape[-1]
    num_parts = x.shape[1] if x.dim() == 3 else 1
    weights = weight.shape[0] if weight.dim() == 2 else 1
    assert weights in (1, num_parts), (weight.shape, x.shape)
    assert weight.is_contiguous(), weight.stride()
    assert x.stride(-1) == out.stride(-1) == 1, (x.stride(), out.stride())
    assert x.dim() == 2 or x.stride(1) == out.stride(1) == n, (x.stride(), out.stride())
    if len(x):
        programs.norm_rows[(len(x), num_parts)](
            x,
            weight,
            out,
            x.stride(0),
            out.stride(0),
            n,
            eps,
            PARTS=weights,
            WIDTH=power_of_two(n),
            **launch_options(x.device),
        )


def rotate_heads_(x: Tensor, cos: Tensor, signed_sin: Tensor) -> None:
    """Rotate x [num_tokens, heads, head_dim] in place; tokens may be any distance apart."""
    num_tokens, heads, head_dim = x.shape
    assert x.stride(1) == head_dim, x.stride()
    assert cos.is_contiguous(), cos.stride()
    assert signed_sin.is_contiguous(), signed_sin.stride()
    if num_tokens:
        programs.rotate_rows[(num_tokens,)](
            x,
            cos,
            signed_sin,
            x.stride(0),
            heads,
            HEAD_DIM=head_dim,
            HEADS=power_of_two(heads),
            WIDTH=power_of_two(head_dim // 2),
            **NO_FP_FUSION,
        )


def gate_and_mul(gate_up: Tensor, activation: Activation) -> Tensor:
    """Apply kernels.activation.gated in float32 to gate_up [num_rows, 2 n], gate first; return [num_rows, n] in its
    type."""
    num_rows, n = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_rows, n, dtype=gate_up.dtype, device=gate_up.device)
    assert gate_up.stride(-1) == 1, gate_up.stride()
    if num_rows:
        width = min(_GATE_WIDTH, power_of_two(n))
        programs.gate_times[(num_rows, -(-n // width))](
            gate_up,
            out,
            gate_up.stride(0),
            n,
            WIDTH=width,
            ACTIVATION=activation,
            **launch_options(gate_up.device),
        )
    return out
