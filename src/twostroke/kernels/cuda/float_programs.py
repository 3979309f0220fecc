"""Products with float weights, in one order of summation for every batch.

    inputs     |0 .. SPAN|SPAN .. 2 SPAN| ...          spans: one product each
                run 0 .... | run 1 .... | run 2 .... | run 3 ....     runs: RUNS of them

Each run is summed from its first span to its last, and the runs are added in their order: by the program of the tile,
or, where a step has too few tiles for a card, by another program from stored runs.

Programs of a tile are counted in bands of BAND tiles of rows, so that programs that run at once share what they read:

    rows  0   2   4 | 6  8        BAND = 2, three tiles of outputs
          1   3   5 | 7  9
"""

# pyright: reportMissingImports=false, reportMissingParameterType=false, reportUnknownParameterType=false

from __future__ import annotations

import triton.language as tl

from twostroke.kernels.cuda.jit import jit, jit_unspecialized, prefetch_rows, product, wait_for_inputs
from twostroke.kernels.cuda.linear_programs import finished


@jit
def place_of_tile(num_rows, num_channels, HEIGHT: tl.constexpr, CHANNELS: tl.constexpr, BAND: tl.constexpr):
    """Return the first row and the first output of this program's tile."""
    tiles_of_rows, tiles_of_channels = tl.cdiv(num_rows, HEIGHT), tl.cdiv(num_channels, CHANNELS)
    band = tl.program_id(0) // (BAND * tiles_of_channels)
    height_of_band = tl.minimum(tiles_of_rows - band * BAND, BAND)
    within = tl.program_id(0) % (BAND * tiles_of_channels)
    return (band * BAND + within % height_of_band) * HEIGHT, within // height_of_band * CHANNELS


