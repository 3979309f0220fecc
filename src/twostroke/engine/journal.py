"""The engine's event log: turns every input and outcome into an event and sends it to all sinks."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from math import inf, isfinite

from twostroke.batch import Commit, ScheduledBatch, StepResult
from twostroke.config.cache import CacheConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.cost.step_cost import MachineLimits, ModelShape, StepCost, shares_of, step_cost
from twostroke.engine.event_sinks import JsonlEventLog
from twostroke.engine.expert_use import ExpertUse
from twostroke.engine.generation import GenerationRequest
from twostroke.event_codec import plain
from twostroke.events import (
    EngineStarted,
    Event,
    EventLog,
    EventRing,
    ExpertsMeasured,
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
"""Seconds between two samples of the process's memory, while steps run."""
REPORT_FACTOR = 1.2
"""Factor by which raised limits must exceed the last reported ones to be reported again."""
RING_CAPACITY = 4096
"""Events kept in memory: about two thousand steps."""


class Journal:
    """A writer of events; it also keeps the most recent ones in memory.

    If a file or a listener receives the events, it also computes the cost of each step and corrects the machine limits.

    Args:
        started: the first event; a replay needs it.
        shape: of the model, for the cost of each step.
        file: receives all events, or None; the journal closes it.
        listeners: receive all events too.
        memory_bytes: returns the memory that the process uses; None: memory is not recorded.
        expert_use: counts the tokens of each expert; None: the model has none, or the runner does not count them.
    """

    def __init__(
        self,
        started: EngineStarted,
        shape: ModelShape,
        file: JsonlEventLog | None,
        listeners: Sequence[EventLog] = (),
        memory_bytes: Callable[[], int] | None = None,
        expert_use: ExpertUse | None = None,
    ) -> None:
        self._memory_bytes = memory_bytes
        self._expert_use = expert_use
        self._sampled_s = -inf
        self.process = started.process
        self._shape = shape
        self._machine = started.machine
        self._reported_limits = started.machine
        """Limits reported last."""
        self._uncommitted: dict[int, StepScheduled] = {}
        self._files = ExitStack()
        self.recent = EventRing(RING_CAPACITY)
        self._sinks: list[EventLog] = [self.recent, *listeners]
        self._costs_steps = started.machine is not None and (file is not None or len(listeners) > 0)
        if file is not None:
            self._sinks.append(self._files.enter_context(file))
        self.emit(started)

    def arrived(self, request: GenerationRequest, arrival: Arrival, now_s: float) -> None:
        """Record that a request entered the queue; `arrival` is how the scheduler sees it."""
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
        """Record that a request was ended from outside."""
        self.emit(RequestFinishedByCaller(now_s, self.process, request_id, reason, num_output_tokens))

    def scheduled(self, batch: ScheduledBatch, now_s: float) -> None:
        """Record a decided step, with its estimated cost."""
        cost = None
        if self._costs_steps and self._machine is not None:
            if self._expert_use is not None:
                self._measure_experts(self._expert_use, batch, now_s)
            cost = step_cost(self._shape, shares_of(batch), self._machine)
        decided = StepScheduled(now_s, self.process, batch, cost)
        if cost is not None and not batch.is_empty:  # an empty one is never committed
            self._uncommitted[batch.step] = decided
        self.emit(decided)

    def _measure_experts(self, expert_use: ExpertUse, batch: ScheduledBatch, now_s: float) -> None:
        shares = expert_use.measured_before(batch)
        if shares is not None:
            self._shape = replace(self._shape, expert_shares=shares)
            self.emit(ExpertsMeasured(now_s, self.process, shares))

    def committed(self, result: StepResult, commits: Sequence[Commit], result_s: float, now_s: float) -> None:
        """Record a step's result, which was available at `result_s` and accounted for at `now_s`."""
        if self._costs_steps:
            self._correct_limits(result.step, result_s)
        times = result.operator_time_s, now_s, result.draft_time_s
        self.emit(StepCommitted(result_s, self.process, result.step, tuple(commits), *times))
        if self._memory_bytes is not None and now_s - self._sampled_s >= MEMORY_EVERY_S:
            self._sampled_s = now_s
            self.emit(MemorySampled(now_s, self.process, self._memory_bytes()))

    def _correct_limits(self, step: int, result_s: float) -> None:
        """Raise the machine's limits if a step was faster than they allow."""
        decided = self._uncommitted.pop(step, None)
        if decided is None or decided.cost is None or self._machine is None or self._reported_limits is None:
            return
        seconds = result_s - decided.time_s
        raised = self._machine.raised_by(decided.cost, seconds)
        if raised is not self._machine:
            self._machine = raised
            self._reported_limits = _log_raised_limits(self._reported_limits, raised, decided.cost, step, seconds)

    def prefix_cache_reset(self, now_s: float) -> None:
        """Record that cached prefixes were forgotten."""
        self.emit(PrefixCacheReset(now_s, self.process))

    def kv_block_checked(self, finding: Finding, begin_s: float, now_s: float) -> None:
        """Record that a cached block was computed again, and the finding."""
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
        """Record that measurement begins; earlier steps were warm-up."""
        self.emit(MeasurementBegan(now_s, self.process))

    def close(self) -> None:
        """Close the file."""
        self._files.close()

    def emit(self, event: Event) -> None:
        """Write one event to all sinks."""
        for sink in list(self._sinks):
            try:
                sink.append(event)
            except OSError as error:
                # a step that is decided must be executed, so serving continues without the log
                log.warning("the event log cannot be written any more: %s", error)
                self._sinks.remove(sink)


def _log_raised_limits(
    said: MachineLimits, raised: MachineLimits, cost: StepCost, step: int, seconds: float
) -> MachineLimits:
    """Log raised limits that differ enough from those logged last; return the limits logged last."""
    if max(raised.flops_per_s / said.flops_per_s, raised.bytes_per_s / said.bytes_per_s) <= REPORT_FACTOR:
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
    """Return the event from which a replay is built; machine, drafter and pool are not filled in yet."""
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
