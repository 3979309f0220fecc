"""PooledEngine: an EngineClient whose engine is two pools of processes, and which loses no request with any of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from twostroke.client.engine_client import EngineHealth, EngineState, OutputStream, PoolMember
from twostroke.client.input_processor import InputProcessor
from twostroke.client.load import EngineLoad, combined
from twostroke.client.reception import Reception
from twostroke.client.submission import Submission
from twostroke.cluster.delivery import delivery_of
from twostroke.cluster.dispatcher import Dispatched, Dispatcher, Placer
from twostroke.cluster.gateway_log import GatewayLog
from twostroke.cluster.launcher import Launcher, launcher_for
from twostroke.cluster.messages import Add, CacheWasReset, Finish, Progress, Report, ResetPrefixCache
from twostroke.cluster.pool_checks import check_engines
from twostroke.cluster.pool_scaling import ObservedLoad, PoolScaling, WorkerFigures, limits_of
from twostroke.cluster.pool_worker import PoolWorker
from twostroke.cluster.remote_engine import SHUTTING_DOWN
from twostroke.cluster.routed_placer import RoutedPlacer
from twostroke.cluster.worker_pool import WorkerPool
from twostroke.config.engine import EngineConfig
from twostroke.config.pools import MAX_WORKERS, PoolConfig
from twostroke.config.routing import RoutingConfig
from twostroke.engine.clock import monotonic_clock
from twostroke.engine.facts import EngineFacts
from twostroke.engine.generation import GenerationRequest
from twostroke.errors import EngineError, EngineUnavailable, InvalidParameter
from twostroke.event_codec import PackedEvent, PackedEventLog, pack, unpack
from twostroke.events import Event, RequestRouted
from twostroke.explain.names import GATEWAY
from twostroke.kv_transfer.geometry import KVGeometry
from twostroke.kv_transfer.nixl_reads import check_nixl
from twostroke.log import get_logger
from twostroke.pools.autoscaler import ScalingDecision
from twostroke.pools.member import Role
from twostroke.pools.ratio import SuggestedRatio
from twostroke.request import FinishReason
from twostroke.tokenizer.tokenizer import Tokenizer

log = get_logger(__name__)

LOOKS_EVERY_S = 0.1
"""How often somebody looks whether a worker has gone silent."""


class PooledEngine:
    """See EngineClient. `start` it, and `close` it.

    Args:
        config: of each engine.
        pools: how many there are.
        listeners: hear every event of every process, as it is reported.
        stall_after_s: with requests and no step anywhere for so long, it counts as stalled.
        chat_template: Jinja source instead of the model's own.
        on_trouble: called with the cause when a process has died, in a thread.
        drain_timeout_s: so long a worker that is not needed any more may take to end what it has.
        placer: chooses workers.
        launcher: starts processes; default: whom the pools' config asks for.

    Raises:
        InvalidParameter: the engine's settings do not go with pools.
        SetupError: what the launcher or the transport needs is not installed.
    """

    def __init__(  # noqa: PLR0913 (as of RemoteEngine, and two more)
        self,
        config: EngineConfig,
        pools: PoolConfig,
        *,
        listeners: Sequence[PackedEventLog] = (),
        stall_after_s: float = 30.0,
        chat_template: str | None = None,
        on_trouble: Callable[[str], object] = log.error,
        drain_timeout_s: float = 30.0,
        placer: Placer | None = None,
        launcher: Launcher | None = None,
    ) -> None:
        address = config.load.tensor_parallel_address
        if address is not None:
            limit = "the engines of a pool cannot all meet their ranks there"
            raise InvalidParameter("tensor_parallel_address", address, limit, "Leave it out: each starts its own.")
        check_engines(config, pools, hands_over=pools.prefill > 0)
        if pools.transport == "nixl":
            check_nixl()
        self._config = config
        self._pools = pools
        self._listeners = tuple(listeners)
        self._stall_after_s = stall_after_s
        self._on_trouble = on_trouble
        self._launcher = launcher or launcher_for(config, pools)
        self._drain_timeout_s = drain_timeout_s
        self._reception = Reception(chat_template)
        self._router = RoutedPlacer(RoutingConfig(tpot_target_s=pools.tpot_target_s))
        self._dispatcher = Dispatcher(placer or self._router)
        live_on = self._dispatcher.live_on
        self._pool = WorkerPool(config, pools, self, self._launcher, num_live=live_on, migrate=self._migrate)
        self._by_id: dict[str, PoolWorker] = {}
        self._geometry: KVGeometry | None = None
        self._geometry_of = ""
        """Who was loaded first."""
        self._meeting = asyncio.Lock()
        self._has_met = False
        self._resets: list[tuple[set[str], asyncio.Future[bool]]] = []
        self._scaling = PoolScaling(limits_of(pools))
        self._observed = ObservedLoad(pools.tpot_target_s)
        self._tasks: list[asyncio.Task[None]] = []
        self._progress_s = monotonic_clock()
        self._log = GatewayLog(self._tell_soon)
        self._no_room = ""
        self._is_draining = self._is_closed = False

    # ------------------------------------------------------------------ what EngineClient promises

    @property
    def facts(self) -> EngineFacts:
        """See EngineClient; of a worker that decodes."""
        return self._reception.facts

    @property
    def tokenizer(self) -> Tokenizer:
        """See EngineClient."""
        return self._reception.tokenizer

    @property
    def inputs(self) -> InputProcessor:
        """See EngineClient."""
        return self._reception.inputs

    def now_s(self) -> float:
        """The monotonic clock of this machine, by which all processes tell times."""
        return monotonic_clock()

    def health(self) -> EngineHealth:
        """Health of the pools: running while any worker decodes, even a prefill worker for lack of a decode worker."""
        num_requests = self._reception.num_streams
        num_restarts = sum(worker.num_restarts for worker in self._pool.workers)
        decoders = self._pool.of(Role.DECODE)
        state = EngineState.RUNNING
        cause = ", ".join(f"{w.worker_id} is {w.state}" for w in self._pool.workers if not w.is_ready)
        waited_s = self.now_s() - self._progress_s
        if self._is_closed:
            state, cause = EngineState.CLOSED, "it was closed"
        elif not any(worker.is_ready for worker in decoders) and not self._has_stand_in:
            has_failed = all(worker.state is EngineState.FAILED for worker in decoders)
            state = EngineState.FAILED if has_failed else EngineState.STARTING
            cause = "; ".join(worker.cause for worker in decoders)
        elif num_requests and waited_s > self._stall_after_s:
            state = EngineState.STALLED
            cause = f"{num_requests} requests are queued and no step was committed for {waited_s:.1f} s"
        elif self._is_draining:
            state, cause = EngineState.DRAINING, SHUTTING_DOWN
        return EngineHealth(state, cause or "all workers run", num_requests, num_restarts)

    @property
    def _has_stand_in(self) -> bool:
        """Return whether a prefill worker can decode while no decode worker is ready."""
        return self._has_met and any(worker.is_ready for worker in self._pool.of(Role.PREFILL))

    def generate(self, submission: Submission) -> OutputStream:
        """See EngineClient."""
        health = self.health()
        if not health.is_ready:
            may_return = health.state is not EngineState.FAILED
            raise EngineUnavailable(f"the engine takes no requests now: {health.cause}.", may_return=may_return)
        if not self._reception.num_streams:
            self._progress_s = self.now_s()
        return self._reception.receive(submission, self._is_waiting)

    @property
    def is_idle(self) -> bool:
        """See EngineClient: the dispatcher may still keep what no stream waits for."""
        return False

    def load(self, tenant: str, *, background: bool = False) -> EngineLoad:
        """See EngineClient; of all that run, together."""
        ready = [worker for worker in self._pool.workers if worker.is_ready]
        loads = [(worker.role, worker.meter.load(tenant, background=background)) for worker in ready]
        prefills = [load for role, load in loads if role is Role.PREFILL]
        decodes = [load for role, load in loads if role is Role.DECODE]
        return combined(prefills, decodes) if decodes else combined([], prefills)

    def abort(self, request_id: str, tenant: str = "") -> bool:
        """See EngineClient."""
        return self._reception.abort(request_id, tenant)

    async def reset_prefix_cache(self) -> bool:
        """See EngineClient; in every process."""
        asked = {worker.worker_id for worker in self._pool.workers if worker.is_ready}
        if not asked:
            raise EngineUnavailable(f"the engine takes no commands now: {self.health().cause}.")
        reset: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._resets.append((asked, reset))
        for worker_id in asked:
            self._by_id[worker_id].send(ResetPrefixCache())
        return await reset

    # ------------------------------------------------------------------ what a front desk needs of who runs sequences

    def add_request(self, request: GenerationRequest) -> None:
        """Queues a sequence."""
        self._carry_out(self._dispatcher.add(request))

    def finish(self, request_id: str, reason: FinishReason, num_output_tokens: int | None = None) -> None:
        """Ends a sequence."""
        num_live = self._dispatcher.num_live
        outcome = self._dispatcher.finish(request_id, reason, num_output_tokens)
        if self._dispatcher.num_live < num_live:
            self._log.ended(request_id, reason, num_output_tokens)
        self._carry_out(outcome)

    # ------------------------------------------------------------------ its own life

    @property
    def pids(self) -> dict[str, int]:
        """Of the processes that run now, by worker."""
        return {worker.worker_id: worker.pid for worker in self._pool.workers if worker.pid is not None}

    @property
    def dispatcher(self) -> Dispatcher:
        """The journal."""
        return self._dispatcher

    async def start(self) -> None:
        """Starts all processes, at once.

        Raises:
            SetupError: one of them cannot load the model as the config says.
        """
        await self._launcher.open()
        self._log.open(self._config.load.event_log)
        try:
            await self._pool.start()
        except BaseException:
            await self.close()
            raise
        self._tasks.append(asyncio.create_task(self._look_after(), name="twostroke-watch"))
        if self._scaling.is_wanted:
            self._tasks.append(asyncio.create_task(self._scale_with_load(), name="twostroke-scaling"))

    @property
    def no_room(self) -> str:
        return self._no_room

    async def check_room(self, sizes: Mapping[Role, int]) -> None:
        for role, number in sizes.items():
            self._pool.check_size(role, number)
        refusal = await self._refusal_of(sizes)
        if refusal is not None:
            self._note_no_room(str(refusal))
            raise refusal

    async def _refusal_of(self, sizes: Mapping[Role, int]) -> InvalidParameter | None:
        """Return why the machines cannot hold pools of these sizes; None where they can, or where no pool grows."""
        now = {role: len(self._pool.of(role)) for role in Role if role is not Role.BOTH}
        if any(number > now[role] for role, number in sizes.items()):
            try:
                await self._launcher.check_room({**now, **sizes})
            except InvalidParameter as error:
                return error
            self._no_room = ""
        return None

    def _note_no_room(self, why: str) -> None:
        """Keep why the last larger size cannot be had, and log it once."""
        if why != self._no_room:
            self._no_room = why
            log.warning("a pool cannot grow as far as asked; %s", why)

    def scale(self, sizes: Mapping[Role, int]) -> None:
        """See ScalablePools."""
        if self._is_draining or self._is_closed:
            raise EngineUnavailable(f"the pools have no other sizes now: {self.health().cause}.")
        check_engines(self._config, self._pools, hands_over=bool(sizes.get(Role.PREFILL)))
        for role, number in sizes.items():
            self._pool.check_size(role, number)
        for role, number in sizes.items():
            self._resize(role, number, "asked for")

    def members(self) -> list[PoolMember]:
        """See ScalablePools."""
        return [
            PoolMember(
                w.worker_id,
                w.role,
                w.state,
                w.cause,
                w.pid,
                w.num_restarts,
                self._dispatcher.live_on(w.worker_id),
                {} if w.geometry is None else w.geometry.formats,
            )
            for w in self._pool.workers
        ]

    def suggested_ratio(self) -> SuggestedRatio | None:
        """See ScalablePools."""
        return self._observed.suggested(self._figures(), self.now_s())

    def drain(self) -> None:
        """Takes no more requests; what runs goes on."""
        self._is_draining = True

    def give_up(self, cause: str) -> None:
        """Ends what still runs; whoever reads a stream is told why."""
        self._reception.lose(cause)
        self._carry_out(self._dispatcher.give_up(cause))

    async def close(self) -> None:
        """Ends all processes. A second time does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.give_up("it was closed")
        for _, reset in self._resets:
            if not reset.done():
                reset.set_exception(EngineError("it was closed"))
        await self._pool.close()
        await self._launcher.close()
        self._log.close()

    # ------------------------------------------------------------------ what workers tell

    def objection(self, worker: PoolWorker, geometry: KVGeometry) -> str:
        """See Pool: all compute the same as the first, or a sequence that moves would get other tokens."""
        what = replace(geometry, layout={})  # where blocks lie differently, only hand-overs are refused
        if self._geometry is None:
            self._geometry, self._geometry_of = what, worker.worker_id
        refusal = self._geometry.refusal(what, allows_drift=self._pools.allow_numeric_drift)
        return f"{self._geometry_of} (here) and {worker.worker_id} (there): {refusal}" if refusal else ""

    async def worker_ready(self, worker: PoolWorker, facts: EngineFacts) -> None:
        """See Pool."""
        async with self._meeting:  # the text side is prepared once: what it knows of live requests must not be lost
            if worker.role is Role.DECODE and not self._has_met:
                await self._reception.meet(facts, self)
                self._has_met = True
        self._by_id[worker.worker_id] = worker
        self._observed.joined(worker.role, facts.max_num_seqs)
        self._router.joined(worker.member, facts, self._pools.transport)
        self._carry_out(self._dispatcher.worker_ready(worker.member))

    def worker_reports(self, worker: PoolWorker, report: Report) -> None:
        """See Pool."""
        match report:
            case Progress(updates, packed):
                received_s = self._progress_s = self.now_s()
                for event in map(unpack, packed):
                    worker.meter.append(event)
                    self._router.heard(worker.worker_id, event)
                self._router.reported(worker.worker_id, worker.meter.load(""), self.now_s())
                if updates:
                    num_tokens = sum(len(update.token_ids) for update in updates)
                    self._observed.saw(self.now_s(), num_output_tokens=num_tokens)
                outcome = self._dispatcher.take_in(worker.worker_id, updates)
                self._carry_out(outcome)
                if outcome.updates:
                    delivered = delivery_of(report, worker.worker_id, received_s, self.now_s())
                    packed = [*packed, pack(delivered)]
                if packed:
                    asyncio.get_running_loop().call_soon(self._tell_listeners, packed)
                if worker.role is Role.PREFILL:
                    self._log.delivered(outcome.updates)
            case CacheWasReset(had_blocks):
                self._reset_by(worker.worker_id, had_blocks=had_blocks)
            case _:
                raise AssertionError(f"not expected of a worker that runs: {report}")

    def worker_retired(self, worker: PoolWorker) -> None:
        """See Pool."""
        self._observed.left(worker.role, worker.meter.load(""))
        self._router.left(worker.worker_id)
        self._dispatcher.retire(worker.worker_id)

    def worker_gone(self, worker: PoolWorker, cause: str) -> None:
        """See Pool."""
        was_there = self._by_id.pop(worker.worker_id, None) is not None
        self._observed.left(worker.role, worker.meter.load(""))
        if was_there or not worker.is_retired:
            self._router.left(worker.worker_id)
            self._log.lost(worker.worker_id, cause)
            self._reset_by(worker.worker_id, had_blocks=True, for_all=True)
            self._carry_out(self._dispatcher.worker_gone(worker.worker_id, cause))
        if not worker.is_retired:
            asyncio.get_running_loop().run_in_executor(None, self._on_trouble, cause)
        if self.health().state is EngineState.FAILED:
            self._carry_out(self._dispatcher.give_up(self.health().cause))
            self._reception.lose(self.health().cause)

    def _migrate(self, worker_id: str) -> None:
        """What a worker that leaves has not ended in time."""
        self._carry_out(self._dispatcher.migrate(worker_id))

    def _carry_out(self, outcome: Dispatched) -> None:
        now_s = self.now_s()
        routed = [
            RequestRouted(now_s, GATEWAY, name, place.decode, place.prefill, place.reason)
            for name, place in outcome.placed
        ]
        for event in routed:
            self._router.routed(event)
            self._log.routed(event)
        for order in outcome.orders:
            worker = self._by_id.get(order.worker_id)
            if worker is not None:
                self._count(worker, order.command)
                worker.send(order.command)
        for sequence_id, drift in outcome.drifted:
            self._reception.note_drift(sequence_id, drift)
        if outcome.updates:
            self._reception.deliver(outcome.updates)
        for sequence_id, cause in outcome.lost:
            self._log.ended(sequence_id, FinishReason.ERROR)
            self._reception.lose_sequence(sequence_id, cause)

    def _count(self, worker: PoolWorker, command: object) -> None:
        match command:
            case Add(request):
                new = request.new_request
                num_tokens = len(new.prompt_token_ids) + len(new.output_token_ids)
                if worker.role is Role.PREFILL:
                    self._scaling.arrived(num_tokens)
                if worker.role is Role.PREFILL or request.import_id is None:  # a prompt that is fetched was sent before
                    self._observed.saw(self.now_s(), num_prompt_tokens=num_tokens)
                worker.meter.sent(
                    new.request_id,
                    request.tenant,
                    num_tokens=num_tokens,
                    max_tokens=request.max_tokens,
                    background=request.background,
                )
            case Finish(request_id):
                worker.meter.ended(request_id)
            case _:
                pass

    def _is_waiting(self, sequence_id: str) -> bool:
        """Whether it has not begun anywhere."""
        return not self._dispatcher.has_delivered(sequence_id) and all(
            worker.meter.is_waiting(sequence_id) or not worker.meter.knows(sequence_id) for worker in self._pool.workers
        )

    def _tell_soon(self, event: Event) -> None:
        asyncio.get_running_loop().call_soon(self._tell_listeners, [pack(event)])

    def _tell_listeners(self, events: Sequence[PackedEvent]) -> None:
        for event in events:
            for listener in self._listeners:
                listener.append(event)

    def _reset_by(self, worker_id: str, *, had_blocks: bool, for_all: bool = False) -> None:
        """A worker has forgotten its prefixes: as it was told the longest ago, or by its death, whoever asked."""
        for asked, reset in self._resets:
            if worker_id in asked:
                asked.discard(worker_id)
                if not asked and not reset.done():
                    reset.set_result(had_blocks)
                if not for_all:
                    break
        self._resets = [(asked, reset) for asked, reset in self._resets if asked]

    def _resize(self, role: Role, number: int, reason: str, first: Sequence[str] = ()) -> None:
        num_workers = len(self._pool.of(role))
        if number != num_workers:
            log.info("%s pool: %d for %d workers, %s", role, number, num_workers, reason)
            self._log.scaled(role, num_workers, number, reason)
            self._pool.scale(role, number, drain_timeout_s=self._drain_timeout_s, first=first)

    async def _scale_with_load(self) -> None:
        """Gives each pool the size that its load speaks for, every interval."""
        while True:
            await asyncio.sleep(self._pools.scaling_interval_s)
            if self._is_draining:
                continue
            for role, wanted in self._scaling.decide(self._figures(), self._pools.scaling_interval_s).items():
                num_failed = sum(worker.state is EngineState.FAILED for worker in self._pool.of(role))
                number = min(wanted.num_wanted + num_failed, MAX_WORKERS)  # who cannot be started carries no load
                try:
                    await self._resize_as_there_is_room(role, number, wanted)
                except Exception:  # a cluster that does not answer now may answer at the next look
                    log.exception("the size of the %s pool could not be decided; it is tried again", role)

    async def _resize_as_there_is_room(self, role: Role, number: int, wanted: ScalingDecision) -> None:
        """Give a pool the size that its load speaks for, or the largest below it that there is room for."""
        before, refused = self._no_room, ""
        for size in range(number, min(number, len(self._pool.of(role)) + 1) - 1, -1):
            refusal = await self._refusal_of({role: size})
            if refusal is None:
                self._resize(role, size, wanted.words, wanted.drain)
                break
            refused = refused or str(refusal)
        if refused:
            self._no_room = before
            self._note_no_room(refused)

    def _figures(self) -> list[WorkerFigures]:
        """Of the workers that stay, as they are now."""
        return [
            WorkerFigures(
                worker.worker_id,
                worker.role,
                self._dispatcher.live_on(worker.worker_id),
                worker.meter.load("") if worker.is_ready else None,
                worker.facts,
                self._router.num_free_blocks(worker.worker_id),
            )
            for role in Role
            for worker in self._pool.of(role)
            if worker.state is not EngineState.FAILED
        ]

    async def _look_after(self) -> None:
        """Ends workers that have gone silent, and reports each stall once."""
        was_stalled = False
        looked_s = self.now_s()
        while True:
            await asyncio.sleep(LOOKS_EVERY_S)
            before_s, looked_s = looked_s, self.now_s()
            if looked_s - before_s < self._pools.heartbeat_timeout_s / 2:
                self._pool.end_silent(self._pools.heartbeat_timeout_s)
            else:  # it is we who have slept
                self._pool.heard()
            self._look_for_late_workers()
            health = self.health()
            is_stalled = health.state is EngineState.STALLED
            if is_stalled and not was_stalled:
                with contextlib.suppress(Exception):
                    await asyncio.to_thread(self._on_trouble, f"the engine stalls: {health.cause}")
            was_stalled = is_stalled

    def _look_for_late_workers(self) -> None:
        """Tell the router which workers have finished no step for long, so that it prefers others for new requests."""
        now_s = self.now_s()
        for worker in self._pool.workers:
            silent_s = worker.silent_s(now_s) if worker.is_ready else 0.0
            if silent_s:
                self._router.silent(worker.worker_id, worker.meter.load(""), silent_s)
