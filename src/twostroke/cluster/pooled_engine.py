"""PooledEngine: an EngineClient that serves from two pools of processes, and loses no request when one of them dies."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Unpack

from msgspec.structs import replace

from twostroke.client.engine_client import EngineState, PoolMember
from twostroke.client.load import EngineLoad, combined
from twostroke.cluster.dispatcher import Dispatcher, DispatchResult
from twostroke.cluster.gateway_log import GatewayLog
from twostroke.cluster.launcher import Launcher, launcher_for
from twostroke.cluster.messages import Add, Command, EngineReady, Progress
from twostroke.cluster.pool_checks import check_engines
from twostroke.cluster.pool_scaling import ObservedLoad, PoolScaling, WorkerFigures, limits_of
from twostroke.cluster.pool_worker import PoolWorker
from twostroke.cluster.remote_engine import ClientOptions, ProcessClient
from twostroke.cluster.routed_placer import Placer, ReadyWorker, RoutedPlacer
from twostroke.cluster.worker_pool import WorkerPool
from twostroke.config.engine import EngineConfig
from twostroke.config.pools import MAX_WORKERS, PoolConfig, RoutingConfig
from twostroke.engine.generation import GenerationRequest
from twostroke.engine.token_update import TokenUpdate
from twostroke.errors import EngineUnavailable, InvalidParameter
from twostroke.event_codec import PackedEvent, unpack
from twostroke.events import RequestRouted
from twostroke.explain.names import GATEWAY
from twostroke.kv_transfer.geometry import KVGeometry
from twostroke.kv_transfer.nixl_reads import check_nixl
from twostroke.log import get_logger
from twostroke.pools.autoscaler import ScalingDecision
from twostroke.pools.member import Role
from twostroke.pools.ratio import SuggestedRatio
from twostroke.request import FinishReason

log = get_logger(__name__)

POLL_INTERVAL_S = 0.1
"""Seconds between checks for workers that are silent."""


class PooledEngine(ProcessClient):
    """An EngineClient over two pools. `start` it, and `close` it.

    Args:
        config: of each engine.
        pools: sizes and settings of the pools.
        drain_timeout_s: seconds that a worker that leaves may take to end its sequences.
        placer: chooses workers.
        launcher: starts processes; None: the one that the pools' config names.
        options: the fields of ClientOptions, by name.

    Raises:
        InvalidParameter: the engine's settings do not go with pools.
        SetupError: a library that the launcher or the transport needs is not installed.
    """

    def __init__(
        self,
        config: EngineConfig,
        pools: PoolConfig,
        *,
        drain_timeout_s: float = 30.0,
        placer: Placer | None = None,
        launcher: Launcher | None = None,
        **options: Unpack[ClientOptions],
    ) -> None:
        super().__init__(**options)
        address = config.load.tensor_parallel_address
        if address is not None:
            limit = "the engines of a pool cannot all use one address"
            raise InvalidParameter("tensor_parallel_address", address, limit, "Leave it out: each chooses its own.")
        check_engines(config, pools, hands_over=pools.prefill > 0)
        if pools.transport == "nixl":
            check_nixl()
        self._config = config
        self._pools = pools
        self._launcher = launcher or launcher_for(config, pools)
        self._drain_timeout_s = drain_timeout_s
        self._router = RoutedPlacer(RoutingConfig(tpot_target_s=pools.tpot_target_s))
        self._dispatcher = Dispatcher(placer or self._router)
        live_on = self._dispatcher.live_on
        self._pool = WorkerPool(config, pools, self, self._launcher, num_live=live_on, migrate=self._migrate)
        self._by_id: dict[str, PoolWorker] = {}
        self._geometry: KVGeometry | None = None
        self._geometry_of = ""
        """Id of the worker that loaded first."""
        self._preparing = asyncio.Lock()
        self._is_prepared = False
        self._scaling = PoolScaling(limits_of(pools))
        self._observed = ObservedLoad(pools.tpot_target_s)
        self._log = GatewayLog(self._notify_soon)
        self._no_room = ""

    # ------------------------------------------------------------------ EngineClient

    @property
    def _workers(self) -> Sequence[PoolWorker]:
        return self._pool.workers

    @property
    def _takes_requests(self) -> bool:
        return self.health().is_ready

    def _state_and_cause(self) -> tuple[EngineState, str]:
        """Return RUNNING while any worker decodes, even a prefill worker for lack of a decode worker."""
        decoders = self._pool.of(Role.DECODE)
        if any(worker.is_ready for worker in decoders) or self._prefill_can_decode:
            cause = ", ".join(f"{w.worker_id} is {w.state}" for w in self._pool.workers if not w.is_ready)
            return EngineState.RUNNING, cause or "all workers run"
        has_failed = all(worker.state is EngineState.FAILED for worker in decoders)
        cause = "; ".join(worker.cause for worker in decoders)
        return EngineState.FAILED if has_failed else EngineState.STARTING, cause or "all workers run"

    @property
    def _prefill_can_decode(self) -> bool:
        """Whether a prefill worker can decode while no decode worker is ready."""
        return self._is_prepared and any(worker.is_ready for worker in self._pool.of(Role.PREFILL))

    @property
    def is_idle(self) -> bool:
        """Always False: the dispatcher may still hold sequences without a stream."""
        return False

    def load(self, tenant: str, *, background: bool = False) -> EngineLoad:
        """Return the combined load of all workers that run."""
        ready = [worker for worker in self._pool.workers if worker.is_ready]
        loads = [(worker.role, worker.meter.load(tenant, background=background)) for worker in ready]
        prefills = [load for role, load in loads if role is Role.PREFILL]
        decodes = [load for role, load in loads if role is Role.DECODE]
        return combined(prefills, decodes) if decodes else combined([], prefills)

    # ------------------------------------------------------------------ interface to StreamingFrontend

    def add_request(self, request: GenerationRequest) -> None:
        """Queue a sequence."""
        self._execute(self._dispatcher.add(request))

    def finish(self, request_id: str, reason: FinishReason, num_output_tokens: int | None = None) -> None:
        """End a sequence."""
        num_live = self._dispatcher.num_live
        outcome = self._dispatcher.finish(request_id, reason, num_output_tokens)
        if self._dispatcher.num_live < num_live:
            self._log.ended(request_id, reason, num_output_tokens)
        self._execute(outcome)

    # ------------------------------------------------------------------ life cycle

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the running processes, by worker id."""
        return {worker.worker_id: worker.pid for worker in self._pool.workers if worker.pid is not None}

    @property
    def dispatcher(self) -> Dispatcher:
        """The dispatcher of the pools."""
        return self._dispatcher

    async def start(self) -> None:
        """Start all processes at once.

        Raises:
            SetupError: one of them cannot load the model as configured.
        """
        await self._launcher.open()
        self._log.open(self._config.load.event_log)
        try:
            await self._pool.start()
        except BaseException:
            await self.close()
            raise
        looks = self._watch_workers(POLL_INTERVAL_S, self._pools.heartbeat_timeout_s, self._report_late_workers)
        self._run(looks, "twostroke-watch")
        if self._scaling.is_wanted:
            self._run(self._scale_with_load(), "twostroke-scaling")

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
        """Return why the machines cannot hold pools of these sizes; None if they can, or if no pool grows."""
        now = {role: len(self._pool.of(role)) for role in Role if role is not Role.BOTH}
        if any(number > now[role] for role, number in sizes.items()):
            try:
                await self._launcher.check_room({**now, **sizes})
            except InvalidParameter as error:
                return error
            self._no_room = ""
        return None

    def _note_no_room(self, why: str) -> None:
        """Keep the reason why a larger size is refused, and log it once."""
        if why != self._no_room:
            self._no_room = why
            log.warning("a pool cannot grow as far as asked: %s", why)

    def scale(self, sizes: Mapping[Role, int]) -> None:
        if self._is_draining or self._is_closed:
            raise EngineUnavailable(f"the pools cannot be resized now: {self.health().cause}.")
        check_engines(self._config, self._pools, hands_over=bool(sizes.get(Role.PREFILL)))
        for role, number in sizes.items():
            self._pool.check_size(role, number)
        for role, number in sizes.items():
            self._resize(role, number, "asked for")

    def members(self) -> list[PoolMember]:
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
        return self._observed.suggested(self._worker_figures(), self.now_s())

    def end_all(self, cause: str) -> None:
        """End all streams and sequences with the cause."""
        super().end_all(cause)
        self._execute(self._dispatcher.end_all(cause))

    async def _end_processes(self) -> None:
        await self._pool.close()
        await self._launcher.close()
        self._log.close()

    # ------------------------------------------------------------------ WorkerListener

    def refusal(self, worker: PoolWorker, ready: EngineReady) -> str:
        """Return why a worker computes other numbers than the first one; a sequence that moved to it would get other
        tokens."""
        assert ready.geometry is not None, "a process of a pool says what it computes"
        what = replace(ready.geometry, layout={})  # another layout only prevents hand-overs
        if self._geometry is None:
            self._geometry, self._geometry_of = what, worker.worker_id
        refusal = self._geometry.refusal(what, allows_drift=self._pools.allow_numeric_drift)
        return f"{self._geometry_of} (here) and {worker.worker_id} (there): {refusal}" if refusal else ""

    async def worker_ready(self, worker: PoolWorker, ready: EngineReady) -> None:
        self._launcher.is_loaded(ready)
        facts, geometry = ready.facts, ready.geometry
        assert geometry is not None, "a process of a pool says what it computes"
        async with self._preparing:  # prepare the text side only once, or it would lose the state of live requests
            if worker.role is Role.DECODE and not self._is_prepared:
                await self.prepare_for(facts, self)
                self._is_prepared = True
        self._by_id[worker.worker_id] = worker
        self._observed.joined(worker.role, facts.max_num_seqs)
        member = ReadyWorker(
            worker.worker_id,
            worker.role,
            ready.lender,
            facts.block_size,
            geometry.numerics,
            facts.prefix_tokens,
            geometry.num_ranks,
        )
        self._router.joined(member, facts, self._pools.transport)
        self._execute(self._dispatcher.worker_ready(member))

    def _take_progress(self, worker: PoolWorker, report: Progress) -> Sequence[TokenUpdate]:
        updates = super()._take_progress(worker, report)
        if worker.role is Role.PREFILL:
            self._log.delivered(updates)
        return updates

    def _deliver(
        self, worker: PoolWorker, updates: Sequence[TokenUpdate], events: Sequence[PackedEvent]
    ) -> Sequence[TokenUpdate]:
        for event in map(unpack, events):  # before the updates: delivering the last one removes its request
            worker.meter.append(event)
            self._router.on_event(worker.worker_id, event)
        self._router.reported(worker.worker_id, partial(worker.meter.load, ""), self.now_s())
        if updates:
            num_tokens = sum(len(update.token_ids) for update in updates)
            self._observed.saw(self.now_s(), num_output_tokens=num_tokens)
        outcome = self._dispatcher.process_updates(worker.worker_id, updates)
        self._execute(outcome)
        return outcome.updates

    def _name_of(self, worker: PoolWorker) -> str:
        return worker.worker_id

    def worker_retired(self, worker: PoolWorker) -> None:
        self._observed.left(worker.role, worker.meter.load(""))
        self._router.left(worker.worker_id)
        self._dispatcher.retire(worker.worker_id)

    def worker_gone(self, worker: PoolWorker, cause: str) -> None:
        """Remove a dead worker, and resume its sequences elsewhere from what was delivered (Dispatcher.worker_gone).

        The worker starts its next process by itself. If no worker of its role is left and it was given up (health
        FAILED), all sequences are given up.
        """
        was_there = self._by_id.pop(worker.worker_id, None) is not None
        self._observed.left(worker.role, worker.meter.load(""))
        if was_there or not worker.is_retired:
            self._router.left(worker.worker_id)
            self._log.lost(worker.worker_id, cause)
            self._note_reset(worker.worker_id, had_blocks=True, for_all=True)
            self._execute(self._dispatcher.worker_gone(worker.worker_id, cause))
        if not worker.is_retired:
            self._report_trouble(cause)
        if self.health().state is EngineState.FAILED:
            self._execute(self._dispatcher.end_all(self.health().cause))
            self.fail_all(self.health().cause)

    def _migrate(self, worker_id: str) -> None:
        """Resume elsewhere the sequences that a leaving worker has not ended in time."""
        self._execute(self._dispatcher.migrate(worker_id))

    def _execute(self, outcome: DispatchResult) -> None:
        now_s = self.now_s()
        routed = [
            RequestRouted(now_s, GATEWAY, name, place.decode, place.prefill, place.reason)
            for name, place in outcome.placed
        ]
        for event in routed:
            self._router.routed(event)
            self._log.routed(event)
        for order in outcome.commands:
            worker = self._by_id.get(order.worker_id)
            if worker is not None:
                self._count(worker, order.command)
                worker.send(order.command)
        for sequence_id, drift in outcome.drifted:
            self.note_drift(sequence_id, drift)
        if outcome.updates:
            self.deliver(outcome.updates)
        for sequence_id, cause in outcome.lost:
            self._log.ended(sequence_id, FinishReason.ERROR)
            self.fail_sequence(sequence_id, cause)

    def _count(self, worker: PoolWorker, command: Command) -> None:
        """Count a prompt that is about to be sent to a worker."""
        match command:
            case Add(request):
                num_tokens = len(request.new_request.prompt_token_ids) + len(request.new_request.output_token_ids)
                if not worker.meter.num_sequences:
                    worker.on_work_started()
                if worker.role is Role.PREFILL:
                    self._scaling.arrived(num_tokens)
                if worker.role is Role.PREFILL or request.import_id is None:  # fetched ones were counted before
                    self._observed.saw(self.now_s(), num_prompt_tokens=num_tokens)
            case _:
                pass

    def _is_waiting(self, sequence_id: str) -> bool:
        """Return whether a sequence has not begun on any worker."""
        return not self._dispatcher.has_delivered(sequence_id) and all(
            worker.meter.is_waiting(sequence_id) or not worker.meter.knows(sequence_id) for worker in self._pool.workers
        )

    def _resize(self, role: Role, number: int, reason: str, first: Sequence[str] = ()) -> None:
        num_workers = len(self._pool.of(role))
        if number != num_workers:
            log.info("%s pool: %d workers, was %d: %s", role, number, num_workers, reason)
            self._log.scaled(role, num_workers, number, reason)
            self._pool.scale(role, number, drain_timeout_s=self._drain_timeout_s, first=first)

    async def _scale_with_load(self) -> None:
        """Change each pool's size to fit its load, once per interval."""
        while True:
            await asyncio.sleep(self._pools.scaling_interval_s)
            if self._is_draining:
                continue
            for role, wanted in self._scaling.decide(self._worker_figures(), self._pools.scaling_interval_s).items():
                num_failed = sum(worker.state is EngineState.FAILED for worker in self._pool.of(role))
                number = min(wanted.num_wanted + num_failed, MAX_WORKERS)  # failed workers carry no load
                try:
                    await self._resize_as_there_is_room(role, number, wanted)
                except Exception:  # the cluster may answer at the next interval
                    log.exception("could not decide the size of the %s pool; trying again at the next interval", role)

    async def _resize_as_there_is_room(self, role: Role, number: int, wanted: ScalingDecision) -> None:
        """Give a pool the size that fits its load, or the largest smaller one for which there is room."""
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

    def _worker_figures(self) -> list[WorkerFigures]:
        """Return the current figures of all workers that are not failed."""
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

    def _report_late_workers(self) -> None:
        """Report workers that have finished no step for long to the router, which then prefers others for new
        requests."""
        now_s = self.now_s()
        for worker in self._pool.workers:
            silent_s = worker.silent_s(now_s) if worker.is_ready else 0.0
            if silent_s:
                self._router.silent(worker.worker_id, worker.meter.load(""), silent_s)
