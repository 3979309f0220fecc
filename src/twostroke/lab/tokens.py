"""Whether the answers of both sides are the same ones, in every run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Answers = Sequence[tuple[int, ...]]
"""Of one run: token ids of each request."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Counts of requests."""

    num_requests: int
    num_equal: int
    """With one answer in all runs of both sides."""
    num_steady: int
    """With one answer in all runs of each side, whatever the other side says."""
    num_runs: int
    """Of both sides together."""

    @classmethod
    def of(cls, a: Sequence[Answers], b: Sequence[Answers]) -> Tokens:
        """Compares all runs, request by request."""
        mine, theirs = ([set(answers) for answers in zip(*side, strict=True)] for side in (a, b))
        pairs = list(zip(mine, theirs, strict=True))
        num_equal = sum(len(ours | others) == 1 for ours, others in pairs)
        num_steady = sum(len(ours) == len(others) == 1 for ours, others in pairs)
        return cls(len(pairs), num_equal, num_steady, len(a) + len(b))

    def told(self, *, may_differ: bool) -> str:
        """In words.

        Args:
            may_differ: the sides round K and V differently.
        """
        if self.num_equal == self.num_requests:
            return f"Tokens: equal for all {self.num_requests} requests, in all {self.num_runs} runs."
        counts = f"Tokens: equal for {self.num_equal} of {self.num_requests} requests in all {self.num_runs} runs."
        if may_differ and self.num_steady == self.num_requests:
            return f"{counts} K and V are rounded differently on the two sides; each side repeats itself in every run."
        return f"{counts} That is a mistake of the engine: nothing here may change a token. Please report it."
