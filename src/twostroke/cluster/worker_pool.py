"""WorkerPool: the places of both pools, whoever fills them; more are started and fewer are needed while it runs."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import msgspec

from twostroke.client.engine_client import EngineState
from twostroke.cluster.engine_process import EngineProcess
from twostroke.cluster.gateway_log import log_of
from twostroke.cluster.launcher import Launcher
from twostroke.cluster.pool_worker import HEARTBEATS_IN_TIME, PoolWorker, WorkerListener
from twostroke.config.checks import whole_number
from twostroke.config.engine import EngineConfig
from twostroke.config.pools import MAX_WORKERS, PoolConfig, decode_engine, prefill_engine
from twostroke.engine.clock import monotonic_clock
from twostroke.engine.handover_port import HandoverPort
from twostroke.engine.heartbeat import Heartbeat
from twostroke.kv_transfer.address import Address
from twostroke.log import get_logger
from twostroke.pools.member import Role

log = get_logger(__name__)

LOOKS_EVERY_S = 0.05
"""How often somebody looks whether a worker that leaves has anything left to do."""


class PoolListener(WorkerListener, Protocol):
    """Hears of all workers of the pools."""

    def worker_retired(self, worker: PoolWorker) -> None:
        """It is to take no more requests, and leaves when it has done what it has."""
        ...


class WorkerPool:
    """Starts processes, one for each place, and ends them.

    Args:
        config: of each engine.
        pools: how many there are at first.
        hears: what they tell.
        launcher: starts a process.
        num_live: sequences that need a worker, by its id.
        migrate: called with a worker that leaves when its time is up: what it still has goes on elsewhere.
    """

    def __init__(
        self,
        config: EngineConfig,
        pools: PoolConfig,
        hears: PoolListener,
        launcher: Launcher,
        *,
        num_live: Callable[[str], int],
        migrate: Callable[[str], object],
    ) -> None:
        self._config = config
        self._pools = pools
        self._hears = hears
        self._launcher = launcher
        self._num_live = num_live
        self._migrate = migrate
        self._workers: list[PoolWorker] = []
        self._starts: Counter[tuple[Role, int]] = Counter()
        """In each place, processes so far: one that is filled again goes on counting, so names stay unique."""
        self._folder: Path | None = None
        self._numbers = itertools.count()
        self._leaving: set[asyncio.Task[None]] = set()

    @property
    def workers(self) -> tuple[PoolWorker, ...]:
        """All, those that leave included."""
        return tuple(self._workers)

    def of(self, role: Role) -> list[PoolWorker]:
        """Those of one pool that stay."""
        return [worker for worker in self._workers if worker.role is role and not worker.is_retired]

    async def start(self) -> None:
        """Starts all processes, at once.

        Raises:
            SetupError: one of them cannot load the model as the config says.
        """
        self._folder = Path(tempfile.mkdtemp(prefix="twostroke-kv-"))  # for this user only
        self._grow(Role.DECODE, self._pools.decode)
        self._grow(Role.PREFILL, self._pools.prefill)
        await asyncio.gather(*(worker.has_started for worker in self._workers))

    @staticmethod
    def check_size(role: Role, number: int) -> None:
        """Whether a pool may have so many workers.

        Raises:
            InvalidParameter: it may not.
        """
        whole_number(role, number, 1 if role is Role.DECODE else 0, MAX_WORKERS)

    def scale(self, role: Role, number: int, *, drain_timeout_s: float, first: Sequence[str] = ()) -> None:
        """Gives one pool so many workers: starts some, or lets some end what they have to do.

        Those that do not run leave first, then `first`, then whoever has the fewest sequences.

        Args:
            role: which pool.
            number: of workers that stay.
            drain_timeout_s: so long a worker that leaves may take; what it has not ended then goes on elsewhere.
            first: ids of workers that should leave before others.

        Raises:
            InvalidParameter: not so many.
        """
        self.check_size(role, number)
        staying = self.of(role)
        self._grow(role, number - len(staying))
        staying.sort(key=lambda w: (w.is_ready, w.worker_id not in first, self._num_live(w.worker_id), w.worker_id))
        for worker in staying[: max(0, len(staying) - number)]:
            worker.retire()
            self._hears.worker_retired(worker)
            leaving = asyncio.create_task(self._leave(worker, drain_timeout_s), name=f"twostroke-{worker.worker_id}")
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)

    async def close(self) -> None:
        """Ends all processes."""
        for leaving in self._leaving:
            leaving.cancel()
        await asyncio.gather(*self._leaving, return_exceptions=True)
        await asyncio.gather(*(worker.close() for worker in self._workers))
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _grow(self, role: Role, number: int) -> None:
        taken = {worker.place for worker in self._workers if worker.role is role}
        free = (place for place in itertools.count() if place not in taken)
        new = [self._worker(role, place) for place in itertools.islice(free, max(0, number))]
        self._workers += new
        for worker in new:
            worker.has_started.add_done_callback(lambda started: started.cancelled() or started.exception())
            worker.start()

    async def _leave(self, worker: PoolWorker, drain_timeout_s: float) -> None:
        until_s = monotonic_clock() + drain_timeout_s
        while worker.state is EngineState.DRAINING and self._num_live(worker.worker_id):
            if monotonic_clock() >= until_s:
                self._migrate(worker.worker_id)
                break
            await asyncio.sleep(LOOKS_EVERY_S)
        worker_id = worker.worker_id
        await worker.close()
        self._workers.remove(worker)
        self._starts[worker.role, worker.place] = worker.num_starts
        log.info("%s has left the pool", worker_id)
        self._hears.worker_gone(worker, f"{worker_id} has left the pool")

    def _worker(self, role: Role, place: int) -> PoolWorker:
        config = (decode_engine if role is Role.DECODE else prefill_engine)(self._config, self._pools)

        async def launch(name: str) -> EngineProcess:
            load = replace(config.load, event_log=log_of(config.load.event_log, name))
            return await self._launcher.launch(name, role, replace(config, load=load), self._port(role, name))

        return PoolWorker(role, place, launch, self._hears, num_starts=self._starts[role, place])

    def _port(self, role: Role, name: str) -> HandoverPort:
        """Each process has its own address, so nobody who comes back is taken for who was there before."""
        port = HandoverPort(
            allows_drift=self._pools.allow_numeric_drift,
            memory_share=1 / max(self._pools.num_workers, len(self._workers)),
            heartbeat=Heartbeat(self._pools.heartbeat_timeout_s / HEARTBEATS_IN_TIME, self._pools.step_timeout_s),
            name=name,
        )
        if role is Role.DECODE:
            return msgspec.structs.replace(port, fetches=True, fetches_by_nixl=self._pools.transport == "nixl")
        return msgspec.structs.replace(port, lends_at=self._lending_address())

    def _lending_address(self) -> Address:
        assert self._folder is not None, "not started"
        self._folder.mkdir(mode=0o700, exist_ok=True)  # somebody may have tidied up
        path = str(self._folder / f"kv-{next(self._numbers)}")
        match self._pools.transport:
            case "shm":
                return Address(path=path)
            case "inproc":
                return Address(name=path)  # it is no file, but no other pool of this process has the same
            case "tcp":
                return Address(host="127.0.0.1")
            case "nixl":
                return Address(host="127.0.0.1", by_nixl=True)
