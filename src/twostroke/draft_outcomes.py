"""What became of the drafts of a sequence or a request: the one definition of each count.

    pass      fed      drafts        taken         counts
    1         t0       d1 d2 d3      d1 d2 t3      3 tokens: 3 drafts verified, 2 stood (positions 0 and 1)
    2         t3                     t4            1 token:  no drafts
                                                   2 passes, 4 tokens: 2 a pass

A pass gives one token whatever becomes of its drafts, and one more for each that stood: tokens = passes + accepted.
Where a sequence ends within a pass, what is behind its end is no token of its, and no draft that stood.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


def num_accepted(num_tokens: int, num_draft_tokens: int) -> int:
    """Drafts of a pass that stood.

    Args:
        num_tokens: that the pass gave, after everything that cuts them short.
        num_draft_tokens: that it verified.

    >>> num_accepted(3, 3), num_accepted(1, 3), num_accepted(1, 0), num_accepted(0, 3)
    (2, 0, 0, 0)
    """
    return max(0, min(num_tokens - 1, num_draft_tokens))


@dataclass(frozen=True, slots=True)
class DraftOutcomes:
    """What became of all drafts, over the passes that gave tokens; the one that read the prompt's end is among them."""

    num_passes: int
    """Of the target model, each for one sequence."""
    num_tokens: int
    """That they gave."""
    num_verifying_passes: int
    """Those with drafts."""
    num_draft_tokens: int
    """Verified."""
    num_accepted_tokens: int
    """Drafts that stood: num_tokens - num_passes."""
    num_accepted_tokens_per_pos: tuple[int, ...]
    """The same by their position among the drafts of their pass, from 0, up to the last where one was verified."""
    tokens_per_pass: float
    """num_tokens / num_passes."""


@dataclass(slots=True)
class DraftTally:
    """Counts passes as they come.

    >>> tally = DraftTally()
    >>> tally.passed(3, 3), tally.passed(1, 0)
    (None, None)
    >>> DraftTally.total([tally]).num_accepted_tokens_per_pos
    (1, 1, 0)
    """

    num_passes: int = 0
    num_tokens: int = 0
    num_verifying_passes: int = 0
    num_draft_tokens: int = 0
    accepted_at: list[int] = field(default_factory=list[int])
    """By position."""

    def passed(self, num_tokens: int, num_draft_tokens: int) -> None:
        """A pass gave so many tokens and verified so many drafts; one without tokens (a chunk of a prompt) is none."""
        if not num_tokens:
            return
        self.num_passes += 1
        self.num_tokens += num_tokens
        if num_draft_tokens:
            self.num_verifying_passes += 1
            self.num_draft_tokens += num_draft_tokens
            self.accepted_at += [0] * (num_draft_tokens - len(self.accepted_at))
            for position in range(num_accepted(num_tokens, num_draft_tokens)):
                self.accepted_at[position] += 1

    @staticmethod
    def total(tallies: Iterable[DraftTally]) -> DraftOutcomes | None:
        """Of several sequences together; None where no draft was verified."""
        those = list(tallies)
        if not any(tally.num_draft_tokens for tally in those):
            return None
        deepest = max(len(tally.accepted_at) for tally in those)
        per_pos = tuple(
            sum(tally.accepted_at[position] for tally in those if position < len(tally.accepted_at))
            for position in range(deepest)
        )
        num_passes, num_tokens = sum(t.num_passes for t in those), sum(t.num_tokens for t in those)
        return DraftOutcomes(
            num_passes=num_passes,
            num_tokens=num_tokens,
            num_verifying_passes=sum(t.num_verifying_passes for t in those),
            num_draft_tokens=sum(t.num_draft_tokens for t in those),
            num_accepted_tokens=sum(per_pos),
            num_accepted_tokens_per_pos=per_pos,
            tokens_per_pass=num_tokens / num_passes,
        )
