"""Rule for when a drafter that is not asked for drafts stops observing the target."""

from __future__ import annotations

from twostroke.speculation.proposer import TargetStep


class ObservationPolicy:
    """Count of steps since drafts were last wanted; after some, observing stops, because it costs a small step 5 %.

    Steps with several tokens of a sequence do not count: prompts are observed in any case, and accepted drafts were
    asked for.

    >>> wakefulness = ObservationPolicy()
    >>> wakefulness.is_observing
    True
    """

    _OBSERVED_STEPS = 8

    def __init__(self) -> None:
        self._num_unasked = 0

    @property
    def is_observing(self) -> bool:
        """Whether it observes the next step, whatever that computes."""
        return self._num_unasked < self._OBSERVED_STEPS

    def drafts_wanted(self) -> None:
        """Record that drafts are wanted."""
        self._num_unasked = 0

    def step_passed(self, step: TargetStep) -> None:
        """Record that a step has passed."""
        self._num_unasked += all(read.num_tokens == 1 for read in step.spans)
