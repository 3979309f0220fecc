"""A proposer that guesses as many drafts as it is told, for nothing: so steps of any size can be timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from twostroke.speculation.proposer import DraftRequest, Drafts


@dataclass(slots=True)
class SetGuesses:
    """As many drafts as it is told, for one request; the target looks at each of them whatever it is."""

    numbers: Sequence[int] = (0,)
    """For one step after the other, and again from the first."""
    _num_steps: int = field(default=0)

    def repeat(self, numbers: Sequence[int]) -> None:
        """From now on these."""
        self.numbers, self._num_steps = numbers, 0

    def propose(self, requests: Sequence[DraftRequest]) -> list[Drafts]:
        number = self.numbers[self._num_steps % len(self.numbers)]
        self._num_steps += 1
        return [Drafts((0,) * min(number, request.num_drafts)) for request in requests]

    def forget(self, row: int, num_tokens: int) -> None:
        """See Proposer; nothing is kept."""
