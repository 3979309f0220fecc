"""Products with weights of 8 or 4 bits, which are dequantized just before the product.

    inputs     |0 .. 127|128 .. 255| ...           spans: two products of 64 inputs each
                run 0 ........ | run 1 ... | run 2 ... | run 3 ...

Each run is summed from its first span to its last, and the runs are added in their order. A few rows are too little
work for a card, so separate programs compute and store their runs, and another adds them: in the same order, with the
same bits.
"""

# pyright: reportMissingImports=false, reportMissingParameterType=false, reportUnknownParameterType=false

from __future__ import annotations

import triton.language as tl

from twostroke.kernels.cuda.fp8 import from_e4m3
from twostroke.kernels.cuda.jit import jit, jit_unspecialized, product, round_trip, rounded, wait_for_inputs

HALF_SPAN = tl.constexpr(64)


@jit
def finished(
    total,
    bias,
    residual,
    row,
    channel,
    mask,
    residual_stride,
    dtype: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """Add bias and residual to the sums of a tile, and round where kernels/reference rounds."""
    if HAS_BIAS:
        total += tl.load(bias + channel, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        before = tl.load(residual + row.to(tl.int64) * residual_stride + channel, mask=mask, other=0.0).to(tl.float32)
        total = before + round_trip(total, dtype)
    return rounded(total, dtype)


@jit
def half_span(
    sums,
    x,
    codes,
    scales,
    mins,
    order,
    row,
    channel,
    first,
    num_rows,
    num_channels,
    num_inputs,
    num_groups,
    x_stride,
    BITS: tl.constexpr,
    IS_FP8: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HAS_MINS: tl.constexpr,
    HAS_ORDER: tl.constexpr,
):
    """Return sums + x W^T over the 64 inputs from `first` on. codes: uint8 [channels, 64], of these inputs."""
    column = first + tl.arange(0, HALF_SPAN)
    is_input = column < num_inputs
    source = column
    if HAS_ORDER:
        source = tl.load(order + column, mask=is_input, other=0)
    is_x = (row < num_rows)[:, None] & is_input[None, :]
    inputs = tl.load(x + row.to(tl.int64)[:, None] * x_stride + source[None, :], mask=is_x, other=0.0)
    of_group = channel.to(tl.int64)[:, None] * num_groups + (column // GROUP_SIZE)[None, :]
    is_weight = (channel < num_channels)[:, None] & is_input[None, :]
    middle: tl.constexpr = 2 ** (BITS - 1)
    scale = tl.load(scales + of_group, mask=is_weight, other=0.0).to(tl.float32)
    numbers = from_e4m3(codes) if IS_FP8 else codes.to(tl.float32) - middle
    weights = numbers * scale
    if HAS_MINS:
        weights -= tl.load(mins + of_group, mask=is_weight, other=0.0).to(tl.float32)
    return product(inputs, tl.trans(rounded(weights, x.dtype.element_ty)), sums)


@jit_unspecialized("num_rows", "runs_at_once")
def multiply(
    x,
    codes,
    scales,
    mins,
    order,
    bias,
    residual,
    y,
    parts,
    num_rows,
    num_channels,
    num_inputs,
    num_groups,
    num_spans,
    row_bytes,
    x_stride,
    residual_stride,
    runs_at_once,
    HEIGHT: tl.constexpr,
    CHANNELS: tl.constexpr,
    RUNS: tl.constexpr,
    BITS: tl.constexpr,
    IS_FP8: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HAS_MINS: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Compute y [num_rows, num_channels] or parts [RUNS, ...] of it in program (CHANNELS outputs, HEIGHT rows, some
    runs).

    codes: uint8 [num_channels, row_bytes]; in 4 bits a span is 64 bytes, its first 64 inputs low and the others high.
    runs_at_once: RUNS, or 1: then sums are written to `parts` (float32), to be added by `add_runs`.
    """
    wait_for_inputs(OVERLAPS)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    row = tl.program_id(1) * HEIGHT + tl.arange(0, HEIGHT)
    first_run = tl.program_id(2) * runs_at_once
    spans_of_run = (num_spans + RUNS - 1) // RUNS
    is_channel = (channel < num_channels)[:, None]
    of_channel = codes + channel.to(tl.int64)[:, None] * row_bytes
    byte = tl.arange(0, HALF_SPAN)[None, :]
    total = tl.zeros((HEIGHT, CHANNELS), tl.float32)
    for run in range(first_run, first_run + runs_at_once):
        sums = tl.zeros((HEIGHT, CHANNELS), tl.float32)
        for span in range(run * spans_of_run, tl.minimum((run + 1) * spans_of_run, num_spans)):
            first = span * 2 * HALF_SPAN
            if BITS == 4:
                pairs = tl.load(of_channel + span * HALF_SPAN + byte, mask=is_channel, other=0)
                low, high = pairs & 15, pairs >> 4
            else:
                low = tl.load(of_channel + first + byte, mask=is_channel & (first + byte < num_inputs), other=0)
                behind = first + HALF_SPAN + byte
                high = tl.load(of_channel + behind, mask=is_channel & (behind < num_inputs), other=0)
            sums = half_span(
                sums, x, low, scales, mins, order, row, channel, first, num_rows, num_channels, num_inputs, num_groups,
                x_stride, BITS, IS_FP8, GROUP_SIZE, HAS_MINS, HAS_ORDER,
            )  # fmt: skip
            sums = half_span(
                sums, x, high, scales, mins, order, row, channel, first + HALF_SPAN, num_rows, num_channels, num_inputs,
                num_groups, x_stride, BITS, IS_FP8, GROUP_SIZE, HAS_MINS, HAS_ORDER,
            )  # fmt: skip
        total += sums
    mask = (row < num_rows)[:, None] & (channel < num_channels)[None, :]
    place = row.to(tl.int64)[:, None] * num_channels + channel[None, :]
    if runs_at_once == 1:
        tl.store(parts + first_run.to(tl.int64) * num_rows * num_channels + place, total, mask=mask)
    else:
        found = finished(
            total, bias, residual, row[:, None], channel[None, :], mask, residual_stride, y.dtype.element_ty, HAS_BIAS,
            HAS_RESIDUAL,
        )  # fmt: skip
        tl.store(y + place, found, mask=mask)


@jit_unspecialized("num_rows")
def add_runs(
    parts,
    bias,
    residual,
    y,
    num_rows,
    num_channels,
    residual_stride,
    CHANNELS: tl.constexpr,
    RUNS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Add the runs of `multiply` in their order, in program (CHANNELS outputs, row)."""
    wait_for_inputs(OVERLAPS)
    row = tl.program_id(1)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    mask = channel < num_channels
    place = row.to(tl.int64) * num_channels + channel
    total = tl.zeros((CHANNELS,), tl.float32)
    for run in range(0, RUNS):
        total += tl.load(parts + run * num_rows.to(tl.int64) * num_channels + place, mask=mask, other=0.0)
    found = finished(
        total, bias, residual, row, channel, mask, residual_stride, y.dtype.element_ty, HAS_BIAS, HAS_RESIDUAL
    )
    tl.store(y + place, found, mask=mask)
