"""Whether a drafter that nobody asks goes on watching the target."""

from __future__ import annotations

from twostroke.speculation.proposer import TargetStep


class Wakefulness:
    """Falls asleep some steps after it was last asked: what is shown to a watcher costs a small step 5 %.

    Steps that read several tokens of somebody do not count: prompts are watched in any case, and drafts that stood were
    asked for.

    >>> wakefulness = Wakefulness()
    >>> wakefulness.is_awake
    True
    """

    _AWAKE_STEPS = 8

    def __init__(self) -> None:
        self._num_unasked = 0

    @property
    def is_awake(self) -> bool:
        """It wants to see the next step, whatever that reads."""
        return self._num_unasked < self._AWAKE_STEPS

    def asked(self) -> None:
        """Somebody wants drafts."""
        self._num_unasked = 0

    def shown(self, step: TargetStep) -> None:
        """A step has passed."""
        self._num_unasked += all(read.num_tokens == 1 for read in step.reads)
