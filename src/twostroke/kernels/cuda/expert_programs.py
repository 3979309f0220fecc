"""Products of all experts of a step in one launch; each pair of a token and an expert is a row.

    pairs     | expert 0 | expert 2        | expert 5 |     sorted by expert; starts says where those of each begin
    blocks    | 0        | 1      | 2      | 3        |     of HEIGHT rows; none has rows of two experts

The host does not know how many blocks a step has. It launches the most that are possible, and a program finds its
expert by counting the blocks of the experts before it. A row is summed in the runs of float_programs.multiply_floats,
with the same bits.
"""

# pyright: reportMissingImports=false, reportMissingParameterType=false, reportUnknownParameterType=false

from __future__ import annotations

import triton.language as tl

from twostroke.kernels.cuda.jit import jit, jit_unspecialized, product, rounded, wait_for_inputs
from twostroke.kernels.cuda.linear_programs import finished


@jit
def expert_of_block(starts, num_experts, HEIGHT: tl.constexpr, EXPERTS: tl.constexpr):
    """Return the expert of this program's block, and the block's first row; num_experts if there are fewer blocks."""
    expert = tl.arange(0, EXPERTS)
    is_expert = expert < num_experts
    begins = tl.load(starts + expert, mask=is_expert, other=0)
    ends = tl.load(starts + expert + 1, mask=is_expert, other=0)
    blocks = tl.cdiv(ends - begins, HEIGHT).to(tl.int32)
    is_before = tl.cumsum(blocks, 0) <= tl.program_id(0)
    own = tl.minimum(tl.sum(is_before.to(tl.int32), 0), num_experts)
    nth = tl.program_id(0) - tl.sum(tl.where(is_before, blocks, 0), 0)
    begin = tl.sum(tl.where(expert == own, begins, 0), 0)
    return own, begin + nth * HEIGHT


@jit
def multiply_experts(
    x,
    first_weight,
    places,
    biases,
    tokens,
    starts,
    y,
    num_experts,
    num_channels,
    num_inputs,
    spans_of_run,
    x_stride,
    HEIGHT: tl.constexpr,
    CHANNELS: tl.constexpr,
    SPAN: tl.constexpr,
    EXPERTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_OF_TOKENS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Compute y [num_pairs, num_channels] in program (block of HEIGHT pairs, CHANNELS outputs).

    places: int64 [num_experts], where each weight [num_channels, num_inputs] starts, in elements from the first one.
    biases: [num_experts, num_channels]. starts: int64 [num_experts + 1]. IS_OF_TOKENS: a pair reads the row of x given
    by tokens, int64 [num_pairs]; otherwise its own. EXPERTS: num_experts rounded up to a power of two.
    """
    wait_for_inputs(OVERLAPS)
    expert, first_row = expert_of_block(starts, num_experts, HEIGHT, EXPERTS)
    if expert < num_experts:
        pair, channel = first_row + tl.arange(0, HEIGHT), tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        is_row = pair < tl.load(starts + expert + 1)
        row = pair
        if IS_OF_TOKENS:
            row = tl.load(tokens + pair, mask=is_row, other=0)
        of_row = x + row.to(tl.int64)[:, None] * x_stride
        weight = first_weight + tl.multiple_of(tl.load(places + expert), 8)
        of_channel = weight + channel.to(tl.int64)[:, None] * num_inputs
        is_channel = channel < num_channels
        total = tl.zeros((HEIGHT, CHANNELS), tl.float32)
        sums = tl.zeros((HEIGHT, CHANNELS), tl.float32)
        for span in range(0, tl.cdiv(num_inputs, SPAN)):
            column = span * SPAN + tl.arange(0, SPAN)
            is_input = (column < num_inputs)[None, :]
            inputs = tl.load(of_row + column[None, :], mask=is_row[:, None] & is_input, other=0.0)
            weights = tl.load(of_channel + column[None, :], mask=is_channel[:, None] & is_input, other=0.0)
            sums = product(inputs, tl.trans(weights), sums)
            if (span + 1) % spans_of_run == 0:
                total += sums
                sums = tl.zeros((HEIGHT, CHANNELS), tl.float32)
        total += sums
        mask = is_row[:, None] & is_channel[None, :]
        found = finished(
            total, biases + expert.to(tl.int64) * num_channels, y, pair[:, None], channel[None, :], mask, 0,
            y.dtype.element_ty, HAS_BIAS, HAS_RESIDUAL=False,
        )  # fmt: skip
        tl.store(y + pair.to(tl.int64)[:, None] * num_channels + channel[None, :], found, mask=mask)


@jit_unspecialized("num_chosen")
def add_pairs(products, places, weights, y, num_chosen, num_channels, CHANNELS: tl.constexpr, OVERLAPS: tl.constexpr):
    """Add the token's products [num_channels] times their weights, by rising expert, in program (CHANNELS outputs,
    token).

    places: int64 [num_tokens, num_chosen], rows of products; weights: float32, the same shape.
    """
    wait_for_inputs(OVERLAPS)
    token = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    mask = channel < num_channels
    total = tl.zeros((CHANNELS,), tl.float32)
    for nth in range(0, num_chosen):
        place, weight = tl.load(places + token * num_chosen + nth), tl.load(weights + token * num_chosen + nth)
        found = tl.load(products + place * num_channels + channel, mask=mask, other=0.0).to(tl.float32)
        total += found * weight
    tl.store(y + token * num_channels + channel, rounded(total, y.dtype.element_ty), mask=mask)
