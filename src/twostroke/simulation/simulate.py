"""The scheduler that serves, driven through simulated time: a step takes as long as the model of step times says.

    arrivals ──► Scheduler.schedule ──► seconds of the batch ──► Scheduler.update ──► …
                  the real one            cost/step_model.py       commits of known outcomes

Nothing of the scheduler or of the KV cache's accounts is imitated, so what it would decide in service it decides here;
only time is a prediction. Pure: no clock, no dice; the same input gives the same run.
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
from twostroke.simulation.engine import Live, SimulatedEngine
from twostroke.simulation.requests import SimulatedRequest


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
        self._engine = SimulatedEngine(scheduler, layers, step_times, block_size=block_size, names_blocks=names_blocks)
        self._ended = ended
        self._given_up: deque[tuple[float, str]] = deque()
        """Who ends without a token, and when."""

    def run(self, requests: Sequence[SimulatedRequest]) -> Run:
        """All of them, from the first arrival to the last end.

        Raises:
            InvalidParameter: a request is longer than the engine takes.
        """
        engine = self._engine
        waiting = deque(sorted(requests, key=lambda one: one.arrival.arrival_time_s))
        served = [ServedRequest(one.arrival.request_id, RequestTimes(one.arrival.arrival_time_s)) for one in waiting]
        by_arrival = iter(served)
        now_s = waiting[0].arrival.arrival_time_s if waiting else 0.0
        while waiting or engine.has_work:
            while waiting and waiting[0].arrival.arrival_time_s <= now_s:
                self._arrive(waiting.popleft(), next(by_arrival))
            self._end_given_up(now_s)
            step = engine.decide(now_s)
            if step is not None:
                for live in engine.take_in(step):
                    assert live.has_ended, f"{live.given.arrival.request_id} goes on nowhere"
                    self._say_that_one_ended()
                now_s = step.end_s
                continue
            later = [times for times in (_next_arrival(waiting), self._next_given_up()) if times is not None]
            if not later:
                assert not engine.has_work, f"{engine.scheduler.num_waiting} requests wait for ever"
                break
            now_s = max(now_s, min(later))
        ran = tuple(request for request in served if request.times.token_times_s)
        return Run(ran, tuple(engine.steps), now_s)

    def _arrive(self, request: SimulatedRequest, served: ServedRequest) -> None:
        arrival = request.arrival
        self._engine.arrive(Live(request, served), arrival)
        if request.ended_after_s is not None:
            self._given_up.append((arrival.arrival_time_s + request.ended_after_s, arrival.request_id))
            self._given_up = deque(sorted(self._given_up))

    def _end_given_up(self, now_s: float) -> None:
        while self._given_up and self._given_up[0][0] <= now_s:
            _, request_id = self._given_up.popleft()
            if self._engine.finish(request_id):
                self._say_that_one_ended()

    def _next_given_up(self) -> float | None:
        return self._given_up[0][0] if self._given_up else None

    def _say_that_one_ended(self) -> None:
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
    """An engine like the one that was recorded, in simulated time.

    Args:
        started: how it began.
        requests: with their outcomes.
        step_times: how long steps take.
        ended: is called whenever a request has ended.
    """
    scheduler = scheduler_of(started)
    simulation = Simulation(
        scheduler,
        layers_of(started),
        step_times,
        block_size=started.layout["block_size"],
        names_blocks=started.cache["enable_prefix_caching"],
        ended=ended,
    )
    return simulation.run(requests)
