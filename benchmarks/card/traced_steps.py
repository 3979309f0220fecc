"""Traces some steps of a run that are alike, in its middle."""

from __future__ import annotations

from benchmarks.card.arithmetic import Busy, Interval
from benchmarks.card.machine import Tracer
from twostroke.batch import ScheduledBatch

_STEPS_BEFORE = 8
"""Of the same kind: passes are recorded with the second, and steps ahead have begun."""


class TracedSteps:
    """Watches batches before they are computed; between two of them the tracer starts, and stops between two others.

    Then everything of the batches before has been enqueued, draws included, and the tracer waits for it: it sees the
    work of whole steps.

    Args:
        tracer: writes the work down.
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._num_decodes = self._num_steps = self._num_seen = 0
        self._work: list[Interval] | None = None

    @staticmethod
    def num_outputs(num_steps: int) -> int:
        """Steps of decodes alone that a run needs, to have so many traced; one stops the tracer."""
        return _STEPS_BEFORE + num_steps + 1

    def arm(self, num_decodes: int, num_steps: int) -> None:
        """From now on: the next steps of so many decodes and nothing else are traced."""
        self._num_decodes, self._num_steps, self._num_seen, self._work = num_decodes, num_steps, 0, None

    def __call__(self, batch: ScheduledBatch) -> None:
        """See RecordingExecutor's at_submit."""
        if not self._num_steps or batch.num_prefill_tokens or batch.num_decode_tokens != self._num_decodes:
            return
        if self._num_seen == _STEPS_BEFORE:
            self._tracer.start()
        elif self._num_seen == _STEPS_BEFORE + self._num_steps:
            self._work = self._tracer.stop()
        self._num_seen += 1

    def take(self) -> Busy | None:
        """What was traced; None where nothing was seen to work. Nothing more is traced then."""
        num_steps, self._num_steps = self._num_steps, 0
        if self._work is None and self._num_seen > _STEPS_BEFORE:  # the run has ended too early
            self._tracer.stop()
        return None if self._work is None else Busy.of(self._work, num_steps)
