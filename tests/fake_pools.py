"""Two pools without processes, sockets, threads or a model: everything that decides is real.

The device holds digests of what K and V depend on and checks every read (FakeExecutor); the wire moves one piece at a
time, when it is told to; a worker can die with all it knows, or be taken for dead and go on talking.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

from factories import uniform_shape
from fakes import FakeExecutor, FakeGeneration
from twostroke.batch import NewRequest, RequestResult, ScheduledBatch, StepResult
from twostroke.cluster.dispatcher import Dispatcher, DispatchResult
from twostroke.cluster.messages import Add, Command, Finish
from twostroke.cluster.routed_placer import Placer, ReadyWorker
from twostroke.config.cache import CacheConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.engine.handover_messages import DropKV, EndHold, FetchKV, KVFetched, LenderAddress
from twostroke.engine.journal import Journal, engine_started
from twostroke.engine.kv_endpoints import KVEndpoints
from twostroke.engine.kv_fetching import KVFetching
from twostroke.engine.kv_lending import KVLending
from twostroke.engine.pool_engine import PoolEngine
from twostroke.engine.token_update import TokenUpdate
from twostroke.events import EventRing
from twostroke.kv_cache.holds import KVImport
from twostroke.kv_cache.layout import KVGroup, KVLayout
from twostroke.kv_cache.manager import KVCacheManager
from twostroke.kv_check import KVCheck, KVDifference
from twostroke.kv_transfer.address import Address
from twostroke.kv_transfer.leases import Lease, LeaseBook, LenderSide
from twostroke.kv_transfer.transport import Fetched, KVSource
from twostroke.pools.member import Role
from twostroke.scheduler.scheduler import Scheduler

GARBAGE = -2
"""What a block holds that was written in two halves by different owners."""


_SHAPE = uniform_shape(
    hidden_size=1,
    intermediate_size=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=2,
    vocab_size=5,
    windows=(None,),
    bytes_per_weight=1.0,
)


class FakeDevice:
    """FakeExecutor as an Executor, which tells of its layers while a step runs."""

    max_in_flight = 1

    def __init__(self, layout: KVLayout, rng: random.Random, between_layers: Callable[[], None]) -> None:
        self.fake = FakeExecutor(layout, rng)
        self.layer_written: Callable[[int], object] = lambda layer_id: None
        self._num_layers = sum(len(group.layer_ids) for group in layout.groups)
        self._between_layers = between_layers
        self._results: deque[StepResult] = deque()

    def add_request(self, request: NewRequest) -> None:
        generation = FakeGeneration(list(request.prompt_token_ids + request.output_token_ids), 0)
        self.fake.generations[request.request_id] = generation

    def submit(self, batch: ScheduledBatch) -> None:
        self._between_layers()  # nothing of the step is there yet
        made = self.fake.execute(batch)
        for layer_id in range(self._num_layers):
            self.layer_written(layer_id)
            self._between_layers()
        results = tuple(RequestResult(name, tuple(made[name])) for name in (r.request_id for r in batch.requests))
        self._results.append(StepResult(batch.step, results))

    def collect(self) -> StepResult:
        return self._results.popleft()

    def check_kv(self, check: KVCheck, token_ids: Sequence[int]) -> tuple[KVDifference, ...] | None:
        raise AssertionError(f"{check}: nothing is checked here ({token_ids})")

    def close(self) -> None:
        pass


class FakeLender(LenderSide):
    """The book and a clock; readers come by `FakeTransfer`."""

    def __init__(self, num_layers: int, clock: Callable[[], float]) -> None:
        self.book = LeaseBook(num_layers)
        super().__init__(self.book, clock, nullcontext())


def slots_of_page(layout: KVLayout, group: KVGroup, page_id: int) -> list[tuple[int, int]]:
    """Return (block, token in it) of each token of a page."""
    ids = layout.page_ids(group)
    first = page_id % ids.stride // ids.step * layout.block_size
    return [(page_id // ids.stride, first + token) for token in range(layout.block_size)]


@dataclass
class FakeTransfer:
    """A prefix on its way; `advance` does the next little thing."""

    source: KVSource
    into: KVImport
    digest: bytes
    is_done: Callable[[Fetched], object]
    borrower: FakeWorker
    find: Callable[[int], FakeWorker | None]
    lease: Lease | None = None
    part: int = 0
    layer: int = 0
    has_all: bool = False
    is_over: bool = False
    is_given_up: bool = False

    def advance(self) -> None:  # noqa: C901 (a conversation, one answer after the other)
        """Advance by one answer of the lender, one piece, or the end."""
        if self.is_over:
            return
        lender = self.find(self.source.epoch)
        if self.is_given_up or self.borrower.is_dead:
            self._end("it was given up", lender)
        elif lender is None:
            self._end("the lender is gone", None)
        elif self.lease is None:
            self.lease = lender.lender.book.open(self.source.lease_id)
            if self.lease is None and lender.lender.book.get(self.source.lease_id) is None and lender.has_heard_all:
                self._end("the lease is over, or was never granted", lender)
        elif self.lease.failure:
            self._end(self.lease.failure, lender)
        elif self.has_all:
            self._end(lender.lender.book.settle(self.lease), lender)
        elif self.part < len(self.lease.parts):
            self._copy(lender, self.lease)
        elif self.lease.is_complete:
            self.has_all = self.lease.digest == self.digest
            if not self.has_all:
                self._end("another prefix", lender)

    def _copy(self, lender: FakeWorker, lease: Lease) -> None:
        """Copy the next layer of a part, if it is ready. A slot holds what all its layers agree on."""
        is_last = self.part == len(lease.parts) - 1
        if is_last and lease.num_layers_ready <= self.layer:
            return
        part = lease.parts[self.part]
        layout = lender.layout
        for group_id, group in enumerate(layout.groups):
            if self.layer not in group.layer_ids:
                continue
            for entry in range(max(part.first, self.into.first_missing[group_id]), part.end):
                theirs = part.rows[group_id][entry - part.first]
                mine = self.into.rows[group_id][entry]
                for there, here in zip(*(slots_of_page(layout, group, page) for page in (theirs, mine)), strict=True):
                    found = lender.device.fake.memory.get(there, (group_id, GARBAGE))
                    memory = self.borrower.device.fake.memory
                    if self.layer != group.layer_ids[0] and memory.get(here) != found:
                        found = (group_id, GARBAGE)
                    memory[here] = found
        lender.lender.book.renew(lease, lender.pools.now_s)
        self.layer += 1
        if self.layer == sum(len(group.layer_ids) for group in layout.groups):
            self.part, self.layer = self.part + 1, 0

    def _end(self, problem: str, lender: FakeWorker | None) -> None:
        self.is_over = True
        if self.lease is not None and lender is not None:
            lender.lender.book.close(self.lease)
        self.is_done(Fetched(problem))


@dataclass(eq=False)
class FakeWorker:
    """A process."""

    pools: FakePools
    member: ReadyWorker
    epoch: int
    is_dead: bool = False
    commands: deque[Command] = field(default_factory=deque)
    transfers: list[FakeTransfer] = field(default_factory=list)
    said: deque[tuple[TokenUpdate, ...]] = field(default_factory=deque)
    """On its way to the gateway."""

    def __post_init__(self) -> None:
        pools, self.layout = self.pools, self.pools.layout
        self.device = FakeDevice(self.layout, pools.dice, pools.in_the_middle)
        self.kv = KVCacheManager(self.layout, pools.num_blocks, pools.cache, pools.max_model_len)
        self.scheduler = Scheduler(pools.scheduler, self.kv, max_model_len=pools.max_model_len)
        num_layers = sum(len(group.layer_ids) for group in self.layout.groups)
        self.lender = FakeLender(num_layers, lambda: pools.now_s)
        lending = KVLending(self.scheduler, self.lender, self.layout)
        self.device.layer_written = lending.layer_written
        started = engine_started(
            pools.scheduler,
            pools.cache,
            self.layout,
            num_blocks=pools.num_blocks,
            max_model_len=pools.max_model_len,
            model="fake",
            now_s=pools.now_s,
        )
        self.log = EventRing(1_000_000)
        journal = Journal(started, _SHAPE, None, (self.log,))
        fetching = KVFetching(
            self.scheduler,
            self,
            journal,
            layout=self.layout,
            clock=lambda: pools.now_s,
            post=self.commands.append,
        )
        self.fetching = fetching
        self.engine = PoolEngine(
            self.scheduler,
            self.device,
            KVEndpoints(self.scheduler, journal, lambda: pools.now_s, lending, fetching),
            block_size=self.layout.block_size,
            hashes_blocks=True,
            journal=journal,
            clock=lambda: pools.now_s,
        )

    @property
    def has_heard_all(self) -> bool:
        """Whether every command sent to the engine was handled."""
        return not self.commands

    def fetch(
        self, source: KVSource, into: KVImport, digest: bytes, is_done: Callable[[Fetched], object]
    ) -> Callable[[], None]:
        transfer = FakeTransfer(source, into, digest, is_done, self, self.pools.find)
        self.transfers.append(transfer)

        def give_up() -> None:
            transfer.is_given_up = True

        return give_up

    def close(self) -> None:
        pass

    def obey(self) -> None:
        """Carry out the next command."""
        match self.commands.popleft():
            case Add(request):
                self.engine.add_request(request)
            case Finish(request_id, reason, num_output_tokens):
                self.engine.finish(request_id, reason, num_output_tokens)
            case FetchKV() | DropKV() | KVFetched() | EndHold() as message:
                self.engine.hand_over(message)
            case other:
                raise AssertionError(f"{other}")

    def step(self) -> None:
        """Carry out all commands, and run a step."""
        while self.commands:
            self.obey()
        if self.engine.has_work:
            self.pools.now_s += 0.01
            updates = tuple(self.engine.step())
            if updates:
                self.said.append(updates)

    def reap(self) -> None:
        """Do the work of the lender's reaper."""
        self.commands.extend(EndHold(lease_id) for lease_id in self.lender.book.reap(self.pools.now_s))