@jit_unspecialized("num_rows", "runs_at_once")
def multiply_floats(
    x,
    weight,
    bias,
    residual,
    y,
    parts,
    num_rows,
    num_channels,
    num_inputs,
    spans_of_run,
    x_stride,
    residual_stride,
    runs_at_once,
    HEIGHT: tl.constexpr,
    CHANNELS: tl.constexpr,
    SPAN: tl.constexpr,
    BAND: tl.constexpr,
    RUNS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    PREFETCHED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Compute y [num_rows, num_channels] or parts of it in program (tile of HEIGHT rows and CHANNELS outputs, some
    runs).

    weight: [num_channels, num_inputs], contiguous; bias: [num_channels]; residual: [num_rows, num_channels]. parts:
    float32 [RUNS, num_rows, num_channels], where runs_at_once is less than RUNS (and then 1): to be added by
    linear_programs.add_runs. IS_WHOLE: num_inputs is a multiple of SPAN; then the last row and the last output are read
    instead of missing ones, since loads without a mask are faster. PREFETCHED: spans of the weight that are prefetched
    before the inputs are ready; 0 where num_inputs is no such multiple.
    """
    first_row, first_channel = place_of_tile(num_rows, num_channels, HEIGHT, CHANNELS, BAND)
    row, channel = first_row + tl.arange(0, HEIGHT), first_channel + tl.arange(0, CHANNELS)
    is_row, is_channel = (row < num_rows)[:, None], (channel < num_channels)[:, None]
    row_read, channel_read = row, channel
    if IS_WHOLE:
        row_read, channel_read = tl.minimum(row, num_rows - 1), tl.minimum(channel, num_channels - 1)
    of_row = x + row_read.to(tl.int64)[:, None] * x_stride
    of_channel = weight + channel_read.to(tl.int64)[:, None] * num_inputs
    first_run = tl.program_id(1) * runs_at_once
    num_spans = tl.cdiv(num_inputs, SPAN)
    if OVERLAPS and PREFETCHED:
        first_span = tl.minimum(first_run * spans_of_run, num_spans - 1)
        span_bytes: tl.constexpr = SPAN * weight.dtype.element_ty.primitive_bitwidth // 8
        num_bytes = tl.minimum(num_spans - first_span, PREFETCHED) * span_bytes
        place = tl.minimum(channel, num_channels - 1).to(tl.int64) * num_inputs + first_span * SPAN
        prefetch_rows(weight + place, num_bytes + tl.zeros((CHANNELS,), tl.int32))
    wait_for_inputs(OVERLAPS)
    total = tl.zeros((HEIGHT, CHANNELS), tl.float32)
    sums = tl.zeros((HEIGHT, CHANNELS), tl.float32)
    # one loop instead of one per run, so that loads continue where a run ends
    last_span = tl.minimum((first_run + runs_at_once) * spans_of_run, num_spans)
    for span in range(first_run * spans_of_run, last_span):
        column = span * SPAN + tl.arange(0, SPAN)
        if IS_WHOLE:
            inputs = tl.load(of_row + column[None, :])
            weights = tl.load(of_channel + column[None, :])
        else:
            is_input = (column < num_inputs)[None, :]
            inputs = tl.load(of_row + column[None, :], mask=is_row & is_input, other=0.0)
            weights = tl.load(of_channel + column[None, :], mask=is_channel & is_input, other=0.0)
        sums = product(inputs, tl.trans(weights), sums)
        if (span + 1) % spans_of_run == 0:
            total += sums
            sums = tl.zeros((HEIGHT, CHANNELS), tl.float32)
    total += sums
    mask = is_row & (channel < num_channels)[None, :]
    place = row.to(tl.int64)[:, None] * num_channels + channel[None, :]
    if runs_at_once == RUNS:
        found = finished(
            total, bias, residual, row[:, None], channel[None, :], mask, residual_stride, y.dtype.element_ty, HAS_BIAS,
            HAS_RESIDUAL,
        )  # fmt: skip
        tl.store(y + place, found, mask=mask)
    else:
        tl.store(parts + first_run.to(tl.int64) * num_rows * num_channels + place, total, mask=mask)


@jit_unspecialized("num_rows")
def multiply_by_tma(
    x,
    weight,
    bias,
    residual,
    y,
    num_rows,
    num_channels,
    num_inputs,
    spans_of_run,
    residual_stride,
    HEIGHT: tl.constexpr,
    CHANNELS: tl.constexpr,
    SPAN: tl.constexpr,
    BAND: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Compute `multiply_floats` of all runs, with the same bits, in program (tile of HEIGHT rows and CHANNELS outputs).

    x, weight: descriptors of blocks [HEIGHT, SPAN] and [CHANNELS, SPAN]. The card's copy engine (TMA) reads them, with
    zeros beyond the end. A run is a whole number of these spans.
    """
    wait_for_inputs(OVERLAPS)
    first_row, first_channel = place_of_tile(num_rows, num_channels, HEIGHT, CHANNELS, BAND)
    total = tl.zeros((HEIGHT, CHANNELS), tl.float32)
    sums = tl.zeros((HEIGHT, CHANNELS), tl.float32)
    for span in range(0, tl.cdiv(num_inputs, SPAN)):
        inputs, weights = x.load([first_row, span * SPAN]), weight.load([first_channel, span * SPAN])
        sums = product(inputs, tl.trans(weights), sums)
        if (span + 1) % spans_of_run == 0:
            total += sums
            sums = tl.zeros((HEIGHT, CHANNELS), tl.float32)
    total += sums
    row, channel = first_row + tl.arange(0, HEIGHT), first_channel + tl.arange(0, CHANNELS)
    mask = (row < num_rows)[:, None] & (channel < num_channels)[None, :]
    found = finished(
        total, bias, residual, row[:, None], channel[None, :], mask, residual_stride, y.dtype.element_ty, HAS_BIAS,
        HAS_RESIDUAL,
    )  # fmt: skip
    tl.store(y + row.to(tl.int64)[:, None] * num_channels + channel[None, :], found, mask=mask)
