"""Norm, rotary embedding and activation, one row per program."""

# pyright: reportMissingImports=false, reportMissingParameterType=false, reportUnknownParameterType=false

from __future__ import annotations

import triton.language as tl

from twostroke.kernels.cuda.jit import jit, round_trip, rounded, wait_for_inputs


@jit
def norm_rows(
    x,
    weight,
    out,
    x_stride,
    out_stride,
    n,
    eps,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Compute out = x / rms(x), rounded to the weight's type, times the weight, in program (row, part of n numbers).

    weight: [PARTS, n] in x's type or float32; PARTS is 1 where all parts have the same weight. The order of the sum of
    squares depends only on WIDTH, and WIDTH on n.
    """
    wait_for_inputs(OVERLAPS)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, WIDTH)
    inside = columns < n
    values = tl.load(x + row * x_stride + part * n + columns, mask=inside, other=0.0)
    wide = values.to(tl.float32)
    mean = tl.sum(wide * wide, axis=0) / n
    scale = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    factors = tl.load(weight + (part % PARTS) * n + columns, mask=inside, other=0.0).to(tl.float32)
    normed = round_trip(wide * scale, weight.dtype.element_ty) * factors
    tl.store(out + row * out_stride + part * n + columns, rounded(normed, x.dtype.element_ty), mask=inside)


@jit
def rotate_rows(
    x,
    cos,
    signed_sin,
    x_stride,
    heads,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Rotate all heads of a token in place, in program (token).

    Both halves of a head are loaded together, because each needs the other's old value. HEADS and WIDTH are `heads` and
    half of HEAD_DIM, rounded up to powers of two.
    """
    half: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    head, column = tl.arange(0, HEADS)[:, None], tl.arange(0, WIDTH)[None, :]
    inside = (head < heads) & (column < half)
    first = x + token * x_stride + head * HEAD_DIM + column
    a = tl.load(first, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(first + half, mask=inside, other=0.0).to(tl.float32)
    angle, used = token * HEAD_DIM + column, column < half
    cos_a = tl.load(cos + angle, mask=used, other=0.0).to(tl.float32)
    cos_b = tl.load(cos + angle + half, mask=used, other=0.0).to(tl.float32)
    sin_a = tl.load(signed_sin + angle, mask=used, other=0.0).to(tl.float32)
    sin_b = tl.load(signed_sin + angle + half, mask=used, other=0.0).to(tl.float32)
    dtype: tl.constexpr = x.dtype.element_ty
    # each product is rounded before they are added, as torch's operators do
    tl.store(first, rounded(round_trip(a * cos_a, dtype) + round_trip(b * sin_a, dtype), dtype), mask=inside)
    tl.store(first + half, rounded(round_trip(b * cos_b, dtype) + round_trip(a * sin_b, dtype), dtype), mask=inside)


@jit
def gate_times(gate_up, out, stride, n, WIDTH: tl.constexpr, ACTIVATION: tl.constexpr, OVERLAPS: tl.constexpr):
    """Compute out = activation(gate) * up in program (row, slice); gate is the first n columns of gate_up, up the rest.

    The activation is SiLU, GELU by its tanh formula, or clamped SwiGLU (kernels/activation.py).
    """
    wait_for_inputs(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = columns < n
    gate = tl.load(gate_up + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + n + columns, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "clamped_swiglu":  # `where` keeps a NaN
        gate = tl.where(gate > 7.0, 7.0, gate)
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up)) + 1.0
    slope = gate
    if ACTIVATION == "clamped_swiglu":
        slope = gate * 1.702
    if ACTIVATION == "gelu_tanh":
        slope = (gate * gate * 0.07135481282553325 + 1.5957691216057308) * gate
    # a large negative gate gives an infinite denominator and a quotient of 0, which is right
    active = tl.div_rn(gate, 1.0 + tl.exp(-slope)) * up
    tl.store(out + row * n + columns, rounded(active, out.dtype.element_ty), mask=inside)
