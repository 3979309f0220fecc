"""One process that runs an engine: started, heard, and started again when it has died."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Protocol

from twostroke.client.engine_client import EngineState
from twostroke.client.load import LoadMeter
from twostroke.cluster.engine_process import LOADING_SILENCE_S, STOP_PATIENCE_S, EngineProcess
from twostroke.cluster.messages import Add, Alive, Command, EngineReady, Failed, Finish, Progress, Refused, Report, Stop
from twostroke.engine.clock import monotonic_clock
from twostroke.engine.facts import EngineFacts
from twostroke.errors import SetupError
from twostroke.kv_transfer.geometry import KVGeometry
from twostroke.log import get_logger
from twostroke.plain_words import reason_of
from twostroke.pools.member import Role

log = get_logger(__name__)

HEARTBEATS_IN_TIME = 4
"""A process says so often that it lives before it is taken for dead."""
MAX_FAST_DEATHS = 3
"""Deaths in a row that come soon: then it is no accident, and nobody counts on it until it is back."""
LATE_AFTER_S = 1.0
"""Seconds without a step, while there is work, after which others are preferred: it may hang. Longer than most
steps."""


class WorkerListener(Protocol):
    """Hears what a worker tells of itself."""

    def objection(self, worker: PoolWorker, ready: EngineReady) -> str:
        """Return why a process cannot serve; empty: it can."""
        ...

    async def worker_ready(self, worker: PoolWorker, ready: EngineReady) -> None:
        """Its model is loaded."""
        ...

    def worker_reports(self, worker: PoolWorker, report: Report) -> None:
        """Something came from it."""
        ...

    def worker_gone(self, worker: PoolWorker, cause: str) -> None:
        """It is dead; it may come back, under another id, unless it was retired."""
        ...


class PoolWorker:
    """A place in a pool, and the process that fills it now. An engine of one process is a pool of one.

    Args:
        role: what it is for.
        place: which of its pool.
        launch: starts a process of this name.
        listener: hears of it.
        num_starts: processes that were started in this place before.
    """

    restart_delays_s: tuple[float, ...] = (0.0, 0.5, 2.0, 5.0, 10.0)
    """Before a start, by the deaths in a row before it, of which a late one counts as the first; the last delay from
    then on."""
    soon_s = 5.0
    """A process that is dead so short a time after it was ready, and has made no token, died soon."""
    gives_up = False
    """Whether it is started again only so often, and not from time to time, where it dies fast."""

    def __init__(
        self,
        role: Role,
        place: int,
        launch: Callable[[str], Awaitable[EngineProcess]],
        listener: WorkerListener,
        *,
        num_starts: int = 0,
    ) -> None:
        self.role = role
        self.place = place
        """Which of its pool's."""
        self._launch = launch
        self._listener = listener
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
    def words(self) -> str:
        """Name of the process in messages."""
        return self.worker_id

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
        match command:
            case Add(request):
                new = request.new_request
                self.meter.sent(
                    new.request_id,
                    request.tenant,
                    num_tokens=len(new.prompt_token_ids) + len(new.output_token_ids),
                    max_tokens=request.max_tokens,
                    background=request.background,
                )
            case Finish(request_id):
                self.meter.ended(request_id)
            case _:
                pass
        if self._process is not None:
            self._process.send(command)

    def begins(self) -> None:
        """Work comes after a pause, which was no silence."""
        self._progress_s = monotonic_clock()

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
        while not await self._is_over_after(self._pause_s):
            self._num_starts += 1
            self._ready_s = float("inf")
            cause = await self._run()
            if self._is_closing.is_set():
                return
            if monotonic_clock() - self._ready_s > self.soon_s:
                self._num_fast_deaths = 0
            self._num_fast_deaths += 1
            log.error("%s", cause)
            is_last = self._is_retired or not self._was_ready
            self.state, self.cause = EngineState.FAILED, cause
            if not is_last and self._num_fast_deaths < MAX_FAST_DEATHS + self.gives_up:
                self.state, self.cause = EngineState.STARTING, f"{cause}; it is being started again"
            elif not is_last and self.gives_up:
                is_last = True
                self.cause = f"{cause}; it was started again {MAX_FAST_DEATHS} times in a row, and is given up"
            elif not is_last:
                often = f"{self._num_fast_deaths} times in a row; it is started again from time to time"
                self.cause = f"{cause}, {often}"
            self._listener.worker_gone(self, cause)
            if is_last:
                return

    @property
    def _pause_s(self) -> float:
        """Seconds before the next start."""
        return self.restart_delays_s[min(self._num_fast_deaths, len(self.restart_delays_s) - 1)]

    async def _is_over_after(self, pause_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._is_closing.wait(), pause_s)
        return self._is_closing.is_set()

    def _life_ended(self, life: asyncio.Task[None]) -> None:
        """A mistake of ours must not look like a worker that runs: nobody would read its reports any more."""
        error = None if life.cancelled() else life.exception()
        if error is not None:
            log.error("%s: its reports are not read any more", self.words, exc_info=error)
            self.state, self.cause = EngineState.FAILED, f"its reports could not be read any more ({reason_of(error)})"
            if not self.has_started.done():
                self.has_started.set_exception(SetupError(self.cause))
            self._listener.worker_gone(self, f"{self.words}: {self.cause}")

    async def _run(self) -> str:
        """Run one process from its start to its end; return how it ended, in words."""
        try:
            process = self._spawned = await self._launched()
        except SetupError as error:
            return self._has_no_start(str(error))
        if process is None:
            return f"{self.words} was not needed any more"
        if self.state is EngineState.STARTING and not self._was_ready:
            self.cause = "the model is being loaded"
        try:
            ready = await process.first_report(LOADING_SILENCE_S)
            objection = await self._objection(process, ready)
            if objection or not isinstance(ready, EngineReady):
                return self._has_no_start(objection)
            self.facts, self.geometry = ready.facts, ready.geometry
            self.meter = LoadMeter(ready.facts.max_num_seqs, is_fair=ready.facts.is_fair)
            self._process = process
            self._heard_s = self._ready_s = monotonic_clock()
            await self._listener.worker_ready(self, ready)
            if not (self._is_closing.is_set() or self._is_retired):
                self.state, self.cause = EngineState.RUNNING, ""
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

    async def _objection(self, process: EngineProcess, report: Report | None) -> str:
        """Return why a process does not serve after its first report; empty: it does."""
        match report:
            case EngineReady():
                return self._listener.objection(self, report)
            case Refused(reason):
                return reason
            case _:
                return f"{self.words} {await process.ending()} before its model was loaded."

    async def _launched(self) -> EngineProcess | None:
        """Return a process, which may wait long for its place; None: it was closed meanwhile."""
        launching = asyncio.ensure_future(self._launch(self.worker_id))
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

    def _has_no_start(self, cause: str) -> str:
        """Return why no process is there; whoever waits for the first one is told."""
        if self._was_ready:
            return f"{self.words} could not be started again: {cause}"
        if not self.has_started.done():  # with these settings it never will be
            self.has_started.set_exception(SetupError(cause))
        return f"{self.words}: {cause}"

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
                self._listener.worker_reports(self, report)
                await asyncio.sleep(0)  # where reports come faster than they are taken in, the others run all the same
        if self.is_ready:
            self.state = EngineState.STARTING
        return f"{self.words} {await process.ending()}{reason}" + (f": {self.cause}" if self.cause else "")
