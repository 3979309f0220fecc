"""RowSplit: matrices whose output rows are split across ranks; activations are whole on every rank.

```
x [T, K], whole     W rows of rank 0  ─►  y[:, :n0]  ┐
on every rank       W rows of rank 1  ─►  y[:, n0:]  ┴─ all-gather ─►  y [T, N], whole on every rank
```

Each number is summed by one rank over all of K, in the order that a single rank uses. So the bits are those of a
single rank. Groups of quantized weights lie along K and are never cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from twostroke.communicator.interface import Communicator, SingleRank
from twostroke.kernels.interface import GatedLinear, Linear
from twostroke.kernels.memory import to_float32


def rows_of(rank: int, size: int, num_rows: int) -> range:
    """Return the rows, or heads, of `num_rows` that a rank of `size` ranks has.

    If they do not divide evenly, some ranks have one more. If there are fewer rows than ranks, each rank has one and
    neighbouring ranks share it.

    >>> [rows_of(rank, 3, 10) for rank in range(3)]
    [range(0, 3), range(3, 6), range(6, 10)]
    >>> [rows_of(rank, 4, 2) for rank in range(4)]
    [range(0, 1), range(0, 1), range(1, 2), range(1, 2)]
    """
    first = num_rows * rank // size
    return range(first, max(first + 1, num_rows * (rank + 1) // size))


@dataclass(frozen=True, slots=True)
class RankSplit:
    """Scheme by which the weights of a model are split across ranks."""

    num_ranks: int = 1
    splits_by_expert: bool = False
    """Whether each rank has some whole experts of a layer, instead of some rows of each expert."""


SINGLE_RANK = RankSplit()
"""A single rank, which has all weights."""


class RowSplit:
    """Assignment of output rows to ranks, and the gathering of their outputs."""

    def __init__(self, communicator: Communicator | None = None, *, splits_by_expert: bool = False) -> None:
        """Store the communicator; without one there is a single rank. `splits_by_expert` is described at RankSplit."""
        self._communicator = communicator or SingleRank()
        self.splits_by_expert = splits_by_expert

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._communicator.size

    def share(self, num: int) -> int:
        """Return how many of `num` heads this rank has; every rank has the same number."""
        assert num % self.size == 0 or self.size % num == 0, (num, self.size)
        return len(self.own(num))

    def own(self, num_rows: int) -> range:
        """Return the rows of `num_rows` that this rank has."""
        return rows_of(self._communicator.rank, self.size, num_rows)

    def gather(self, local: Tensor, num_columns: int) -> Tensor:
        """Gather this rank's columns [T, own] and those of the other ranks into [T, num_columns].

        Raises:
            RankLost: another rank is gone.
        """
        if self.size == 1:
            return local
        local = local.contiguous()
        whole = local.new_empty(local.shape[0], num_columns)
        widths = _widths(self.size, num_columns, local.itemsize)
        self._communicator.all_gather(local, whole, widths, local.shape[0])
        return whole

    def gather_rows(self, local: Tensor, counts: Sequence[int]) -> Tensor:
        """Gather the rows [counts[rank], N] of all ranks, in rank order, into [sum(counts), N].

        Raises:
            RankLost: another rank is gone.
        """
        local = local.contiguous()
        whole = local.new_empty(sum(counts), local.shape[1])
        row_bytes = local.shape[1] * local.itemsize
        self._communicator.all_gather(local, whole, [num * row_bytes for num in counts])
        return whole

    def gather_heads(self, own: Tensor, nums: Sequence[int]) -> list[Tensor]:
        """Gather the heads of all ranks, for operations over all heads.

        Args:
            own: [T, heads, head_dim]; heads of several kinds (q and k, for example) follow each other.
            nums: number of heads of each kind on all ranks together.

        Returns:
            [T, num, head_dim] for each kind.

        Raises:
            RankLost: another rank is gone.
        """
        if self.size == 1:
            return list(own.split(tuple(nums), dim=1))
        own = own.contiguous()
        of_ranks = own.new_empty(self.size, *own.shape)
        self._communicator.all_gather(own, of_ranks, [own.nbytes] * self.size)
        found: list[Tensor] = []
        for num, of_kind in zip(nums, of_ranks.split([self.share(num) for num in nums], dim=2), strict=True):
            once = of_kind[:: max(1, self.size // num)]  # neighbouring ranks may have the same head
            found.append(once.transpose(0, 1).flatten(1, 2))
        return found

    def rows(self, ids: Tensor, num_rows: int, rows_of_own: Callable[[Tensor], Tensor]) -> Tensor:
        """Return rows of a table [num_rows, K] whose rows are split across ranks.

        Args:
            ids: int64 [T].
            num_rows: rows of the whole table.
            rows_of_own: returns rows [T, K] of this rank's part of the table, by index within that part.

        Returns:
            [T, K]: each row from the rank that has it.
        """
        if self.size == 1:
            return rows_of_own(ids)
        own = self.own(num_rows)
        local = rows_of_own((ids - own.start).clamp(0, len(own) - 1)).contiguous()
        of_ranks = local.new_empty(self.size, *local.shape)
        self._communicator.all_gather(local, of_ranks, [local.nbytes] * self.size)
        ends = torch.tensor([rows_of(rank, self.size, num_rows).stop for rank in range(self.size)], device=ids.device)
        owners = torch.searchsorted(ends, ids, right=True)
        return of_ranks[owners, torch.arange(len(ids), device=ids.device)]

    def linear(self, own: Linear, num_rows: int) -> Linear:
        """Return a linear layer with whole outputs on every rank, from this rank's part of `num_rows` rows."""
        return own if self.size == 1 else _GatheredLinear(self, own, num_rows)

    def gated(self, own: GatedLinear, num_rows: int) -> GatedLinear:
        """Return a gated linear layer whose outputs are whole on every rank, from one with this rank's rows."""

        def gathered(x: Tensor) -> Tensor:
            return self.gather(own(x), num_rows)

        return own if self.size == 1 else gathered


class _GatheredLinear:
    """A Linear that has some rows of a matrix and returns the results of the whole matrix."""

    def __init__(self, split: RowSplit, own: Linear, num_rows: int) -> None:
        self._split, self._own, self._num_rows = split, own, num_rows

    def __call__(self, x: Tensor) -> Tensor:
        return self._split.gather(self._own(x), self._num_rows)

    def in_float32(self, x: Tensor) -> Tensor:
        return to_float32(self(x))

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        own = self._split.own(self._num_rows)
        part = residual[:, own.start : own.stop].contiguous()
        return self._split.gather(self._own.add_to(part, x), self._num_rows)

    def rows(self, ids: Tensor) -> Tensor:
        return self._split.rows(ids, self._num_rows, self._own.rows)


@cache
def _widths(size: int, num_columns: int, bytes_per_element: int) -> tuple[int, ...]:
    """Return the bytes of a row that each rank has; cached, because matrices have few shapes."""
    assert num_columns >= size, (num_columns, size)
    return tuple(len(rows_of(rank, size, num_columns)) * bytes_per_element for rank in range(size))
