"""Two pools in simulated time: the router that serves, a scheduler for each process, and the links between them.

    arrival ─► Router.route ─┬─ handed over ─► prefill engine: one token, its blocks on loan ──┐ layers, as they
                             │                 decode engine: an import of these blocks     ◄──┘ are computed
                             └─ alone ───────► decode engine: prompt and all

What decides is what serves (pools/router.py, scheduler/). What is between is what a gateway does
(cluster/dispatcher.py), and what the ends of a hand-over do (hand_over.py): the same messages in the same order, each
heard between two steps. Every process is a machine of its own: nobody's steps take longer because another computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

from twostroke.config.checks import number
from twostroke.config.pools import PoolConfig, RoutingConfig
from twostroke.cost.step_model import PredictsSteps
from twostroke.errors import InvalidParameter
from twostroke.events import EngineStarted
from twostroke.kv_cache.layout import KVLayout
from twostroke.outputs import RequestTimes
from twostroke.pools.member import Member, Role
from twostroke.pools.route import RouteRequest
from twostroke.pools.router import REPORTS_EVERY_S, Router
from twostroke.scheduler.replay import layers_of, layout_of, scheduler_of
from twostroke.served_run import Run, ServedRequest
from twostroke.simulation.engine import Live, SimulatedEngine, SimulatedStep
from twostroke.simulation.hand_over import HandOver, HandOverEnds, Worker, names_of
from twostroke.simulation.requests import SimulatedRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedPools:
    """How many processes there are, and how fast a link each of them has.

    Raises:
        InvalidParameter: sizes that a server does not take, or a link that is missing or joins nobody.
    """

    prefill: int = 0
    """0: whoever decodes computes its prompts itself."""
    decode: int = 0
    """0: the one process that there was."""
    link_bytes_per_s: float | None = None
    """Of each process's link, in each direction."""
    tpot_target_s: float = 0.05
    """Seconds for an output token, for which the router keeps prompts away from who decodes."""

    def __post_init__(self) -> None:
        """Checks ranges as a server does."""
        PoolConfig(prefill=self.prefill, decode=self.decode, tpot_target_s=self.tpot_target_s)
        rate = self.link_bytes_per_s
        if rate is not None:
            number("link_bytes_per_s", rate, 0, 1e18, "more than 0 bytes a second, at most 1e18", low_open=True)
        if self.prefill and rate is None:
            remedy = "Add link_bytes_per_s=1.25e9 for 10 Gbit/s, or the rate that was measured between two machines."
            raise InvalidParameter("prefill", self.prefill, "needs a link by which KV goes to who decodes", remedy)
        if not self.prefill and rate is not None:
            remedy = "Add prefill=1 and decode=1, or leave it out."
            raise InvalidParameter("link_bytes_per_s", rate, "is for a prefill pool, and there is none", remedy)


@dataclass(frozen=True, slots=True)
class HandOvers:
    """What went from one pool to the other."""

    num_requests: int
    """That were handed over, or were to be."""
    num_fetched: int
    """Of these, those whose prefix came; of the others it was computed where they decode, or they ended first."""
    num_bytes: int
    """Of KV, of prefixes that came."""


