"""The engine's end of the event log: every input and outcome becomes an event, on its way to whoever listens."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from twostroke.batch import Commit, ScheduledBatch
from twostroke.config.cache import CacheConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.cost.step_cost import MachineLimits, ModelShape, shares_of, step_cost
from twostroke.engine.event_sinks import JsonlEventLog
from twostroke.events import (
    EngineStarted,
    Event,
    EventLog,
    EventRing,
    RequestArrived,
    RequestFinishedByCaller,
    StepCommitted,
    StepScheduled,
    plain,
)
from twostroke.kv_cache.layout import KVLayout
from twostroke.request import Arrival, FinishReason

RING_CAPACITY = 4096
"""Events kept in memory: about two thousand steps, for a look at what just happened."""


class Journal:
    """Writes events; the last ones are also kept in memory.

    Args:
        started: the first event, without which no replay is possible.
        shape: of the model, for the cost of each step.
        limits: of the machine, against which a step is bound by compute or by memory.
        path: a file for all events, or None.
    """

    def __init__(self, started: EngineStarted, shape: ModelShape, limits: MachineLimits, path: Path | None) -> None:
        self._process = started.process
        self._shape = shape
        self._limits = limits
        self._files = ExitStack()
        self.recent = EventRing(RING_CAPACITY)
        self._logs: list[EventLog] = [self.recent]
        if path is not None:
            self._logs.append(self._files.enter_context(JsonlEventLog(path)))
        self._emit(started)

    def arrived(self, arrival: Arrival, now_s: float) -> None:
        """A request entered the queue."""
        self._emit(RequestArrived(now_s, self._process, arrival.request_id, arrival))

    def finished_by_caller(self, request_id: str, reason: FinishReason, now_s: float) -> None:
        """A request was ended from outside."""
        self._emit(RequestFinishedByCaller(now_s, self._process, request_id, reason))

    def scheduled(self, batch: ScheduledBatch, now_s: float) -> None:
        """A step was decided; its record holds what it costs and what it waits for."""
        cost = step_cost(self._shape, shares_of(batch), self._limits)
        self._emit(StepScheduled(now_s, self._process, batch, cost))

    def committed(self, step: int, commits: Sequence[Commit], operator_time_s: float, now_s: float) -> None:
        """A step's result was taken in."""
        self._emit(StepCommitted(now_s, self._process, step, tuple(commits), operator_time_s))

    def close(self) -> None:
        """No more events; the file is complete."""
        self._files.close()

    def _emit(self, event: Event) -> None:
        for log in self._logs:
            log.append(event)


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
    """The event that says what a replay has to be built from."""
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
