"""Ideal schedules of decode slots: the expected behaviour of static and continuous batching, computed without an
engine.

Requests of output length L occupy a slot for L steps (the prompt's own step samples the first token). B slots, queue in
order of arrival:

    static, B = 3         a batch ends with its longest; free slots stay free
      a a a a a | d d       slot-steps: 3 x 5 + 3 x 2
      b b       | e
      c c c     | f f

    continuous            a free slot is taken in the very next step
      a a a a a
      b b d d f f           slot-steps while requests wait: all of them used
      c c c e

The benchmarks compare these predictions with the engine's own counters.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SlotStep:
    """Consecutive steps with the same occupancy."""

    num_steps: int
    live: int
    """Slots that compute a token in each of them."""
    first_ages: int
    """Sum over these slots of the tokens that their requests have made before the first of the steps."""
    saturated: bool
    """Whether requests still wait during them."""

    @property
    def slot_steps(self) -> int:
        """Tokens made in these steps."""
        return self.num_steps * self.live

    @property
    def mean_age(self) -> float:
        """Tokens that a live request has made before a step, averaged over slots and steps."""
        return self.first_ages / self.live + (self.num_steps - 1) / 2


def static_schedule(lengths: Sequence[int], num_slots: int) -> Iterator[SlotStep]:
    """Yield batches of `num_slots` in order; the next one starts when the longest of the last has ended."""
    for begin in range(0, len(lengths), num_slots):
        batch = sorted(lengths[begin : begin + num_slots])
        saturated = begin + num_slots < len(lengths)
        done = 0
        for i, length in enumerate(batch):
            if length > done:
                live = len(batch) - i
                yield SlotStep(length - done, live, live * done, saturated)
                done = length


def continuous_schedule(lengths: Sequence[int], num_slots: int) -> Iterator[SlotStep]:
    """Yield the steps of a schedule in which a request that ends frees its slot for the next one at once."""
    queue = iter(lengths)
    left = len(lengths)
    ends: list[tuple[int, int]] = []  # (step at which a slot becomes free, step at which its request began)
    now = 0
    while ends or left:
        while left and len(ends) < num_slots:
            heapq.heappush(ends, (now + next(queue), now))
            left -= 1
        until = ends[0][0]
        yield SlotStep(until - now, len(ends), sum(now - begin for _, begin in ends), left > 0)
        now = until
        while ends and ends[0][0] == now:
            heapq.heappop(ends)


SCHEDULES = {"static": static_schedule, "continuous": continuous_schedule}
"""Schedules by the mode of batching."""


@dataclass(frozen=True, slots=True)
class SlotCount:
    """Sums over a schedule."""

    num_steps: int
    tokens: int
    num_slots: int

    @property
    def useful_share(self) -> float:
        """Share of the slot-steps that made a token."""
        return self.tokens / (self.num_steps * self.num_slots)

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens per step."""
        return self.tokens / self.num_steps

    @classmethod
    def of(cls, schedule: Iterator[SlotStep], num_slots: int, *, saturated_only: bool = False) -> SlotCount:
        """Count all steps, or those before the queue ran empty."""
        num_steps = tokens = 0
        for part in schedule:
            if part.saturated or not saturated_only:
                num_steps, tokens = num_steps + part.num_steps, tokens + part.slot_steps
        return cls(num_steps, tokens, num_slots)