class FakePools:
    """A gateway and its workers."""

    def __init__(
        self,
        dice: random.Random,
        placer: Placer,
        *,
        layout: KVLayout,
        num_blocks: int,
        max_model_len: int,
        scheduler: SchedulerConfig,
        num_prefill: int = 1,
        num_decode: int = 2,
    ) -> None:
        self.dice = dice
        self.layout = layout
        self.num_blocks = num_blocks
        self.max_model_len = max_model_len
        self.scheduler = scheduler
        self.cache = CacheConfig(block_size=layout.block_size)
        self.now_s = 0.0
        self.dispatcher = Dispatcher(placer)
        self.workers: list[FakeWorker] = []
        self.missing: list[Role] = []
        """Roles of workers that have died and were not started again."""
        self.zombies: list[FakeWorker] = []
        """Taken for dead; they still talk."""
        self.leaving: list[FakeWorker] = []
        """Workers that take no more sequences."""
        self._broken: list[FakeTransfer] = []
        """Of borrowers that have died: the lender has still to notice."""
        self.tokens: dict[str, list[int]] = {}
        self.ended: set[str] = set()
        self.lost: dict[str, str] = {}
        self._epochs = itertools.count(1)
        self._is_in_the_middle = False
        for role, number in ((Role.PREFILL, num_prefill), (Role.DECODE, num_decode)):
            for _ in range(number):
                self.start(role)

    def find(self, epoch: int) -> FakeWorker | None:
        """Return the process that lends, if it lives, even if it was wrongly taken for dead."""
        return next((w for w in (*self.workers, *self.zombies) if w.epoch == epoch and not w.is_dead), None)

    def start(self, role: Role) -> None:
        """Start a new process."""
        epoch = next(self._epochs)
        facts = LenderAddress(Address(path=f"/{epoch}"), epoch) if role is Role.PREFILL else None
        size, whole = self.layout.block_size, self.layout.prefix_tokens
        member = ReadyWorker(f"{role}.{epoch}", role, facts, size, prefix_tokens=whole)
        self.workers.append(FakeWorker(self, member, epoch))
        self.carry_out(self.dispatcher.worker_ready(member))

    def come_back(self) -> None:
        """Start the missing workers."""
        missing, self.missing = self.missing, []
        for role in missing:
            self.start(role)

    def kill(self, worker: FakeWorker, *, really: bool, soon: bool = True) -> None:
        """Kill a worker, or only declare it dead. Another takes its place, now or in `come_back`."""
        self.workers.remove(worker)
        if really:
            self._die(worker)
            worker.said.clear()
        else:
            self.zombies.append(worker)
        self.carry_out(self.dispatcher.worker_gone(worker.member.worker_id, "it died"))
        if worker in self.leaving:
            self.leaving.remove(worker)
        elif soon:
            self.start(worker.member.role)
        else:
            self.missing.append(worker.member.role)

    def _die(self, worker: FakeWorker) -> None:
        worker.is_dead = True
        self._broken += worker.transfers

    def retire(self, worker: FakeWorker) -> None:
        """Tell the worker to leave."""
        self.leaving.append(worker)
        self.dispatcher.retire(worker.member.worker_id)

    def let_go(self, worker: FakeWorker, *, in_time: bool) -> None:
        """End the worker: its requests have ended, or its time is over."""
        worker_id = worker.member.worker_id
        if not in_time:
            self.carry_out(self.dispatcher.migrate(worker_id))
        elif self.dispatcher.live_on(worker_id):
            return
        self._die(worker)
        self.workers.remove(worker)
        self.leaving.remove(worker)
        self.carry_out(self.dispatcher.worker_gone(worker_id, "it left"))

    def carry_out(self, outcome: DispatchResult) -> None:
        """Carry out orders, and record what was delivered."""
        by_id = {worker.member.worker_id: worker for worker in self.workers}
        for order in outcome.commands:
            if order.worker_id in by_id:
                by_id[order.worker_id].commands.append(order.command)
        for update in outcome.updates:
            assert update.request_id not in self.ended, f"{update} behind its end"
            assert update.start == len(self.tokens[update.request_id])
            self.tokens[update.request_id] += update.token_ids
            if update.finish_reason is not None:
                self.ended.add(update.request_id)
        for name, cause in outcome.lost:
            self.lost[name] = cause

    def hear(self, worker: FakeWorker) -> None:
        """Handle the next report of a worker, dead or alive."""
        if worker.said:
            self.carry_out(self.dispatcher.process_updates(worker.member.worker_id, worker.said.popleft()))

    def transfers(self) -> list[FakeTransfer]:
        """Return the transfers that have not ended."""
        of_living = [transfer for worker in (*self.workers, *self.zombies) for transfer in worker.transfers]
        return [transfer for transfer in (*of_living, *self._broken) if not transfer.is_over]

    def in_the_middle(self) -> None:
        """Simulate the time between two layers of a step, in which transfers proceed."""
        for transfer in self.transfers():
            for _ in range(self.dice.choice([0, 0, 1, 3])):
                transfer.advance()