class PoolSimulation:
    """Several engines like one that was recorded, in simulated time.

    Args:
        started: how each of them begins.
        step_times: how long steps take, in each of them.
        pools: how many there are, and their links.
        ended: is called whenever a request has ended.

    Raises:
        InvalidParameter: settings of the engine that do not go with a prefill pool.
    """

    def __init__(
        self,
        started: EngineStarted,
        step_times: PredictsSteps,
        pools: SimulatedPools,
        ended: Callable[[], object] | None = None,
    ) -> None:
        if pools.prefill:
            _check_hands_over(started)
        self._layout: KVLayout = layout_of(started.layout)
        self._num_blocks = started.num_blocks
        self._max_num_seqs: int = started.scheduler["max_num_seqs"]
        self._layers = layers_of(started)
        self._ended = ended
        self._prefill_tokens_per_s = self._rate_of_prefill(started, step_times)
        self._router = Router(RoutingConfig(tpot_target_s=pools.tpot_target_s))
        self._now_s = 0.0
        self._workers: dict[str, Worker] = {}
        for role, size in ((Role.PREFILL, pools.prefill), (Role.DECODE, pools.decode)):
            for i in range(size):
                engine = SimulatedEngine(
                    scheduler_of(started),
                    self._layers,
                    step_times,
                    block_size=self._layout.block_size,
                    names_blocks=started.cache["enable_prefix_caching"],
                )
                worker = Worker(f"{role.value}-{i}", role, engine, num_free_blocks=started.num_blocks)
                self._workers[worker.name] = worker
                self._report(worker)
        self._ends = HandOverEnds(self._layout, self._layers, pools.link_bytes_per_s or 1.0, self._router.link_measured)
        if pools.link_bytes_per_s is not None:  # as it would be known after the first hand-over
            for giver in self._of(Role.PREFILL):
                for taker in self._of(Role.DECODE):
                    self._router.link_measured(giver.name, taker.name, pools.link_bytes_per_s)
        self._numbers = count()
        self._places: dict[str, Worker | HandOver] = {}
        """Of who has not ended: who does it all, or its hand-over."""
        self._given_up: deque[tuple[float, str]] = deque()
        """Who ends without a token, and when."""
        self._num_handed_over = 0

    @property
    def hand_overs(self) -> HandOvers:
        """So far."""
        return HandOvers(self._num_handed_over, self._ends.num_fetched, self._ends.num_bytes)

    def run(self, requests: Sequence[SimulatedRequest]) -> Run:
        """All of them, from the first arrival to the last end.

        Raises:
            InvalidParameter: a request is longer than the engines take.
        """
        waiting = deque(sorted(requests, key=lambda one: one.arrival.arrival_time_s))
        served = [ServedRequest(one.arrival.request_id, RequestTimes(one.arrival.arrival_time_s)) for one in waiting]
        by_arrival = iter(served)
        gone = sorted(
            (one.arrival.arrival_time_s + one.ended_after_s, one.arrival.request_id)
            for one in waiting
            if one.ended_after_s is not None
        )
        self._given_up.extend(gone)
        while (next_s := self._next_s(waiting)) is not None:
            self._now_s = self._ends.now_s = next_s
            self._ends.take_bytes_in()
            for worker in self._workers.values():
                if worker.step is not None and worker.step.end_s <= next_s:
                    self._take_step_in(worker, worker.step)
            while waiting and waiting[0].arrival.arrival_time_s <= next_s:
                self._arrive(Live(waiting.popleft(), next(by_arrival)))
            self._end_given_up()
            self._ends.end_leases()
            self._come_round()
            if not waiting and not self._places and not any(w.step or w.inbox for w in self._workers.values()):
                break
        assert not self._places, f"{len(self._places)} requests wait for ever"
        steps = sorted((step for w in self._workers.values() for step in w.engine.steps), key=lambda step: step.end_s)
        ran = tuple(request for request in served if request.times.token_times_s)
        return Run(ran, tuple(steps), self._now_s)

    def check_invariants(self, *, is_over: bool = False) -> None:
        """Of every scheduler; when all is over, that nobody holds anything any more."""
        for worker in self._workers.values():
            worker.engine.scheduler.check_invariants()
            if is_over:
                usage = worker.engine.scheduler.kv_usage
                assert not worker.without_room, f"{worker.name} still waits for room"
                assert not worker.num_under_way, f"{worker.name} waits for {worker.num_under_way} requests"
                assert not usage.num_used, f"{worker.name} holds {usage}"

    def _next_s(self, waiting: deque[SimulatedRequest]) -> float | None:
        """When anything happens next."""
        times = [worker.step.end_s for worker in self._workers.values() if worker.step is not None]
        times += [waiting[0].arrival.arrival_time_s] if waiting else []
        times += [self._given_up[0][0]] if self._given_up else []
        times += self._ends.next_s()
        return max(self._now_s, min(times)) if times else None

    def _of(self, role: Role) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.role is role]

    # ------------------------------------------------------------------ the gateway

    def _arrive(self, live: Live) -> None:
        arrival = live.given.arrival
        block_size = self._layout.block_size
        asked = RouteRequest(
            num_prompt_tokens=arrival.num_prompt_tokens,
            num_output_tokens=arrival.max_tokens,
            block_hashes=self._names(live, arrival.num_prompt_tokens),
            block_size=block_size,
            whole_tokens=self._layout.prefix_tokens,
            may_be_handed_over=arrival.reads_prefix_cache,
        )
        route = self._router.route(asked)
        if route.decode_id is None:
            raise InvalidParameter("request", arrival.request_id, route.detail)
        self._router.placed(asked, route)
        taker = self._workers[route.decode_id]
        if route.prefill_id is None:
            self._places[arrival.request_id] = taker
            taker.inbox.append(partial(taker.engine.arrive, live, arrival))
            return
        giver = self._workers[route.prefill_id]
        if arrival.max_tokens == 1:  # its first token is its last: nothing goes on anywhere
            self._places[arrival.request_id] = giver
            giver.inbox.append(partial(giver.engine.arrive, live, arrival))
            return
        num_pages = arrival.num_prompt_tokens // self._layout.prefix_tokens * self._layout.prefix_tokens // block_size
        hand_over = HandOver(next(self._numbers), live, giver, taker, tuple(asked.block_hashes[:num_pages]))
        self._num_handed_over += 1
        self._places[arrival.request_id] = hand_over
        giver.inbox.append(partial(self._ends.lend, hand_over))
        taker.inbox.append(partial(taker.without_room.append, hand_over))

    def _names(self, live: Live, num_tokens: int) -> tuple[bytes, ...]:
        """Of its full blocks, where anybody asks for names."""
        if not live.given.arrival.block_hashes and not self._of(Role.PREFILL):
            return ()
        return names_of(live, num_tokens // self._layout.block_size)

    def _end_given_up(self) -> None:
        while self._given_up and self._given_up[0][0] <= self._now_s:
            _, request_id = self._given_up.popleft()
            place = self._places.pop(request_id, None)
            if place is None:
                continue
            if isinstance(place, Worker):
                place.inbox.append(partial(place.engine.finish, request_id))
            else:
                place.is_gone = True
                place.giver.inbox.append(partial(self._ends.finish_lent, place))
                place.taker.inbox.append(partial(self._ends.finish_taken, place))
            self._say_that_one_ended()

    def _say_that_one_ended(self) -> None:
        if self._ended is not None:
            self._ended()

    def _report(self, worker: Worker) -> None:
        """What a worker says of itself, as one that has run for a while: its rate of prefill is known."""
        if self._now_s - worker.reported_s < REPORTS_EVERY_S:
            return
        worker.reported_s = self._now_s
        scheduler = worker.engine.scheduler
        self._router.put(
            Member(
                member_id=worker.name,
                role=worker.role,
                num_queued_prompt_tokens=worker.engine.num_tokens_to_prefill,
                num_running=scheduler.num_running,
                num_waiting=scheduler.num_waiting,
                max_num_seqs=self._max_num_seqs,
                num_free_blocks=worker.num_free_blocks,
                num_blocks=self._num_blocks,
                block_size=self._layout.block_size,
                kv_bytes_per_token=self._layout.bytes_per_token,
                num_layers=self._layers.num_layers,
                prefill_tokens_per_s=self._prefill_tokens_per_s,
                step_s=worker.step_s,
            )
        )

    def _rate_of_prefill(self, started: EngineStarted, step_times: PredictsSteps) -> float | None:
        """Tokens a second in chunks as large as steps take them; None where they take no time."""
        num_tokens = min(started.scheduler["max_num_batched_tokens"], started.max_model_len)
        seconds = step_times.seconds(self._layers.work([(0, num_tokens, 1)]))
        return num_tokens / seconds if seconds > 0 else None

    # ------------------------------------------------------------------ a worker's loop

    def _come_round(self) -> None:
        """Everybody who does not compute hears what there is and begins a step, until nobody has anything to do."""
        is_busy = True
        while is_busy:
            is_busy = False
            for worker in self._workers.values():
                if worker.step is None and self._go_round(worker):
                    is_busy = True
            is_busy = self._ends.take_bytes_in() or is_busy

    def _go_round(self, worker: Worker) -> bool:
        """Whether it had anything to do."""
        has_heard = bool(worker.inbox)
        while worker.inbox:
            worker.inbox.popleft()()
        self._ends.let_imports_in(worker)
        if worker.engine.has_work:
            worker.step = worker.engine.decide(self._now_s)
        if worker.step is None:
            return has_heard
        batch = worker.step.batch
        worker.num_free_blocks = batch.num_free_blocks
        if not batch.num_prefill_tokens:
            worker.step_s = worker.step.end_s - worker.step.begin_s
        if worker.lends:
            self._ends.begin_parts(worker, worker.step)
        return True

    def _take_step_in(self, worker: Worker, step: SimulatedStep) -> None:
        worker.step = None
        for live in worker.engine.take_in(step):
            request_id = live.given.arrival.request_id
            hand_over = worker.lends.pop(request_id, None)
            if hand_over is not None:
                self._ends.settle_loan(hand_over)
                if not hand_over.is_gone:
                    self._ends.go_on(hand_over)
            if live.has_ended and self._places.pop(request_id, None) is not None:
                self._say_that_one_ended()
        self._report(worker)


def _check_hands_over(started: EngineStarted) -> None:
    """What a hand-over needs of each engine, as a server has it."""
    if not started.cache["enable_prefix_caching"]:
        remedy = "Add enable_prefix_caching=true, or leave prefill out."
        raise InvalidParameter("enable_prefix_caching", False, "KV is handed over through the prefix cache", remedy)
    if started.cache["kv_check_rate"]:
        limit = "does not go with prefill processes; the log is of an engine that had it"
        raise InvalidParameter("kv_check_rate", started.cache["kv_check_rate"], limit, "Leave prefill out.")
