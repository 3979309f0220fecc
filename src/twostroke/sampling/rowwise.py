"""Row reductions whose result for a row is bitwise the same alone and among others, on any number of threads.

`torch.sum` of one row of 151,936 differs from the same row among two: a reduction to a single output is split in
two passes. Maxima are exact in any order; sums are not, so the ones that matter are written out here.
"""

from __future__ import annotations

import torch
from torch import Tensor

SLICE_ELEMENTS = 2**15 - 1
"""Elements worked on at once on a CPU. Just below ATen's grain size: intermediate results stay in the L2 cache, and
no operator starts a parallel region, which on a busy machine waits for the slowest thread to be scheduled."""


def row_sums(values: Tensor) -> Tensor:
    """Sum of each row, by adding the upper half of the columns to the lower one until one is left.

    The tree depends on the number of columns alone. values: [R, V], overwritten; returns [R, 1].
    """
    width = values.shape[1]
    while width > 1:
        half = (width + 1) // 2
        values[:, : width - half].add_(values[:, half:width])
        width = half
    return values[:, :1].clone()


def lowest_argmax(values: Tensor) -> Tensor:
    """Column of the largest value of each row, the lowest one among equals. [R, V]; int64 [R].

    torch.argmax promises the first of equal maxima (since 1.7); the unit tests hold it to that. NaN counts as largest.
    """
    return values.argmax(dim=-1)


def lowest_id_of_max(values: Tensor, ids: Tensor) -> Tensor:
    """The id with the largest value of each row, the lowest id among equals, in whatever order they come.

    values, ids: [R, C]; int64 [R].
    """
    largest = values.amax(dim=-1, keepdim=True)
    return torch.where(values == largest, ids, torch.iinfo(torch.int64).max).amin(dim=-1)


def largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row in falling order, equal ones by rising column.

    torch.topk leaves open which of several equal values it returns and in what order; both are settled here.
    values: [R, V]; returns values and columns (int64), both [R, count].
    """
    num_columns = values.shape[1]
    count = min(count, num_columns)
    width = min(count + 1, num_columns)  # one more shows whether the last one has an equal outside
    top, columns = values.topk(width, dim=-1)
    columns, order = columns.sort(dim=-1)
    top, order = top.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    columns = columns.gather(-1, order)
    if width > count:
        cut_through = (top[:, count - 1] == top[:, count]).nonzero()[:, 0] if count else top.new_zeros(0).long()
        if len(cut_through):
            full, order = values[cut_through].sort(dim=-1, descending=True, stable=True)
            top[cut_through], columns[cut_through] = full[:, :width], order[:, :width]
    return top[:, :count], columns[:, :count]
