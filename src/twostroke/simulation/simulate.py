"""The scheduler that serves, driven through simulated time: a step takes as long as the model of step times says.

    arrivals ──► Scheduler.schedule ──► seconds of the batch ──► Scheduler.update ──► …
                  the real one            cost/step_model.py       commits of known outcomes

Nothing of the scheduler or of the KV cache's accounts is imitated, so what it would decide in service it decides here;
only time is a prediction. Pure: no clock, no dice; the same input gives the same run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from twostroke.batch import Commit, ScheduledBatch, ScheduledRequest, StepSeconds
from twostroke.cost.step_model import PredictsSteps
from twostroke.cost.step_work import Layers
from twostroke.errors import InvalidParameter
from twostroke.events import EngineStarted
from twostroke.request import FinishReason
from twostroke.request_times import RequestTimes
from twostroke.scheduler.replay import layers_of, scheduler_of
from twostroke.scheduler.scheduler import Scheduler
from twostroke.served_run import Run, ServedRequest, StepSample
from twostroke.simulation.requests import SimulatedRequest


@dataclass(slots=True)
class _Live:
    given: SimulatedRequest
    served: ServedRequest
    num_outputs: int = 0
    num_hashed: int = 0
    """Full blocks that the scheduler knows by name."""


class Simulation:
    """One engine in simulated time.

    Args:
        scheduler: with its KV cache's accounts; nothing has run yet.
        layers: of the model, for the work of its steps.
        step_times: how long they take.
        block_size: tokens of a KV block.
        names_blocks: whether anybody looks blocks up (the prefix cache is on).
        ended: is called whenever a request has ended.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        layers: Layers,
        step_times: PredictsSteps,
        *,
        block_size: int,
        names_blocks: bool = True,
        ended: Callable[[], object] | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._layers = layers
        self._step_times = step_times
        self._block_size = block_size
        self._names_blocks = names_blocks
        self._ended = ended
        self._live: dict[str, _Live] = {}
        self._given_up: deque[tuple[float, str]] = deque()
        """Who ends without a token, and when."""
        self.steps: list[StepSample] = []

    def run(self, requests: Sequence[SimulatedRequest]) -> Run:
        """All of them, from the first arrival to the last end.

        Raises:
            InvalidParameter: a request is longer than the engine takes.
        """
        waiting = deque(sorted(requests, key=lambda one: one.arrival.arrival_time_s))
        served = [ServedRequest(one.arrival.request_id, RequestTimes(one.arrival.arrival_time_s)) for one in waiting]
        by_arrival = iter(served)
        now_s = waiting[0].arrival.arrival_time_s if waiting else 0.0
        while waiting or self._scheduler.has_work:
            while waiting and waiting[0].arrival.arrival_time_s <= now_s:
                self._arrive(waiting.popleft(), next(by_arrival))
            self._end_given_up(now_s)
            batch = self._scheduler.schedule(now_s)
            if not batch.is_empty:
                now_s = self._execute(batch, now_s)
                continue
            later = [times for times in (_next_arrival(waiting), self._next_given_up()) if times is not None]
            if not later:
                assert not self._scheduler.has_work, f"{self._scheduler.num_waiting} requests wait for ever"
                break
            now_s = max(now_s, min(later))
        ran = tuple(request for request in served if request.times.token_times_s)
        return Run(ran, tuple(self.steps), now_s)

    def _arrive(self, request: SimulatedRequest, served: ServedRequest) -> None:
        arrival = request.arrival
        most = self._scheduler.max_model_len
        if arrival.num_prompt_tokens + arrival.max_tokens > most:
            limit = f"has {arrival.num_prompt_tokens} + {arrival.max_tokens} tokens; the engine takes {most}"
            raise InvalidParameter("request", arrival.request_id, limit, "Give a larger max_model_len.")
        self._live[arrival.request_id] = _Live(request, served, num_hashed=len(arrival.block_hashes))
        self._scheduler.add_request(arrival)
        if request.ended_after_s is not None:
            self._given_up.append((arrival.arrival_time_s + request.ended_after_s, arrival.request_id))
            self._given_up = deque(sorted(self._given_up))

    def _end_given_up(self, now_s: float) -> None:
        while self._given_up and self._given_up[0][0] <= now_s:
            _, request_id = self._given_up.popleft()
            if self._live.pop(request_id, None) is not None:
                self._say_that_one_ended()
            self._scheduler.finish(request_id, FinishReason.ABORT)

    def _next_given_up(self) -> float | None:
        return self._given_up[0][0] if self._given_up else None

    def _execute(self, batch: ScheduledBatch, begin_s: float) -> float:
        """Lets the time of a step pass and takes its result in; returns when that is."""
        seconds = self._step_times.seconds(self._layers.work_of(batch))
        end_s = begin_s + seconds
        for admitted in batch.admitted:
            served = self._live[admitted.request_id].served
            if served.times.scheduled_s is None:
                served.times.scheduled_s = begin_s
                served.num_cached_tokens = admitted.num_cached_tokens
        for request_id in batch.preempted_request_ids:
            self._live[request_id].served.times.num_preemptions += 1
        self._scheduler.update(batch.step, list(self._commits(batch, end_s)), StepSeconds(seconds))
        self.steps.append(
            StepSample(
                end_s=end_s,
                wall_s=seconds,
                operator_s=seconds,
                num_seqs=len(batch.requests),
                num_prefill_tokens=batch.num_prefill_tokens,
                num_decode_tokens=batch.num_decode_tokens,
                limited_by=batch.limited_by,
                num_waiting=batch.num_waiting,
            )
        )
        return end_s

    def _commits(self, batch: ScheduledBatch, end_s: float) -> Iterator[Commit]:
        for scheduled in batch.requests:
            if scheduled.samples_token:
                yield self._sampled(scheduled, end_s)
            else:
                yield Commit(scheduled.request_id, 0)

    def _sampled(self, scheduled: ScheduledRequest, end_s: float) -> Commit:
        """One token. Who was given up without any in the log may get some here; it ends when its caller goes."""
        live = self._live[scheduled.request_id]
        live.num_outputs += 1
        live.served.times.token_times_s.append(end_s)
        reason = None
        given = live.given
        is_last = given.ended_after_s is None and live.num_outputs >= given.num_outputs
        if is_last or live.num_outputs >= given.arrival.max_tokens:
            reason = given.finish_reason
            live.served.finish_reason = reason
            del self._live[scheduled.request_id]
            self._say_that_one_ended()
        return Commit(scheduled.request_id, 1, self._new_hashes(live), reason)

    def _say_that_one_ended(self) -> None:
        if self._ended is not None:
            self._ended()

    def _new_hashes(self, live: _Live) -> tuple[bytes, ...]:
        num_full = (live.given.arrival.num_prompt_tokens + live.num_outputs) // self._block_size
        if not self._names_blocks or num_full <= live.num_hashed:
            return ()
        first, live.num_hashed = live.num_hashed, num_full
        return tuple(live.given.hash_of_block(index) for index in range(first, num_full))


def _next_arrival(waiting: Sequence[SimulatedRequest]) -> float | None:
    return waiting[0].arrival.arrival_time_s if waiting else None


def simulate(
    started: EngineStarted,
    requests: Sequence[SimulatedRequest],
    step_times: PredictsSteps,
    ended: Callable[[], object] | None = None,
    pinned: Sequence[bytes] = (),
) -> Run:
    """An engine like the one that was recorded, in simulated time.

    Args:
        started: how it began.
        requests: with their outcomes.
        step_times: how long steps take.
        ended: is called whenever a request has ended.
        pinned: names of blocks that are to be evicted after all others.
    """
    scheduler = scheduler_of(started)
    scheduler.pin_prefix(pinned)
    simulation = Simulation(
        scheduler,
        layers_of(started),
        step_times,
        block_size=started.layout["block_size"],
        names_blocks=started.cache["enable_prefix_caching"],
        ended=ended,
    )
    return simulation.run(requests)
