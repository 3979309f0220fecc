"""WorkerPool: the workers of both pools; starts and retires them as the pools' sizes change."""

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
from twostroke.cluster.pool_worker import HEARTBEATS_PER_TIMEOUT, PoolWorker, WorkerListener
from twostroke.config.checks import check_int
from twostroke.config.engine import EngineConfig
from twostroke.config.pools import MAX_WORKERS, PoolConfig, decode_engine, prefill_engine
from twostroke.engine.clock import monotonic_clock
from twostroke.engine.handover_messages import HandoverSettings
from twostroke.engine.heartbeat import Heartbeat
from twostroke.kv_transfer.address import Address
from twostroke.log import get_logger
from twostroke.pools.member import Role

log = get_logger(__name__)

POLL_INTERVAL_S = 0.05
"""Seconds between checks whether a retired worker has ended its sequences."""


class PoolListener(WorkerListener, Protocol):
    """A listener to all workers of the pools."""

    def worker_retired(self, worker: PoolWorker) -> None:
        """Stop giving a worker requests; it leaves after its remaining sequences."""
        ...


class WorkerPool:
    """The workers of both pools, one process for each place.

    Args:
        config: of each engine.
        pools: initial sizes and settings.
        listener: listener to the workers.
        launcher: starts a process.
        num_live: returns the number of sequences that need a worker, by its id.
        migrate: called with a leaving worker when its time is up, to resume its sequences elsewhere.
    """

    def __init__(
        self,
        config: EngineConfig,
        pools: PoolConfig,
        listener: PoolListener,
        launcher: Launcher,
        *,
        num_live: Callable[[str], int],
        migrate: Callable[[str], object],
    ) -> None:
        self._config = config
        self._pools = pools
        self._listener = listener
        self._launcher = launcher
        self._num_live = num_live
        self._migrate = migrate
        self._workers: list[PoolWorker] = []
        self._starts: Counter[tuple[Role, int]] = Counter()
        """Processes started so far in each place; a place that is filled again continues the count, so names stay
        unique."""
        self._folder: Path | None = None
        self._numbers = itertools.count()
        self._leaving: set[asyncio.Task[None]] = set()

    @property
    def workers(self) -> tuple[PoolWorker, ...]:
        """All workers, including those that leave."""
        return tuple(self._workers)

    def of(self, role: Role) -> list[PoolWorker]:
        """Return the workers of one pool that stay."""
        return [worker for worker in self._workers if worker.role is role and not worker.is_retired]

    async def start(self) -> None:
        """Start all processes at once.

        Raises:
            SetupError: one of them cannot load the model as configured.
        """
        self._folder = Path(tempfile.mkdtemp(prefix="twostroke-kv-"))  # for this user only
        self._grow(Role.DECODE, self._pools.decode)
        self._grow(Role.PREFILL, self._pools.prefill)
        await asyncio.gather(*(worker.has_started for worker in self._workers))

    @staticmethod
    def check_size(role: Role, number: int) -> None:
        """Check that a pool may have so many workers.

        Raises:
            InvalidParameter: it may not.
        """
        check_int(role, number, 1 if role is Role.DECODE else 0, MAX_WORKERS)

    def scale(self, role: Role, number: int, *, drain_timeout_s: float, first: Sequence[str] = ()) -> None:
        """Change the size of a pool: start workers, or retire some.

        Workers that do not run leave first, then those in `first`, then those with the fewest sequences.

        Args:
            role: the pool.
            number: number of workers that stay.
            drain_timeout_s: seconds a retired worker has; its remaining sequences then resume elsewhere.
            first: ids of workers that should leave before others.

        Raises:
            InvalidParameter: the number is not allowed.
        """
        self.check_size(role, number)
        staying = self.of(role)
        self._grow(role, number - len(staying))
        staying.sort(key=lambda w: (w.is_ready, w.worker_id not in first, self._num_live(w.worker_id), w.worker_id))
        for worker in staying[: max(0, len(staying) - number)]:
            worker.retire()
            self._listener.worker_retired(worker)
            leaving = asyncio.create_task(self._leave(worker, drain_timeout_s), name=f"twostroke-{worker.worker_id}")
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)

    async def close(self) -> None:
        """End all processes."""
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
            await asyncio.sleep(POLL_INTERVAL_S)
        worker_id = worker.worker_id
        await worker.close()
        self._workers.remove(worker)
        self._starts[worker.role, worker.place] = worker.num_starts
        log.info("%s has left the pool", worker_id)
        self._listener.worker_gone(worker, f"{worker_id} has left the pool")

    def _worker(self, role: Role, place: int) -> PoolWorker:
        config = (decode_engine if role is Role.DECODE else prefill_engine)(self._config, self._pools)

        async def launch(name: str) -> EngineProcess:
            load = replace(config.load, event_log=log_of(config.load.event_log, name))
            return await self._launcher.launch(name, role, replace(config, load=load), self._port(role, name))

        return PoolWorker(role, place, launch, self._listener, num_starts=self._starts[role, place])

    def _port(self, role: Role, name: str) -> HandoverSettings:
        """Return a process's hand-over settings; each process has its own address, so that it is not taken for an
        earlier one."""
        port = HandoverSettings(
            allows_drift=self._pools.allow_numeric_drift,
            memory_share=1 / max(self._pools.num_workers, len(self._workers)),
            heartbeat=Heartbeat(self._pools.heartbeat_timeout_s / HEARTBEATS_PER_TIMEOUT, self._pools.step_timeout_s),
            name=name,
        )
        if role is Role.DECODE:
            return msgspec.structs.replace(port, fetches=True, fetches_by_nixl=self._pools.transport == "nixl")
        return msgspec.structs.replace(port, lends_at=self._lending_address())

    def _lending_address(self) -> Address:
        assert self._folder is not None, "not started"
        self._folder.mkdir(mode=0o700, exist_ok=True)  # a clean-up of /tmp may have removed it
        path = str(self._folder / f"kv-{next(self._numbers)}")
        match self._pools.transport:
            case "shm":
                return Address(path=path)
            case "inproc":
                return Address(name=path)  # not a file, but unique in this process
            case "tcp":
                return Address(host="127.0.0.1")
            case "nixl":
                return Address(host="127.0.0.1", by_nixl=True)
