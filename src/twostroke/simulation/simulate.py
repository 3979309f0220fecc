"""Simulation of one engine: the production scheduler, with step times from a model.

    arrivals ──► Scheduler.schedule ──► seconds of the batch ──► Scheduler.update ──► …
                  the real one            cost/step_model.py       commits of known outcomes

The scheduler and the KV cache accounting are the real ones, so they decide as they would in service. Only time is
predicted. Pure: no clock and no randomness; the same input gives the same run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from twostroke.cost.step_cost import Layers
from twostroke.cost.step_model import PredictsSteps
from twostroke.events import EngineStarted
from twostroke.outputs import RequestTimes
from twostroke.scheduler.replay import layers_of, scheduler_of
from twostroke.scheduler.scheduler import Scheduler
from twostroke.served_run import Run, ServedRequest
from twostroke.simulation.engine import LiveRequest, SimulatedEngine
from twostroke.simulation.requests import SimulatedRequest


class Simulation:
    """Simulation of one engine.

    Args:
        scheduler: a scheduler with its KV cache accounting; nothing has run yet.
        layers: the model's layers, from which the work of a step is computed.
        step_times: predicts how long a step takes.
        block_size: tokens of a KV block.
        hashes_blocks: whether blocks get hashes, because the prefix cache is on.
        ended: called whenever a request has ended.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        layers: Layers,
        step_times: PredictsSteps,
        *,
        block_size: int,
        hashes_blocks: bool = True,
        ended: Callable[[], object] | None = None,
    ) -> None:
        self._engine = SimulatedEngine(
            scheduler, layers, step_times, block_size=block_size, hashes_blocks=hashes_blocks
        )
        self._ended = ended
        self._aborts: deque[tuple[float, str]] = deque()
        """Requests that their callers abort before the first token: (time in seconds, request id), sorted."""

    def run(self, requests: Sequence[SimulatedRequest]) -> Run:
        """Run all requests, from the first arrival to the last end.

        Raises:
            InvalidParameter: a request is longer than the engine accepts.
        """
        engine = self._engine
        waiting = deque(sorted(requests, key=lambda one: one.arrival.arrival_time_s))
        served = [ServedRequest(one.arrival.request_id, RequestTimes(one.arrival.arrival_time_s)) for one in waiting]
        by_arrival = iter(served)
        now_s = waiting[0].arrival.arrival_time_s if waiting else 0.0
        while waiting or engine.has_work:
            while waiting and waiting[0].arrival.arrival_time_s <= now_s:
                self._arrive(waiting.popleft(), next(by_arrival))
            self._abort_due(now_s)
            step = engine.decide(now_s)
            if step is not None:
                for live in engine.commit(step):
                    assert live.has_ended, f"{live.outcome.arrival.request_id} left the engine without an end"
                    self._report_end()
                now_s = step.end_s
                continue
            later = [times for times in (_next_arrival(waiting), self._next_abort()) if times is not None]
            if not later:
                assert not engine.has_work, f"{engine.scheduler.num_waiting} requests wait and can never run"
                break
            now_s = max(now_s, min(later))
        ran = tuple(request for request in served if request.times.token_times_s)
        return Run(ran, tuple(engine.steps), now_s)

    def _arrive(self, request: SimulatedRequest, served: ServedRequest) -> None:
        arrival = request.arrival
        self._engine.arrive(LiveRequest(request, served), arrival)
        if request.ended_after_s is not None:
            self._aborts.append((arrival.arrival_time_s + request.ended_after_s, arrival.request_id))
            self._aborts = deque(sorted(self._aborts))

    def _abort_due(self, now_s: float) -> None:
        while self._aborts and self._aborts[0][0] <= now_s:
            _, request_id = self._aborts.popleft()
            if self._engine.finish(request_id):
                self._report_end()

    def _next_abort(self) -> float | None:
        return self._aborts[0][0] if self._aborts else None

    def _report_end(self) -> None:
        if self._ended is not None:
            self._ended()


def _next_arrival(waiting: Sequence[SimulatedRequest]) -> float | None:
    return waiting[0].arrival.arrival_time_s if waiting else None


def simulate(
    started: EngineStarted,
    requests: Sequence[SimulatedRequest],
    step_times: PredictsSteps,
    ended: Callable[[], object] | None = None,
) -> Run:
    """Run the requests on an engine like the recorded one, in simulated time.

    Args:
        started: the recorded start of the engine.
        requests: requests with their outcomes.
        step_times: predicts how long a step takes.
        ended: called whenever a request has ended.
    """
    scheduler = scheduler_of(started)
    simulation = Simulation(
        scheduler,
        layers_of(started),
        step_times,
        block_size=started.layout["block_size"],
        hashes_blocks=started.cache["enable_prefix_caching"],
        ended=ended,
    )
    return simulation.run(requests)
