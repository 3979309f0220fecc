"""One process of a pool: started, heard, and started again when it has died."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Protocol

from twostroke.client.engine_client import EngineState
from twostroke.client.load import LoadMeter
from twostroke.cluster.dispatcher import ReadyWorker
from twostroke.cluster.engine_process import LOADING_SILENCE_S, STOP_PATIENCE_S, EngineProcess
from twostroke.cluster.launcher import Launcher
from twostroke.cluster.messages import Add, Alive, Command, EngineReady, Failed, Progress, Refused, Report, Stop
from twostroke.config.engine import EngineConfig
from twostroke.engine.clock import monotonic_clock
from twostroke.engine.facts import EngineFacts
from twostroke.engine.handover_port import HandoverPort
from twostroke.errors import SetupError
from twostroke.kv_transfer.geometry import KVGeometry
from twostroke.log import get_logger
from twostroke.plain_words import reason_of
from twostroke.pools.member import Role

log = get_logger(__name__)

MAX_FAST_DEATHS = 3
"""Deaths in a row that come soon: then it is no accident, and nobody counts on it until it is back."""
SOON_S = 5.0
"""A process that is dead so short a time after it was ready, and has made no token, died soon."""
LATE_AFTER_S = 1.0
"""Seconds without a step, while there is work, after which others are preferred: it may hang. Longer than most
steps."""
RESTART_DELAYS_S = (0.0, 0.5, 2.0, 5.0, 10.0)
"""Before a start, by the fast deaths before it; the last one from then on."""


class Pool(Protocol):
    """What a worker tells of itself."""

    def objection(self, worker: PoolWorker, geometry: KVGeometry) -> str:
        """Why a process cannot be one of the pools; empty: it can."""
        ...

    async def worker_ready(self, worker: PoolWorker, facts: EngineFacts) -> None:
        """Its model is loaded."""
        ...

    def worker_reports(self, worker: PoolWorker, report: Report) -> None:
        """Something came from it."""
        ...

    def worker_retired(self, worker: PoolWorker) -> None:
        """It is to take no more requests, and leaves when it has done what it has."""
        ...

    def worker_gone(self, worker: PoolWorker, cause: str) -> None:
        """It is dead; it may come back, under another id, unless it was retired."""
        ...


class PoolWorker:
    """A place in a pool, and the process that fills it now.

    Args:
        role: what it is for.
        place: which of its pool.
        config: makes the settings of its engine, for each process by its name.
        port: makes, for each process anew, where it lends and whether it fetches.
        pool: hears of it.
        launcher: starts a process.
        num_starts: processes that were started in this place before.
    """

    def __init__(
        self,
        role: Role,
        place: int,
        config: Callable[[str], EngineConfig],
        port: Callable[[str], HandoverPort],
        pool: Pool,
        launcher: Launcher,
        *,
        num_starts: int = 0,
    ) -> None:
        self.role = role
        self.place = place
        """Which of its pool's."""
        self._config = config
        self._port = port
        self._pool = pool
        self._launcher = launcher
        self._num_starts = self._num_earlier = num_starts
        self._num_fast_deaths = 0
        self._spawned: EngineProcess | None = None
        """The child, from its first moment to its last."""
        self._process: EngineProcess | None = None
        """The same while its model is loaded."""
        self._was_ready = self._is_retired = False
        self._is_closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._heard_s = 0.0
        self._progress_s = 0.0
        """Time of its last step report, or of the work that it got while idle."""
        self._ready_s = float("inf")
        """When the model of the last process was loaded."""
        self.state = EngineState.STARTING
        self.cause = "a place for it is looked for"
        self.meter = LoadMeter(1, is_fair=False)
        self.facts: EngineFacts | None = None
        """Of the process that runs now; None while none does."""
        self.geometry: KVGeometry | None = None
        """KV geometry of the process that runs now; None while none does."""
        self.has_started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when its model is loaded for the first time; raises SetupError where that is refused, and is cancelled
        where the start is given up."""

    @property
    def worker_id(self) -> str:
        """Of the process that runs now, and its name in events; none has the same."""
        return f"{self.role}-{self.place}.{self._num_starts}"

    @property
    def pid(self) -> int | None:
        """Of its process."""
        return None if self._process is None else self._process.pid

    @property
    def num_starts(self) -> int:
        """Processes that were started in this place, before its time, too."""
        return self._num_starts

    @property
    def num_restarts(self) -> int:
        """How often it was started again."""
        return max(0, self._num_starts - self._num_earlier - 1)

    @property
    def is_ready(self) -> bool:
        """Whether it takes requests."""
        return self.state is EngineState.RUNNING

    @property
    def is_retired(self) -> bool:
        """Whether it was told to take no more requests."""
        return self._is_retired

    def retire(self) -> None:
        """It takes no more requests, and is not started again."""
        self._is_retired = True
        if self.is_ready:
            self.state, self.cause = EngineState.DRAINING, "it takes no more requests, and ends when those it has do"

    def start(self) -> None:
        """Begins its life."""
        self._task = asyncio.create_task(self._live(), name=f"twostroke-{self.role}-{self.place}")
        self._task.add_done_callback(self._life_ended)

    def send(self, command: Command) -> None:
        """Queues a command; one for a process that is gone is lost, as what it was about is done elsewhere."""
        if isinstance(command, Add) and self.meter.num_sequences <= 1:  # the meter has counted this one
            self._progress_s = monotonic_clock()
        if self._process is not None:
            self._process.send(command)

    def silent_s(self, now_s: float) -> float:
        """Return the seconds without a step report while there is work; 0 while a step may still take that long."""
        silent_s = now_s - self._progress_s if self.meter.num_sequences else 0.0
        return silent_s if silent_s > LATE_AFTER_S else 0.0

    def heard(self) -> None:
        """Nobody could have listened meanwhile: silence begins to count now."""
        self._heard_s = self._progress_s = monotonic_clock()

    def end_if_silent(self, timeout_s: float) -> None:
        """Kills a process that says nothing; one that was stopped or hangs never would again."""
        if self._process is not None and monotonic_clock() - self._heard_s > timeout_s:
            self.cause = f"it said nothing for {timeout_s:g} s"
            self._process.kill()

    async def close(self) -> None:
        """Ends its process, kindly if it is loaded."""
        self.state, self.cause = EngineState.CLOSED, "it was closed"
        self._is_closing.set()
        if self._task is None:
            return
        if self._process is not None:
            self._process.send(Stop())
            await asyncio.wait([self._task], timeout=STOP_PATIENCE_S)
        if self._spawned is not None:
            self._spawned.kill()
        await self._task

    async def _live(self) -> None:
        """One process after the other."""
        while not await self._is_over_after(RESTART_DELAYS_S[min(self._num_fast_deaths, len(RESTART_DELAYS_S) - 1)]):
            self._num_starts += 1
            self._ready_s = float("inf")
            cause = await self._run()
            if self._is_closing.is_set():
                return
            if monotonic_clock() - self._ready_s > SOON_S:
                self._num_fast_deaths = 0
            self._num_fast_deaths += 1
            log.error("%s %s", self.worker_id, cause)
            if self._is_retired or not self._was_ready:
                self.state, self.cause = EngineState.FAILED, f"{self.worker_id} {cause}"
            elif self._num_fast_deaths < MAX_FAST_DEATHS:
                self.state = EngineState.STARTING
                self.cause = f"{self.worker_id} {cause}; it is being started again"
            else:
                self.state = EngineState.FAILED
                self.cause = (
                    f"{self.worker_id} {cause}, {self._num_fast_deaths} times in a row; it is started again from"
                    " time to time"
                )
            self._pool.worker_gone(self, f"{self.worker_id} {cause}")
            if self._is_retired or not self._was_ready:
                return

    async def _is_over_after(self, pause_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._is_closing.wait(), pause_s)
        return self._is_closing.is_set()

    def _life_ended(self, life: asyncio.Task[None]) -> None:
        """A mistake of ours must not look like a worker that runs: nobody would read its reports any more."""
        error = None if life.cancelled() else life.exception()
        if error is not None:
            log.error("%s: its reports are not read any more", self.worker_id, exc_info=error)
            self.state, self.cause = EngineState.FAILED, f"its reports could not be read any more ({reason_of(error)})"
            if not self.has_started.done():
                self.has_started.set_exception(SetupError(self.cause))
            self._pool.worker_gone(self, f"{self.worker_id}: {self.cause}")

    async def _run(self) -> str:
        """One process from its start to its end, which is returned in words."""
        config, port = self._config(self.worker_id), self._port(self.worker_id)
        try:
            process = self._spawned = await self._launch(config, port)
        except SetupError as error:
            return self._has_no_start(str(error))
        if process is None:
            return "was not needed any more"
        if self.state is EngineState.STARTING and not self._was_ready:
            self.cause = "the model is being loaded"
        try:
            report = await process.first_report(LOADING_SILENCE_S)
            if not isinstance(report, EngineReady):
                return await self._not_loaded(process, report)
            assert report.geometry is not None, "a process of a pool says what it computes"
            objection = self._pool.objection(self, report.geometry)
            if objection:
                return self._has_no_start(objection)
            self._launcher.is_loaded(report)
            self.facts, self.geometry = report.facts, report.geometry
            self.meter = LoadMeter(report.facts.max_num_seqs, is_fair=report.facts.is_fair)
            self._process = process
            self._heard_s = self._ready_s = monotonic_clock()
            self.member = ReadyWorker(
                self.worker_id,
                self.role,
                report.lender,
                report.facts.block_size,
                report.facts.max_num_seqs,
                report.geometry.numerics,
                report.facts.prefix_tokens,
                report.geometry.num_ranks,
            )
            if not self._is_closing.is_set():
                self.state, self.cause = EngineState.RUNNING, ""
            await self._pool.worker_ready(self, report.facts)
            if not self._was_ready:
                self._was_ready = True
                if not self.has_started.done():  # whoever waited may have left
                    self.has_started.set_result(None)
            return await self._hear(process)
        finally:
            if self._process is None:  # it was not loaded, and hears nothing before it is
                process.kill()
            self._process = self._spawned = self.facts = self.geometry = None
            await process.stop()

    async def _launch(self, config: EngineConfig, port: HandoverPort) -> EngineProcess | None:
        """A process, which may wait long for its place; None: it was closed meanwhile."""
        launching = asyncio.create_task(self._launcher.launch(self.worker_id, self.role, config, port))
        closing = asyncio.create_task(self._is_closing.wait())
        await asyncio.wait((launching, closing), return_when=asyncio.FIRST_COMPLETED)
        closing.cancel()
        if not launching.done():
            launching.cancel()
            await asyncio.wait((launching,))
        if launching.cancelled():
            return None
        process = launching.result()
        if self._is_closing.is_set():
            process.kill()
        return process

    async def _not_loaded(self, process: EngineProcess, report: Report | None) -> str:
        if isinstance(report, Refused):
            cause = report.reason
        else:
            cause = f"{await process.ending()} before its model was loaded."
        return self._has_no_start(cause)

    def _has_no_start(self, cause: str) -> str:
        if not self._was_ready and not self.has_started.done():  # with these settings it never will be
            self.has_started.set_exception(SetupError(cause))
        return cause

    async def _hear(self, process: EngineProcess) -> str:
        """Reads reports until there are no more."""
        reason = ""
        while (report := await process.receive()) is not None:
            self._heard_s = monotonic_clock()
            if isinstance(report, Failed):
                reason = f" ({report.reason})"
            elif not isinstance(report, Alive):
                if isinstance(report, Progress):
                    self._progress_s = self._heard_s
                    if report.updates:
                        self._num_fast_deaths = 0
                self._pool.worker_reports(self, report)
                await asyncio.sleep(0)  # where reports come faster than they are taken in, the others run all the same
        if self.is_ready:
            self.state = EngineState.STARTING
        return f"{await process.ending()}{reason}" + (f": {self.cause}" if self.cause else "")
