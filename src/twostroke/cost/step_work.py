"""What a step has to do, in the few counts that its time depends on: no bytes and no rates, so it is the same on every
machine.

    tokens        query tokens: each goes through every layer                     (weights are read once for all)
    logits rows   of them, those that go through the LM head and are sampled
    pairs         query-key pairs of prefill chunks, summed over the layers       (compute: q k, p v)
    seen          K/V tokens read for decodes, summed over the layers             (memory: one query, all of its keys)

A window cuts both sums, layer by layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from twostroke.batch import ScheduledBatch, ScheduledRequest

FEW_TOKENS = 8
"""A share of so many tokens reads its keys like a decode (drafts do, and the rest of a prompt); a larger one computes
its pairs in tiles."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """The counts of one step."""

    num_tokens: int
    num_logits_rows: int
    num_pairs: int
    num_seen: int

    def __add__(self, other: StepWork) -> StepWork:
        """Of a step that does both."""
        return StepWork(
            self.num_tokens + other.num_tokens,
            self.num_logits_rows + other.num_logits_rows,
            self.num_pairs + other.num_pairs,
            self.num_seen + other.num_seen,
        )


NO_WORK = StepWork(0, 0, 0, 0)


class Layers:
    """The layers of a model by what their queries see.

    Args:
        windows: one per layer: the tokens a query sees, itself included; None sees all.

    >>> Layers([None, None]).work([(10, 1, 1)])      # a decode that sees 11 tokens in each of two layers
    StepWork(num_tokens=1, num_logits_rows=1, num_pairs=0, num_seen=22)
    >>> Layers([4]).work([(0, 10, 0)])               # a chunk of 10: its queries see 1 2 3 4 4 4 4 4 4 4 tokens
    StepWork(num_tokens=10, num_logits_rows=0, num_pairs=34, num_seen=0)
    """

    __slots__ = ("_kinds",)

    def __init__(self, windows: Sequence[int | None]) -> None:
        kinds: Mapping[int | None, int] = {window: windows.count(window) for window in dict.fromkeys(windows)}
        self._kinds = tuple(kinds.items())

    @property
    def num_layers(self) -> int:
        """Of all kinds."""
        return sum(count for _, count in self._kinds)

    def work(self, shares: Iterable[tuple[int, int, int]]) -> StepWork:
        """Of a step.

        Args:
            shares: of each request: tokens computed before, query tokens, rows of logits.
        """
        num_tokens = num_rows = num_pairs = num_seen = 0
        for start, count, rows in shares:
            num_tokens += count
            num_rows += rows
            if count <= FEW_TOKENS:
                num_seen += self._seen(start, count)
            else:
                num_pairs += self._pairs(start, count)
        return StepWork(num_tokens, num_rows, num_pairs, num_seen)

    def work_of(self, batch: ScheduledBatch) -> StepWork:
        """Of a step that was decided."""
        return self.work_of_shares(batch.requests)

    def work_of_shares(self, shares: Iterable[ScheduledRequest]) -> StepWork:
        """Of a step, or a part of it."""
        return self.work(
            (r.num_computed_tokens, r.num_scheduled_tokens, r.num_draft_tokens + 1 if r.samples_token else 0)
            for r in shares
        )

    def _seen(self, start: int, count: int) -> int:
        return sum(num_layers * num_seen(start, count, window) for window, num_layers in self._kinds)

    def _pairs(self, start: int, count: int) -> int:
        return sum(num_layers * num_pairs(start, count, window) for window, num_layers in self._kinds)


def num_seen(start: int, count: int, window: int | None) -> int:
    """Keys in one layer that any of the queries from `start` on sees, each counted once."""
    first = 0 if window is None else max(0, start - window + 1)
    return start + count - first


def num_pairs(start: int, count: int, window: int | None) -> int:
    """Query-key pairs in one layer: those of all positions before the end, less those before the start.

    ```
    full     q sees   1 2 3 4 5 6    n (n + 1) / 2          window 3     1 2 3 3 3 3
    ```
    """

    def up_to(position: int) -> int:
        if window is None or position <= window:
            return position * (position + 1) // 2
        return window * (window + 1) // 2 + (position - window) * window

    return up_to(start + count) - up_to(start)
