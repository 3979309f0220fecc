"""A prompt's way from one simulated engine to another: on loan here, fetched there, both between two steps.

What decides is what serves (scheduler/, kv_cache/holds.py); what is between is what the ends of a hand-over do
(engine/kv_lending.py, engine/kv_fetching.py), without tokens and threads. Messages take no time, and the layers of a
step equal parts of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

from twostroke.cost.step_cost import Layers
from twostroke.kv_cache.layout import KVLayout
from twostroke.kv_transfer.leases import LEASE_S
from twostroke.pools.member import Role
from twostroke.request import Arrival
from twostroke.simulation.engine import Live, SimulatedEngine, SimulatedStep
from twostroke.simulation.link import Link, Transfer


@dataclass(slots=True, eq=False)
class Worker:
    """A process: its engine, and what it has been told since its last step began."""

    name: str
    role: Role
    engine: SimulatedEngine
    step: SimulatedStep | None = None
    inbox: deque[Callable[[], object]] = field(default_factory=deque[Callable[[], object]])
    without_room: deque[HandOver] = field(default_factory=deque["HandOver"])
    """Imports that wait for blocks."""
    num_under_way: int = 0
    """Imports that have blocks, and whose request does not run."""
    lends: dict[str, HandOver] = field(default_factory=dict[str, "HandOver"])
    num_free_blocks: int = 0
    step_s: float = 0.0
    reported_s: float = float("-inf")


@dataclass(slots=True, eq=False)
class HandOver:
    """A prompt's way from one process to another."""

    number: int
    live: Live
    giver: Worker
    taker: Worker
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


def names_of(live: Live, num_blocks: int) -> tuple[bytes, ...]:
    """Return the names of its first blocks."""
    return tuple(live.given.hash_of_block(i) for i in range(num_blocks))


