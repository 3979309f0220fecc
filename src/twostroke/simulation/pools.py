"""Two pools in simulated time: the router that serves, a scheduler for each process, and the links between them.

    arrival ─► Router.route ─┬─ handed over ─► prefill engine: one token, its blocks on loan ──┐ layers, as they
                             │                 decode engine: an import of these blocks     ◄──┘ are computed
                             └─ alone ───────► decode engine: prompt and all

What decides is what serves (pools/router.py, scheduler/, kv_cache/holds.py); what is between is what a gateway and the
ends of a hand-over do (cluster/dispatcher.py, engine/kv_lending.py, engine/kv_fetching.py), without tokens and threads:
the same messages in the same order, each heard between two steps. Messages take no time, and the layers of a step equal
parts of it. Every process is a machine of its own: nobody's steps take longer because another computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

from twostroke.config.checks import number
from twostroke.config.pools import PoolConfig
from twostroke.config.routing import RoutingConfig
from twostroke.cost.step_model import PredictsSteps
from twostroke.errors import InvalidParameter
from twostroke.events import EngineStarted
from twostroke.kv_cache.layout import KVLayout
from twostroke.kv_transfer.leases import LEASE_S
from twostroke.outputs import RequestTimes
from twostroke.pools.member import Member, Role
from twostroke.pools.route import RouteRequest
from twostroke.pools.router import REPORTS_EVERY_S, Router
from twostroke.request import Arrival
from twostroke.scheduler.replay import layers_of, layout_of, scheduler_of
from twostroke.served_run import Run, ServedRequest
from twostroke.simulation.engine import Live, SimulatedEngine, SimulatedStep
from twostroke.simulation.link import Link, Transfer
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


@dataclass(slots=True, eq=False)
class _Worker:
    """A process: its engine, and what it has been told since its last step began."""

    name: str
    role: Role
    engine: SimulatedEngine
    step: SimulatedStep | None = None
    inbox: deque[Callable[[], object]] = field(default_factory=deque[Callable[[], object]])
    without_room: deque[_HandOver] = field(default_factory=deque["_HandOver"])
    """Imports that wait for blocks."""
    num_under_way: int = 0
    """Imports that have blocks, and whose request does not run."""
    lends: dict[str, _HandOver] = field(default_factory=dict[str, "_HandOver"])
    num_free_blocks: int = 0
    step_s: float = 0.0
    reported_s: float = float("-inf")


@dataclass(slots=True, eq=False)
class _HandOver:
    """A prompt's way from one process to another."""

    number: int
    live: Live
    giver: _Worker
    taker: _Worker
    hashes: tuple[bytes, ...]
    """Of the whole blocks of the prompt."""
    parts: list[tuple[int, float, float]] = field(default_factory=list[tuple[int, float, float]])
    """As the giver computes it: up to which block, from when until when."""
    transfer: Transfer | None = None
    """None while the taker has no blocks for it."""
    first_missing: tuple[int, ...] = ()
    """Per KV group, the first block that the taker does not have."""
    is_lent: bool = False
    """All is computed and on loan."""
    is_lost: bool = False
    """The giver has taken it back."""
    is_here: bool = False
    """The taker has all of it, and keeps it for its request."""
    is_over: bool = False
    """The taker has all of it, or will not."""
    is_gone: bool = False
    """Its caller is: no token of it goes on."""
    waits: bool = False
    """Its request is at the taker, and waits for it."""

    @property
    def num_blocks_begun(self) -> int:
        """Blocks that are computed, or being computed."""
        return self.parts[-1][0] if self.parts else 0


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
        self._workers: dict[str, _Worker] = {}
        for role, size in ((Role.PREFILL, pools.prefill), (Role.DECODE, pools.decode)):
            for i in range(size):
                engine = SimulatedEngine(
                    scheduler_of(started),
                    self._layers,
                    step_times,
                    block_size=self._layout.block_size,
                    names_blocks=started.cache["enable_prefix_caching"],
                )
                worker = _Worker(f"{role.value}-{i}", role, engine, num_free_blocks=started.num_blocks)
                self._workers[worker.name] = worker
                self._report(worker)
        self._link = Link(pools.link_bytes_per_s or 1.0)
        if pools.link_bytes_per_s is not None:  # as it would be known after the first hand-over
            for giver in self._of(Role.PREFILL):
                for taker in self._of(Role.DECODE):
                    self._router.link_measured(giver.name, taker.name, pools.link_bytes_per_s)
        self._numbers = count()
        self._places: dict[str, _Worker | _HandOver] = {}
        """Of who has not ended: who does it all, or its hand-over."""
        self._by_transfer: dict[Transfer, _HandOver] = {}
        self._given_up: deque[tuple[float, str]] = deque()
        """Who ends without a token, and when."""
        self._leases: deque[tuple[float, _HandOver]] = deque()
        """Until when somebody has to come for what is on loan."""
        self._num_handed_over = self._num_fetched = self._num_bytes = 0

    @property
    def hand_overs(self) -> HandOvers:
        """So far."""
        return HandOvers(self._num_handed_over, self._num_fetched, self._num_bytes)

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
            self._now_s = next_s
            self._take_bytes_in()
            for worker in self._workers.values():
                if worker.step is not None and worker.step.end_s <= next_s:
                    self._take_step_in(worker, worker.step)
            while waiting and waiting[0].arrival.arrival_time_s <= next_s:
                self._arrive(Live(waiting.popleft(), next(by_arrival)))
            self._end_given_up()
            self._end_leases()
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
        times += [queue[0][0] for queue in (self._given_up, self._leases) if queue]
        moving_s = self._link.next_s
        times += [] if moving_s is None else [moving_s]
        return max(self._now_s, min(times)) if times else None

    def _of(self, role: Role) -> list[_Worker]:
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
        hand_over = _HandOver(next(self._numbers), live, giver, taker, tuple(asked.block_hashes[:num_pages]))
        self._num_handed_over += 1
        self._places[arrival.request_id] = hand_over
        giver.inbox.append(partial(self._lend, hand_over))
        taker.inbox.append(partial(taker.without_room.append, hand_over))

    def _names(self, live: Live, num_tokens: int) -> tuple[bytes, ...]:
        """Of its full blocks, where anybody asks for names."""
        if not live.given.arrival.block_hashes and not self._of(Role.PREFILL):
            return ()
        return tuple(live.given.hash_of_block(i) for i in range(num_tokens // self._layout.block_size))

    def _end_given_up(self) -> None:
        while self._given_up and self._given_up[0][0] <= self._now_s:
            _, request_id = self._given_up.popleft()
            place = self._places.pop(request_id, None)
            if place is None:
                continue
            if isinstance(place, _Worker):
                place.inbox.append(partial(_finish, place, request_id))
            else:
                place.is_gone = True
                place.giver.inbox.append(partial(self._finish_lent, place))
                place.taker.inbox.append(partial(self._finish_taken, place))
            self._say_that_one_ended()

    def _say_that_one_ended(self) -> None:
        if self._ended is not None:
            self._ended()

    def _report(self, worker: _Worker) -> None:
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
            is_busy = self._take_bytes_in() or is_busy

    def _go_round(self, worker: _Worker) -> bool:
        """Whether it had anything to do."""
        has_heard = bool(worker.inbox)
        while worker.inbox:
            worker.inbox.popleft()()
        self._let_imports_in(worker)
        if worker.engine.has_work:
            worker.step = worker.engine.decide(self._now_s)
        if worker.step is None:
            return has_heard
        batch = worker.step.batch
        worker.num_free_blocks = batch.num_free_blocks
        if not batch.num_prefill_tokens:
            worker.step_s = worker.step.end_s - worker.step.begin_s
        if worker.lends:
            self._begin_parts(worker, worker.step)
        return True

    def _take_step_in(self, worker: _Worker, step: SimulatedStep) -> None:
        worker.step = None
        for live in worker.engine.take_in(step):
            request_id = live.given.arrival.request_id
            hand_over = worker.lends.pop(request_id, None)
            if hand_over is not None:
                self._settle_loan(hand_over)
                if not hand_over.is_gone:
                    self._go_on(hand_over)
            if live.has_ended and self._places.pop(request_id, None) is not None:
                self._say_that_one_ended()
        self._report(worker)

    # ------------------------------------------------------------------ the end that lends

    def _lend(self, hand_over: _HandOver) -> None:
        """One token here; who decodes makes the others."""
        live, giver = hand_over.live, hand_over.giver
        arrival = replace(live.given.arrival, max_tokens=1, lend_as=hand_over.number, block_hashes=hand_over.hashes)
        giver.lends[arrival.request_id] = hand_over
        giver.engine.arrive(live, arrival)

    def _begin_parts(self, giver: _Worker, step: SimulatedStep) -> None:
        """What of the prompts is cached, and what the step fills, layer by layer."""
        block_size = self._layout.block_size
        for request_id in step.batch.preempted_request_ids:
            if request_id in giver.lends:
                self._take_back(giver.lends[request_id])
        cached = {admitted.request_id: admitted.num_cached_tokens for admitted in step.batch.admitted}
        for share in step.batch.requests:
            hand_over = giver.lends.get(share.request_id)
            if hand_over is None or hand_over.is_lost:
                continue
            self._begin_part(hand_over, cached.get(share.request_id, 0) // block_size, step.begin_s, step.begin_s)
            end = (share.num_computed_tokens + share.num_scheduled_tokens) // block_size
            self._begin_part(hand_over, end, step.begin_s, step.end_s)

    def _begin_part(self, hand_over: _HandOver, end: int, begin_s: float, end_s: float) -> None:
        first, end = hand_over.num_blocks_begun, min(end, len(hand_over.hashes))
        if end > first:
            hand_over.parts.append((end, begin_s, end_s))
            if hand_over.transfer is not None:
                hand_over.transfer.add(self._pieces(hand_over, first, hand_over.parts[-1]))

    def _pieces(self, hand_over: _HandOver, first: int, part: tuple[int, float, float]) -> Iterator[tuple[float, int]]:
        """Of the pages from `first` on, what the taker lacks, by layers: when they are there, and their bytes."""
        end, begin_s, end_s = part
        of_layers = {
            layer_id: (missing * group.pages_per_block, self._layout.bytes_per_layer(group))
            for group, missing in zip(self._layout.groups, hand_over.first_missing, strict=True)
            for layer_id in group.layer_ids
        }
        for layer_id, (first_page, layer_bytes) in sorted(of_layers.items()):
            ready_s = begin_s + (layer_id + 1) / self._layers.num_layers * (end_s - begin_s)
            yield ready_s, max(0, end - max(first, first_page)) * layer_bytes

    def _settle_loan(self, hand_over: _HandOver) -> None:
        """Its request is through at the giver: the blocks are on loan, or they are not."""
        if hand_over.is_lost:
            hand_over.giver.engine.scheduler.handover.end_hold(hand_over.number)
        elif not hand_over.giver.engine.scheduler.handover.is_on_loan(hand_over.number):
            self._take_back(hand_over)
        elif hand_over.is_over:  # the taker wants it no more
            hand_over.giver.engine.scheduler.handover.end_hold(hand_over.number)
        else:
            hand_over.is_lent = True
            if hand_over.transfer is None:
                self._leases.append((self._now_s + LEASE_S, hand_over))
            else:
                hand_over.transfer.is_whole = True

    def _take_back(self, hand_over: _HandOver) -> None:
        """What was read of it is worth nothing."""
        hand_over.is_lost = True
        hand_over.taker.inbox.append(partial(self._fail, hand_over))

    def _end_leases(self) -> None:
        while self._leases and self._leases[0][0] <= self._now_s:
            _, hand_over = self._leases.popleft()
            if hand_over.transfer is None and not hand_over.is_over:
                self._take_back(hand_over)
                self._give_back(hand_over)

    def _give_back(self, hand_over: _HandOver) -> None:
        """Nobody fetches it any more: the giver's blocks are ordinary ones."""
        if hand_over.is_lent:
            scheduler = hand_over.giver.engine.scheduler
            hand_over.giver.inbox.append(partial(scheduler.handover.end_hold, hand_over.number))

    def _finish_lent(self, hand_over: _HandOver) -> None:
        """Its caller has gone."""
        request_id = hand_over.live.given.arrival.request_id
        if hand_over.giver.lends.pop(request_id, None) is not None:
            hand_over.giver.engine.finish(request_id)
            self._take_back(hand_over)

    # ------------------------------------------------------------------ the end that fetches

    def _let_imports_in(self, taker: _Worker) -> None:
        """Prefixes take their blocks, in their order, as far as there is room."""
        while taker.without_room:
            hand_over = taker.without_room[0]
            num_tokens = len(hand_over.hashes) * self._layout.block_size
            into = taker.engine.scheduler.handover.begin_import(hand_over.number, hand_over.hashes, num_tokens)
            if into is None:
                if taker.engine.has_work or taker.num_under_way:
                    return
                self._fail(hand_over)  # there is no room for it beside what the pool must keep
                continue
            taker.without_room.popleft()
            taker.num_under_way += 1
            self._begin_transfer(hand_over, into.first_missing)

    def _begin_transfer(self, hand_over: _HandOver, first_missing: tuple[int, ...]) -> None:
        hand_over.first_missing = first_missing
        transfer = hand_over.transfer = Transfer(hand_over.giver.name, hand_over.taker.name)
        first = 0
        for part in hand_over.parts:
            transfer.add(self._pieces(hand_over, first, part))
            first = part[0]
        transfer.is_whole = hand_over.is_lent
        self._by_transfer[transfer] = hand_over
        self._link.begin(transfer, self._now_s)

    def _take_bytes_in(self) -> bool:
        """Whether any prefix has come."""
        done = self._link.advance(self._now_s)
        for transfer in done:
            hand_over = self._by_transfer.pop(transfer)
            self._num_fetched += 1
            self._num_bytes += transfer.num_bytes
            if transfer.num_bytes and transfer.busy_s > 0:
                rate = transfer.num_bytes / transfer.busy_s
                self._router.link_measured(transfer.giver, transfer.taker, rate)
            self._give_back(hand_over)
            hand_over.taker.inbox.append(partial(self._fetched, hand_over))
        return bool(done)

    def _fetched(self, hand_over: _HandOver) -> None:
        if hand_over.is_over:  # dropped meanwhile
            return
        hand_over.is_here = hand_over.is_over = True
        hand_over.taker.engine.scheduler.handover.complete_import(hand_over.number, hand_over.hashes)
        if hand_over.waits:
            self._run_on(hand_over)

    def _fail(self, hand_over: _HandOver) -> None:
        """It will not come: its request computes its prompt as if nobody had tried."""
        if hand_over.is_over:
            return
        hand_over.is_over = True
        taker = hand_over.taker
        if hand_over.transfer is None:
            taker.without_room.remove(hand_over)
        else:
            self._link.drop(hand_over.transfer)
            self._by_transfer.pop(hand_over.transfer, None)
            taker.num_under_way -= 1
            taker.engine.scheduler.handover.end_hold(hand_over.number)
        if not hand_over.is_lost:
            self._give_back(hand_over)
        if hand_over.waits:
            self._run_on(hand_over)

    def _go_on(self, hand_over: _HandOver) -> None:
        """The first token is there: where to with the request."""
        does_it = self._drop if hand_over.live.has_ended else self._take_request
        hand_over.taker.inbox.append(partial(does_it, hand_over))

    def _take_request(self, hand_over: _HandOver) -> None:
        if hand_over.is_over:
            self._run_on(hand_over)
        else:
            hand_over.waits = True

    def _run_on(self, hand_over: _HandOver) -> None:
        """As a request whose first token was generated elsewhere."""
        hand_over.waits = False
        live, taker = hand_over.live, hand_over.taker
        if hand_over.is_here:  # from now on the scheduler sees to it
            hand_over.is_here = False
            taker.num_under_way -= 1
        taker.engine.arrive(live, self._arrival_there(hand_over))

    def _arrival_there(self, hand_over: _HandOver) -> Arrival:
        live = hand_over.live
        given = live.given.arrival
        num_tokens = given.num_prompt_tokens + live.num_outputs
        return replace(
            given,
            num_prompt_tokens=num_tokens,
            max_tokens=given.max_tokens - live.num_outputs,
            block_hashes=self._names(live, num_tokens),
            import_id=hand_over.number,
        )

    def _drop(self, hand_over: _HandOver) -> None:
        """No request will come for it."""
        hand_over.waits = False
        if hand_over.is_here:
            hand_over.is_here = False
            hand_over.taker.num_under_way -= 1
            hand_over.taker.engine.scheduler.handover.end_hold(hand_over.number)
        else:
            self._fail(hand_over)

    def _finish_taken(self, hand_over: _HandOver) -> None:
        """Its caller has gone."""
        if not _finish(hand_over.taker, hand_over.live.given.arrival.request_id):
            self._drop(hand_over)


def _finish(worker: _Worker, request_id: str) -> bool:
    return worker.engine.finish(request_id)


def _check_hands_over(started: EngineStarted) -> None:
    """What a hand-over needs of each engine, as a server has it."""
    if not started.cache["enable_prefix_caching"]:
        remedy = "Add enable_prefix_caching=true, or leave prefill out."
        raise InvalidParameter("enable_prefix_caching", False, "KV is handed over through the prefix cache", remedy)
    if started.cache["kv_check_rate"]:
        limit = "does not go with prefill processes; the log is of an engine that had it"
        raise InvalidParameter("kv_check_rate", started.cache["kv_check_rate"], limit, "Leave prefill out.")
