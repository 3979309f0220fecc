"""A run reconstructed from its event log: the same figures as for a run that was measured live."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from twostroke.errors import InvalidParameter
from twostroke.events import (
    UNNAMED_LOG,
    EngineLost,
    EngineStarted,
    Event,
    EventsDropped,
    ExpertsMeasured,
    KVBlockChecked,
    KVHoldEnded,
    KVImportBegan,
    KVImportEnded,
    MeasurementBegan,
    MemorySampled,
    PoolScaled,
    PrefixCacheReset,
    RequestArrived,
    RequestFinishedByCaller,
    RequestRouted,
    StepCommitted,
    StepScheduled,
    TokensDelivered,
    gap_error,
)
from twostroke.outputs import RequestTimes
from twostroke.served_run import Run, ServedRequest, StepSample


def run_from_log(events: Iterable[Event]) -> Run:
    """Reconstruct a run from the events of one engine; events before the last measurement began are left out.

    A step's wall time runs from its decision until its result was accounted for, on the engine's clock. `drive`
    measures the whole call instead, which also includes the writing of the last event.
    Requests that never got a token (aborted in the queue, or not ended when the log ends) are left out.

    Raises:
        InvalidParameter: no step was ever finished, or events are missing.
    """
    reader = _Reader()
    for event in events:
        reader.take(event)
    if not reader.steps:
        limit = "must hold at least one finished step since the last start, or since the measurement began"
        remedy = "Give a file that --event-log wrote, as it was written."
        raise InvalidParameter("event_log", UNNAMED_LOG, limit, remedy)
    served = tuple(request for request in reader.requests.values() if request.times.token_times_s)
    return Run(served, tuple(reader.steps), reader.steps[-1].end_s)


def count_prompt_tokens(events: Iterable[Event]) -> int:
    """Return the prompt tokens of all requests of the run that `run_from_log` reads.

    A request that never got a token counts: its prompt may have been computed.
    """
    num_tokens = 0
    for event in events:
        if isinstance(event, EngineStarted | MeasurementBegan):
            num_tokens = 0
        elif isinstance(event, RequestArrived):
            num_tokens += event.arrival.num_prompt_tokens
    return num_tokens


@dataclass(slots=True)
class _Reader:
    requests: dict[str, ServedRequest] = field(default_factory=dict[str, ServedRequest])
    steps: list[StepSample] = field(default_factory=list[StepSample])
    _begin_s: float | None = None
    """Time of the first arrival; all other times count from it."""
    _decided: dict[int, StepScheduled] = field(default_factory=dict[int, StepScheduled])
    _ended: int = 0

    def take(self, event: Event) -> None:
        match event:
            case EngineStarted() | MeasurementBegan():
                self._reset()  # the file was appended to, or this was a warm-up: only the last run counts
            case RequestArrived():
                self._arrived(event)
            case StepScheduled():
                self._scheduled(event)
            case StepCommitted():
                self._committed(event)
            case (
                PrefixCacheReset()
                | EngineLost()
                | MemorySampled()
                | ExpertsMeasured()
                | TokensDelivered()
                | RequestRouted()
                | PoolScaled()
                | KVImportBegan()
                | KVImportEnded()
                | KVHoldEnded()
            ):
                pass
            case KVBlockChecked():
                self._kv_checked(event)
            case RequestFinishedByCaller():
                self._finish(event.request_id)
            case EventsDropped():
                raise gap_error(event)

    def _reset(self) -> None:
        self.requests, self.steps, self._begin_s, self._decided, self._ended = {}, [], None, {}, 0

    def _arrived(self, event: RequestArrived) -> None:
        arrival_s = event.arrival.arrival_time_s
        if self._begin_s is None:
            self._begin_s = arrival_s
        self.requests[event.request_id] = ServedRequest(event.request_id, RequestTimes(arrival_s - self._begin_s))

    def _scheduled(self, event: StepScheduled) -> None:
        batch = event.batch
        if batch.is_empty or self._begin_s is None:
            return
        self._decided[batch.step] = event
        for request_id in batch.preempted_request_ids:
            self.requests[request_id].times.num_preemptions += 1
        for scheduled in batch.requests:
            request = self.requests[scheduled.request_id]
            if request.times.scheduled_s is None:
                request.times.scheduled_s = event.time_s - self._begin_s
                request.num_cached_tokens = scheduled.num_computed_tokens

    def _committed(self, event: StepCommitted) -> None:
        assert self._begin_s is not None, f"step {event.step} has a result but no request has arrived"
        decided = self._decided.pop(event.step)
        batch, end_s = decided.batch, event.time_s - self._begin_s
        wall_s = (event.accounted_time_s or event.time_s) - decided.time_s
        self.steps.append(StepSample.of(batch, end_s=end_s, wall_s=wall_s, operator_s=event.operator_time_s))
        for commit in event.commits:
            self.requests[commit.request_id].times.token_times_s.extend([end_s] * commit.num_tokens)
            if commit.finish_reason is not None:
                self._finish(commit.request_id)

    def _kv_checked(self, event: KVBlockChecked) -> None:
        for request_id in event.suspects.started_over:
            self.requests[request_id].times.scheduled_s = None
        for request_id in event.suspects.ended:
            self._finish(request_id)

    def _finish(self, request_id: str) -> None:
        # the id may be used again, so the ended request is kept under an id that no request can have
        request = self.requests.pop(request_id, None)
        if request is not None:
            self._ended += 1
            self.requests[f"{request_id}\0{self._ended}"] = request
