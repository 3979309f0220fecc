"""Products with weights of floats, in one order for a row whatever its batch.

    inputs     |0 .. SPAN|SPAN .. 2 SPAN| ...          spans: one product each
                run 0 .... | run 1 .... | run 2 .... | run 3 ....     runs: RUNS of them

Each run is summed from its first span to its last, and the runs are added in their order: by the program of the tile,
or, where a step has too few tiles for a card, by another program from what the runs have written down.

Programs of a tile are counted in bands of BAND tiles of rows, so that those that run at once share what they read:

    rows  0   2   4 | 6  8        BAND = 2, three tiles of outputs
          1   3   5 | 7  9
"""

# pyright: reportMissingImports=false, reportMissingParameterType=false, reportUnknownParameterType=false

from __future__ import annotations

import triton.language as tl

from twostroke.kernels.cuda.jit import jit_for_any, product
from twostroke.kernels.cuda.linear_programs import finished


@jit_for_any("num_rows", "runs_at_once")
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
):
    """Program (tile of HEIGHT rows and CHANNELS outputs, some runs): y [num_rows, num_channels], or parts of it.

    weight: [num_channels, num_inputs], contiguous; bias: [num_channels]; residual: [num_rows, num_channels]. parts:
    float32 [RUNS, num_rows, num_channels], where runs_at_once is less than RUNS (and then 1): to be added by
    linear_programs.add_runs. IS_WHOLE: num_inputs is a multiple of SPAN; then the last row and the last output are read
    in the place of those that are not there, since loads without a mask are faster.
    """
    tiles_of_rows, tiles_of_channels = tl.cdiv(num_rows, HEIGHT), tl.cdiv(num_channels, CHANNELS)
    band = tl.program_id(0) // (BAND * tiles_of_channels)
    height_of_band = tl.minimum(tiles_of_rows - band * BAND, BAND)
    within = tl.program_id(0) % (BAND * tiles_of_channels)
    row = (band * BAND + within % height_of_band) * HEIGHT + tl.arange(0, HEIGHT)
    channel = within // height_of_band * CHANNELS + tl.arange(0, CHANNELS)
    is_row, is_channel = (row < num_rows)[:, None], (channel < num_channels)[:, None]
    row_read, channel_read = row, channel
    if IS_WHOLE:
        row_read, channel_read = tl.minimum(row, num_rows - 1), tl.minimum(channel, num_channels - 1)
    of_row = x + row_read.to(tl.int64)[:, None] * x_stride
    of_channel = weight + channel_read.to(tl.int64)[:, None] * num_inputs
    first_run = tl.program_id(1) * runs_at_once
    num_spans = tl.cdiv(num_inputs, SPAN)
    total = tl.zeros((HEIGHT, CHANNELS), tl.float32)
    for run in range(first_run, first_run + runs_at_once):
        sums = tl.zeros((HEIGHT, CHANNELS), tl.float32)
        for span in range(run * spans_of_run, tl.minimum((run + 1) * spans_of_run, num_spans)):
            column = span * SPAN + tl.arange(0, SPAN)
            if IS_WHOLE:
                inputs = tl.load(of_row + column[None, :])
                weights = tl.load(of_channel + column[None, :])
            else:
                is_input = (column < num_inputs)[None, :]
                inputs = tl.load(of_row + column[None, :], mask=is_row & is_input, other=0.0)
                weights = tl.load(of_channel + column[None, :], mask=is_channel & is_input, other=0.0)
            sums = product(inputs, tl.trans(weights), sums)
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
