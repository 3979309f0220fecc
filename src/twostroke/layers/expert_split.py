"""The experts of a layer on several ranks: rows of each expert on every rank, or whole experts on each.

```
by rows    pairs [P, K]  ─►  rank's rows of every expert  ─►  gather columns  ─►  down, the same way  ─►  sum
by expert  pairs of the rank's experts  ─►  whole experts, both products  ─►  gather pairs [P, N]  ─►  sum
```

Pairs of a token and an expert are sorted by expert, and a rank has consecutive experts. So a rank's pairs are
consecutive, and the gathered rows are in the order of a single rank. Every rank then sums a token's products in the
same order, which gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from twostroke.kernels.expert_operators import ExpertLinears, GatedExperts, Routing
from twostroke.layers.row_split import RowSplit, rows_of

ExpertProducts = Callable[[Tensor, Routing], Tensor]
"""[num_tokens, hidden_size] -> [num_tokens, hidden_size]: the sum of the outputs of each token's experts."""


class RowSplitExperts:
    """Experts split by rows: every rank has some rows of each expert. Implements ExpertProducts."""

    def __init__(self, inner: GatedExperts, down: ExpertLinears, split: RowSplit, sizes: tuple[int, int]) -> None:
        """Store both products of all experts, and the rows of an expert on all ranks together, for each product."""
        self._inner, self._down, self._split = inner, down, split
        self._size, self._hidden_size = sizes

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        inner = self._split.gather(self._inner(x, routing), self._size)
        return self._split.gather(self._down(inner, routing), self._hidden_size)


class WholeExperts:
    """Experts split by expert: each rank has some whole experts. Implements ExpertProducts."""

    def __init__(self, inner: GatedExperts, down: ExpertLinears, split: RowSplit, num_experts: int) -> None:
        """Store both products of this rank's experts, and the number of experts on all ranks together."""
        self._inner, self._down, self._split = inner, down, split
        self._own = split.own(num_experts)
        self._experts = [rows_of(rank, split.size, num_experts) for rank in range(split.size)]

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        starts = routing.starts.tolist()
        counts = [starts[experts.stop] - starts[experts.start] for experts in self._experts]
        begin, end = starts[self._own.start], starts[self._own.stop]
        products = x.new_empty(0, x.shape[1])
        if begin < end:
            own = routing.of_experts(self._own, slice(begin, end))
            products = self._down.multiply(self._inner(x, own), own)
        return self._down.add(self._split.gather_rows(products, counts), routing)
