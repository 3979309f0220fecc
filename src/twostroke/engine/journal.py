"""The engine's end of the event log: every input and outcome becomes an event, on its way to whoever listens."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from math import inf, isfinite

from twostroke.batch import Commit, ScheduledBatch, StepResult
from twostroke.config.cache import CacheConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.cost.step_cost import MachineLimits, ModelShape, StepCost, shares_of, step_cost
from twostroke.engine.event_sinks import JsonlEventLog
from twostroke.engine.generation import GenerationRequest
from twostroke.event_codec import plain
from twostroke.events import (
    EngineStarted,
    Event,
    EventLog,
    EventRing,
    KVBlockChecked,
    MeasurementBegan,
    MemorySampled,
    PrefixCacheReset,
    RequestArrived,
    RequestFinishedByCaller,
    StepCommitted,
    StepScheduled,
)
from twostroke.kv_cache.layout import KVLayout
from twostroke.kv_check import Finding
from twostroke.log import get_logger
from twostroke.request import Arrival, FinishReason

log = get_logger(__name__)

MEMORY_EVERY_S = 10.0
"""Between two looks at the process's memory, while there are steps."""
NOTEWORTHY = 1.2
"""Least factor by which raised limits must exceed the last reported ones to be reported again."""
RING_CAPACITY = 4096
"""Events kept in memory: about two thousand steps, for a look at what just happened."""


class Journal:
    """Writes events; the last ones are also kept in memory.

    Where a file or a listener gets them, it works out what steps cost, and holds the machine to its limits.

    Args:
        started: the first event, without which no replay is possible.
        shape: of the model, for the cost of each step.
        file: for all events, or None; the journal closes it.
        listeners: hear all events, too.
        memory_bytes: that the process takes, asked every now and then; None: it is not said.
    """

    def __init__(
        self,
        started: EngineStarted,
        shape: ModelShape,
        file: JsonlEventLog | None,
        listeners: Sequence[EventLog] = (),
        memory_bytes: Callable[[], int] | None = None,
    ) -> None:
        self._memory_bytes = memory_bytes
        self._sampled_s = -inf
        self.process = started.process
        self._shape = shape
        self._machine = started.machine
        self._said = started.machine
        """The limits that were reported last."""
        self._undone: dict[int, StepScheduled] = {}
        self._files = ExitStack()
        self.recent = EventRing(RING_CAPACITY)
        self._sinks: list[EventLog] = [self.recent, *listeners]
        self._costs_steps = started.machine is not None and (file is not None or len(listeners) > 0)
        if file is not None:
            self._sinks.append(self._files.enter_context(file))
        self.emit(started)

    def arrived(self, request: GenerationRequest, arrival: Arrival, now_s: float) -> None:
        """A request entered the queue, which knows it as `arrival`."""
        self.emit(
            RequestArrived(
                now_s,
                self.process,
                request.request_id,
                arrival,
                request.new_request.seed,
                request.cache_salt,
                request.submitted_time_s,
            )
        )

    def finished_by_caller(
        self, request_id: str, reason: FinishReason, num_output_tokens: int | None, now_s: float
    ) -> None:
        """A request was ended from outside."""
        self.emit(RequestFinishedByCaller(now_s, self.process, request_id, reason, num_output_tokens))

    def scheduled(self, batch: ScheduledBatch, now_s: float) -> None:
        """A step was decided; its record holds what it costs and what it waits for."""
        cost = None
        if self._costs_steps and self._machine is not None:
            cost = step_cost(self._shape, shares_of(batch), self._machine)
        decided = StepScheduled(now_s, self.process, batch, cost)
        if cost is not None and not batch.is_empty:  # an empty one is never committed
            self._undone[batch.step] = decided
        self.emit(decided)

    def committed(self, result: StepResult, commits: Sequence[Commit], result_s: float, now_s: float) -> None:
        """A step's result, there at `result_s`, was taken in."""
        if self._costs_steps:
            self._hold_against_limits(result.step, result_s)
        times = result.operator_time_s, now_s, result.draft_time_s
        self.emit(StepCommitted(result_s, self.process, result.step, tuple(commits), *times))
        if self._memory_bytes is not None and now_s - self._sampled_s >= MEMORY_EVERY_S:
            self._sampled_s = now_s
            self.emit(MemorySampled(now_s, self.process, self._memory_bytes()))

    def _hold_against_limits(self, step: int, result_s: float) -> None:
        """Raise the machine's limits where a step was faster than its floor."""
        decided = self._undone.pop(step, None)
        if decided is None or decided.cost is None or self._machine is None or self._said is None:
            return
        seconds = result_s - decided.time_s
        raised = self._machine.raised_by(decided.cost, seconds)
        if raised is not self._machine:
            self._machine = raised
            self._said = _told(self._said, raised, decided.cost, step, seconds)

    def prefix_cache_reset(self, now_s: float) -> None:
        """Cached prefixes were forgotten."""
        self.emit(PrefixCacheReset(now_s, self.process))

    def kv_block_checked(self, finding: Finding, begin_s: float, now_s: float) -> None:
        """A cached block was computed again."""
        self.emit(
            KVBlockChecked(
                now_s,
                self.process,
                begin_s,
                finding.request_id,
                finding.entry,
                finding.verdict,
                sum(difference.num_numbers for difference in finding.differences),
                min((difference.layer_id for difference in finding.differences), default=None),
                finding.largest if isfinite(finding.largest) else None,
                finding.quarantined,
                finding.suspects,
            )
        )

    def measurement_began(self, now_s: float) -> None:
        """What follows is measured; what came before warmed the engine up."""
        self.emit(MeasurementBegan(now_s, self.process))

    def close(self) -> None:
        """No more events; the file is complete."""
        self._files.close()

    def emit(self, event: Event) -> None:
        """Write one event."""
        for sink in list(self._sinks):
            try:
                sink.append(event)
            except OSError as error:
                # serving goes on without its log; a step that is decided must be executed
                log.warning("the event log ends here: %s", error)
                self._sinks.remove(sink)


def _told(said: MachineLimits, raised: MachineLimits, cost: StepCost, step: int, seconds: float) -> MachineLimits:
    """Log raised limits that are far from those said last; return what is said now."""
    if max(raised.flops_per_s / said.flops_per_s, raised.bytes_per_s / said.bytes_per_s) <= NOTEWORTHY:
        return said
    log.info(
        "machine limits raised to what step %d did in %.4g ms (its floor was %.4g ms): %.4g GFLOP/s, %.4g GB/s",
        step,
        seconds * 1e3,
        cost.seconds * 1e3,
        raised.flops_per_s / 1e9,
        raised.bytes_per_s / 1e9,
    )
    return raised


def engine_started(
    scheduler: SchedulerConfig,
    cache: CacheConfig,
    layout: KVLayout,
    *,
    num_blocks: int,
    max_model_len: int,
    model: str,
    now_s: float,
) -> EngineStarted:
    """Return the event that says what a replay has to be built from; it knows no machine, drafter or pool yet."""
    return EngineStarted(
        time_s=now_s,
        process=f"engine-{os.getpid()}",
        scheduler=plain(scheduler),
        cache=plain(cache),
        layout=plain(layout),
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        model=model,
    )