class HandOverEnds:
    """Both ends of every hand-over, and what is under way between them.

    Args:
        layout: of every engine's KV.
        layers: of the model.
        bytes_per_s: of each process's link.
        measured: is told the rate of each transfer, by the names of its giver and its taker.
    """

    def __init__(
        self, layout: KVLayout, layers: Layers, bytes_per_s: float, measured: Callable[[str, str, float], object]
    ) -> None:
        self._layout = layout
        self._layers = layers
        self._measured = measured
        self._link = Link(bytes_per_s)
        self._by_transfer: dict[Transfer, HandOver] = {}
        self._leases: deque[tuple[float, HandOver]] = deque()
        """Until when somebody has to come for what is on loan."""
        self.now_s = 0.0
        self.num_fetched = self.num_bytes = 0
        """Prefixes that came, and their bytes."""

    def next_s(self) -> list[float]:
        """When a lease ends next, and when bytes may have come."""
        times = [self._leases[0][0]] if self._leases else []
        moving_s = self._link.next_s
        return times if moving_s is None else [*times, moving_s]

    # ------------------------------------------------------------------ the end that lends

    def lend(self, hand_over: HandOver) -> None:
        """One token here; who decodes makes the others."""
        live, giver = hand_over.live, hand_over.giver
        arrival = replace(live.given.arrival, max_tokens=1, lend_as=hand_over.number, block_hashes=hand_over.hashes)
        giver.lends[arrival.request_id] = hand_over
        giver.engine.arrive(live, arrival)

    def begin_parts(self, giver: Worker, step: SimulatedStep) -> None:
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

    def _begin_part(self, hand_over: HandOver, end: int, begin_s: float, end_s: float) -> None:
        first, end = hand_over.num_blocks_begun, min(end, len(hand_over.hashes))
        if end > first:
            hand_over.parts.append((end, begin_s, end_s))
            if hand_over.transfer is not None:
                hand_over.transfer.add(self._pieces(hand_over, first, hand_over.parts[-1]))

    def _pieces(self, hand_over: HandOver, first: int, part: tuple[int, float, float]) -> Iterator[tuple[float, int]]:
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

    def settle_loan(self, hand_over: HandOver) -> None:
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
                self._leases.append((self.now_s + LEASE_S, hand_over))
            else:
                hand_over.transfer.is_whole = True

    def _take_back(self, hand_over: HandOver) -> None:
        """What was read of it is worth nothing."""
        hand_over.is_lost = True
        hand_over.taker.inbox.append(partial(self._fail, hand_over))

    def end_leases(self) -> None:
        while self._leases and self._leases[0][0] <= self.now_s:
            _, hand_over = self._leases.popleft()
            if hand_over.transfer is None and not hand_over.is_over:
                self._take_back(hand_over)
                self._give_back(hand_over)

    def _give_back(self, hand_over: HandOver) -> None:
        """Nobody fetches it any more: the giver's blocks are ordinary ones."""
        if hand_over.is_lent:
            scheduler = hand_over.giver.engine.scheduler
            hand_over.giver.inbox.append(partial(scheduler.handover.end_hold, hand_over.number))

    def finish_lent(self, hand_over: HandOver) -> None:
        """Its caller has gone."""
        request_id = hand_over.live.given.arrival.request_id
        if hand_over.giver.lends.pop(request_id, None) is not None:
            hand_over.giver.engine.finish(request_id)
            self._take_back(hand_over)

    # ------------------------------------------------------------------ the end that fetches

    def let_imports_in(self, taker: Worker) -> None:
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

    def _begin_transfer(self, hand_over: HandOver, first_missing: tuple[int, ...]) -> None:
        hand_over.first_missing = first_missing
        transfer = hand_over.transfer = Transfer(hand_over.giver.name, hand_over.taker.name)
        first = 0
        for part in hand_over.parts:
            transfer.add(self._pieces(hand_over, first, part))
            first = part[0]
        transfer.is_whole = hand_over.is_lent
        self._by_transfer[transfer] = hand_over
        self._link.begin(transfer, self.now_s)

    def take_bytes_in(self) -> bool:
        """Whether any prefix has come."""
        done = self._link.advance(self.now_s)
        for transfer in done:
            hand_over = self._by_transfer.pop(transfer)
            self.num_fetched += 1
            self.num_bytes += transfer.num_bytes
            if transfer.num_bytes and transfer.busy_s > 0:
                rate = transfer.num_bytes / transfer.busy_s
                self._measured(transfer.giver, transfer.taker, rate)
            self._give_back(hand_over)
            hand_over.taker.inbox.append(partial(self._fetched, hand_over))
        return bool(done)

    def _fetched(self, hand_over: HandOver) -> None:
        if hand_over.is_over:  # dropped meanwhile
            return
        hand_over.is_here = hand_over.is_over = True
        hand_over.taker.engine.scheduler.handover.complete_import(hand_over.number, hand_over.hashes)
        if hand_over.waits:
            self._run_on(hand_over)

    def _fail(self, hand_over: HandOver) -> None:
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

    def go_on(self, hand_over: HandOver) -> None:
        """The first token is there: where to with the request."""
        does_it = self._drop if hand_over.live.has_ended else self._take_request
        hand_over.taker.inbox.append(partial(does_it, hand_over))

    def _take_request(self, hand_over: HandOver) -> None:
        if hand_over.is_over:
            self._run_on(hand_over)
        else:
            hand_over.waits = True

    def _run_on(self, hand_over: HandOver) -> None:
        """As a request whose first token was generated elsewhere."""
        hand_over.waits = False
        live, taker = hand_over.live, hand_over.taker
        if hand_over.is_here:  # from now on the scheduler sees to it
            hand_over.is_here = False
            taker.num_under_way -= 1
        taker.engine.arrive(live, self._arrival_there(hand_over))

    def _arrival_there(self, hand_over: HandOver) -> Arrival:
        live = hand_over.live
        given = live.given.arrival
        num_tokens = given.num_prompt_tokens + live.num_outputs
        return replace(
            given,
            num_prompt_tokens=num_tokens,
            max_tokens=given.max_tokens - live.num_outputs,
            block_hashes=names_of(live, num_tokens // self._layout.block_size),
            import_id=hand_over.number,
        )

    def _drop(self, hand_over: HandOver) -> None:
        """No request will come for it."""
        hand_over.waits = False
        if hand_over.is_here:
            hand_over.is_here = False
            hand_over.taker.num_under_way -= 1
            hand_over.taker.engine.scheduler.handover.end_hold(hand_over.number)
        else:
            self._fail(hand_over)

    def finish_taken(self, hand_over: HandOver) -> None:
        """Its caller has gone."""
        if not hand_over.taker.engine.finish(hand_over.live.given.arrival.request_id):
            self._drop(hand_over)
