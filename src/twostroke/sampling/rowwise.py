"""Row operations whose result for a row has the same bits alone and among others, on any number of threads.

`torch.sum` of one row of 151,936 differs from the same row among two, because a reduction to a single output is split
in two passes. Maxima, minima and sequential sums have only one result; the sampler uses no other reductions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from twostroke.kernels.memory import send

SLICE_ELEMENTS = 2**15 - 1
"""Elements processed at once on a CPU. It is just below ATen's grain size: intermediate results stay in the L2 cache,
and no operator starts a parallel region, which on a busy machine waits for the slowest thread to be scheduled (8 ms
were seen, 22 times a step). Advanced indexing starts one from 3,000 entries on; index_select, index_copy_ and
index_fill_ do not."""


def log_(values: Tensor) -> Tensor:
    """Apply the natural logarithm in place; contiguous. On a CPU by numpy, in a third of torch's time and on one
    thread.

    torch's logarithm starts a parallel region from 2,048 elements on; [64, 4096] in slices would start hundreds.
    """
    if values.device.type == "cpu":
        array = values.numpy()
        np.log(array, out=array)
        return values
    return values.log_()


def exp_(values: Tensor) -> Tensor:
    """Apply the exponential function in place; contiguous. On a CPU by numpy (see log_)."""
    if values.device.type == "cpu":
        array = values.numpy()
        np.exp(array, out=array)
        return values
    return values.exp_()


def lowest_argmax(values: Tensor) -> Tensor:
    """Return the column of the largest value of each row, the lowest of equal ones; a NaN counts as largest.

    numpy and torch (since 1.7) both promise the first of equal maxima. On a CPU numpy takes 13 microseconds for 64 rows
    of 4,096 where torch takes 150. [R, V]; int64 [R].
    """
    if values.device.type == "cpu":
        return torch.from_numpy(values.numpy().argmax(axis=-1))
    return values.argmax(dim=-1)


def row_maxima(values: Tensor) -> Tensor:
    """Return the largest value of each row; NaN if it has one. [R, V]; [R, 1]."""
    if values.device.type == "cpu":
        return torch.from_numpy(values.numpy().max(axis=-1, keepdims=True))
    return values.amax(dim=-1, keepdim=True)


def exclude_below_(logits: Tensor, floor: Tensor) -> None:
    """Set values below a row's floor to -inf. [R, V] and [R, 1], float32.

    On a CPU numpy compares 151,936 logits with one number in 11 microseconds, torch in 300.
    """
    if logits.device.type == "cpu":
        array = logits.numpy()
        np.putmask(array, array < floor.numpy(), -np.inf)
    else:
        logits.masked_fill_(logits < floor, -torch.inf)


def keep_set_bits_(row: Tensor, bits: NDArray[np.int32]) -> None:
    """Set columns whose bits are not set to -inf; the lowest bit of the first word is column 0. [V], float32."""
    is_kept = np.unpackbits(bits.view(np.uint8), bitorder="little", count=len(row))
    if row.device.type == "cpu":
        np.copyto(row.numpy(), -np.inf, where=is_kept == 0)
    else:
        row.masked_fill_(send(is_kept == 0, row.device), -torch.inf)


def take_rows(values: Tensor, rows: Sequence[int]) -> Tensor:
    """Return a copy of some rows. [R, V]; [len(rows), V]."""
    return values.index_select(0, send(np.array(rows, np.int64), values.device))


def put_rows_(values: Tensor, rows: Sequence[int], some: Tensor) -> None:
    """Set the entries of some rows. [R]; [len(rows)]."""
    values.index_copy_(0, send(np.array(rows, np.int64), values.device), some)


def ragged_argmax(values: Tensor, rows: Tensor, ids: Tensor, num_rows: int) -> Tensor:
    """Return the id of each row's largest value, the lowest id of equal ones; the entries come in any order.

    Args:
        values: float [N].
        rows: row of each entry; each row has at least one. int64 [N].
        ids: int64 [N].
        num_rows: R.

    Returns:
        int64 [R].
    """
    best = values.new_full((num_rows,), -torch.inf).scatter_reduce_(0, rows, values, "amax")
    is_best = values == best.index_select(0, rows)
    rows, ids = rows[is_best], ids[is_best]
    return ids.new_full((num_rows,), torch.iinfo(torch.int64).max).scatter_reduce_(0, rows, ids, "amin")


def finite_indices(logits: Tensor) -> Tensor:
    """Return the indices in logits.view(-1) that are not -inf, rising. int64 [N]."""
    if logits.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(logits.numpy() > -np.inf))
    return _true_indices(logits > -torch.inf)


def _true_indices(is_wanted: Tensor) -> Tensor:
    """Return the indices in is_wanted.view(-1) that are true, rising. bool [R, V]; int64 [N]."""
    if is_wanted.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(is_wanted.numpy()))  # six times as fast as torch.nonzero
    return is_wanted.view(-1).nonzero()[:, 0]


def largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest values of each row in falling order, equal ones by rising column.

    torch.topk does not define which of several equal values it returns and in what order; this function does. values:
    [R, V]; returns values and columns (int64), both [R, count], or [R, V] if there are no more.
    """
    num_columns = values.shape[1]
    count = min(count, num_columns)
    width = min(count + 1, num_columns)  # one more shows whether an equal value follows the last
    top, columns = values.topk(width, dim=-1)
    columns, order = columns.sort(dim=-1)
    top, order = top.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    columns = columns.gather(-1, order)
    if count < width:
        cut = (top[:, count - 1] == top[:, count]).nonzero()[:, 0]
        if len(cut):
            _keep_lowest_equals_(columns, top[:, :count], values, cut)
    return top[:, :count], columns[:, :count]


def _keep_lowest_equals_(columns: Tensor, top: Tensor, values: Tensor, rows: Tensor) -> None:
    """Replace, in some rows, the columns of values equal to the last of `top` by the lowest such columns.

    Reads each of these rows twice; sorting one of 49,152 takes 2.4 ms. bfloat16 logits have such equals in most
    rows.
    """
    top, values = top[rows], values[rows]
    floor = top[:, -1:]
    places = _true_indices(values == floor)
    row, column = places // values.shape[1], places % values.shape[1]
    first = torch.searchsorted(row, torch.arange(len(rows), device=row.device))  # first entry of each row in `places`
    place_in_top = (top > floor).sum(dim=-1)[row] + torch.arange(len(row), device=row.device) - first[row]
    has_room = place_in_top < top.shape[1]
    columns[rows[row[has_room]], place_in_top[has_room]] = column[has_room]
