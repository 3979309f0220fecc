"""A worker of a pool: starts an engine process, reads its reports, and restarts it when it has died."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Protocol

from twostroke.client.engine_client import EngineState
from twostroke.client.load import LoadMeter
from twostroke.cluster.engine_process import LOADING_TIMEOUT_S, STOP_TIMEOUT_S, EngineProcess
from twostroke.cluster.messages import Add, Alive, Command, EngineReady, Failed, Finish, Progress, Refused, Report, Stop
from twostroke.engine.clock import monotonic_clock
from twostroke.engine.facts import EngineFacts
from twostroke.errors import SetupError
from twostroke.kv_transfer.geometry import KVGeometry
from twostroke.log import get_logger
from twostroke.plain_words import reason_of
from twostroke.pools.member import Role

log = get_logger(__name__)

HEARTBEATS_PER_TIMEOUT = 4
"""Heartbeats that a process sends per timeout; it counts as dead when none arrives within the timeout."""
MAX_FAST_DEATHS = 3
"""Consecutive fast deaths after which no request waits for the worker until it is ready again."""
LATE_AFTER_S = 1.0
"""Seconds without a step, while there is work, after which other workers are preferred: it may hang. Longer than most
steps."""


class WorkerListener(Protocol):
    """A listener to a worker's life and reports."""

    def refusal(self, worker: PoolWorker, ready: EngineReady) -> str:
        """Return why a process cannot serve; empty: it can."""
        ...

    async def worker_ready(self, worker: PoolWorker, ready: EngineReady) -> None:
        """React to a process that has loaded its model."""
        ...

    def worker_reports(self, worker: PoolWorker, report: Report) -> None:
        """Handle a report of a worker."""
        ...

    def worker_gone(self, worker: PoolWorker, cause: str) -> None:
        """React to a dead process; unless the worker was retired, it may return under another id."""
        ...


class PoolWorker:
    """A place in a pool, with the process that fills it now. An engine of one process is a pool of one.

    Args:
        role: role of the pool.
        place: index in the pool.
        launch: starts a process of a given name.
        listener: receives its reports.
        num_starts: processes that were started in this place before.
    """

    restart_delays_s: tuple[float, ...] = (0.0, 0.5, 2.0, 5.0, 10.0)
    """Seconds before a restart, by the number of consecutive deaths; further deaths use the last value. A death that is
    not fast counts as the first."""
    fast_death_s = 5.0
    """Seconds after loading within which a death counts as fast, if no token was made."""
    gives_up = False
    """Whether the worker is given up after MAX_FAST_DEATHS fast deaths, instead of restarted from time to time."""

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
        """Index of the place in its pool."""
        self._launch = launch
        self._listener = listener
        self._num_starts = self._num_earlier = num_starts
        self._num_fast_deaths = 0
        self._spawned: EngineProcess | None = None
        """The child process, from its start to its end."""
        self._process: EngineProcess | None = None
        """The child process while its model is loaded."""
        self._was_ready = self._is_retired = False
        self._is_closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._last_report_s = 0.0
        self._progress_s = 0.0
        """Time of its last step report, or of the work that it got while idle."""
        self._ready_s = float("inf")
        """Time at which the last process had loaded its model."""
        self.state = EngineState.STARTING
        self.cause = "it waits for a place to start"
        self.meter = LoadMeter(1, is_fair=False)
        self.facts: EngineFacts | None = None
        """Facts of the engine that runs now; None while none does."""
        self.geometry: KVGeometry | None = None
        """KV geometry of the process that runs now; None while none does."""
        self.has_started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Future that is done when the model is loaded for the first time. It raises SetupError if loading is refused,
        and is cancelled if the start is."""

    @property
    def worker_id(self) -> str:
        """Id of the current process, also its name in events; unique."""
        return f"{self.role}-{self.place}.{self._num_starts}"

    @property
    def words(self) -> str:
        """Name of the process in messages."""
        return self.worker_id

    @property
    def pid(self) -> int | None:
        """Id of the process, or None."""
        return None if self._process is None else self._process.pid

    @property
    def num_starts(self) -> int:
        """Processes started in this place, including those before this worker."""
        return self._num_starts

    @property
    def num_restarts(self) -> int:
        """Number of restarts."""
        return max(0, self._num_starts - self._num_earlier - 1)

    @property
    def is_ready(self) -> bool:
        """Whether it accepts requests."""
        return self.state is EngineState.RUNNING

    @property
    def is_retired(self) -> bool:
        """Whether it was told to accept no more requests."""
        return self._is_retired

    def retire(self) -> None:
        """Accept no more requests, and do not restart after the end."""
        self._is_retired = True
        if self.is_ready:
            self.state, self.cause = EngineState.DRAINING, "it accepts no more requests, and ends after its last one"

    def start(self) -> None:
        """Start the first process, and restart it as needed."""
        self._task = asyncio.create_task(self._run_processes(), name=f"twostroke-{self.role}-{self.place}")
        self._task.add_done_callback(self._on_task_done)

    def send(self, command: Command) -> None:
        """Queue a command. It is lost if the process has died; its sequences resume elsewhere."""
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

    def on_work_started(self) -> None:
        """Restart the measurement of silence, because work arrives after an idle time."""
        self._progress_s = monotonic_clock()

    def silent_s(self, now_s: float) -> float:
        """Return the seconds without a step report while there is work; 0 while a step may still take that long."""
        silent_s = now_s - self._progress_s if self.meter.num_sequences else 0.0
        return silent_s if silent_s > LATE_AFTER_S else 0.0

    def reset_silence(self) -> None:
        """Restart the measurement of silence, because this process could not read reports meanwhile."""
        self._last_report_s = self._progress_s = monotonic_clock()

    def end_if_silent(self, timeout_s: float) -> None:
        """Kill a process that has been silent for too long: it was stopped, or hangs."""
        if self._process is not None and monotonic_clock() - self._last_report_s > timeout_s:
            self.cause = f"it said nothing for {timeout_s:g} s"
            self._process.kill()

    async def close(self) -> None:
        """End the process; if its model is loaded, ask it to stop first."""
        self.state, self.cause = EngineState.CLOSED, "it was closed"
        self._is_closing.set()
        if self._task is None:
            return
        if self._process is not None:
            self._process.send(Stop())
            await asyncio.wait([self._task], timeout=STOP_TIMEOUT_S)
        if self._spawned is not None:
            self._spawned.kill()
        await self._task

    async def _run_processes(self) -> None:
        """Run one process after the other, until the worker is closed or gives up."""
        while not await self._is_over_after(self._pause_s):
            self._num_starts += 1
            self._ready_s = float("inf")
            cause = await self._run()
            if self._is_closing.is_set():
                return
            if monotonic_clock() - self._ready_s > self.fast_death_s:
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

    def _on_task_done(self, life: asyncio.Task[None]) -> None:
        """Mark the worker as failed after an internal error; otherwise it would look alive, but its reports would not
        be read."""
        error = None if life.cancelled() else life.exception()
        if error is not None:
            log.error("%s: reading its reports failed", self.words, exc_info=error)
            self.state, self.cause = EngineState.FAILED, f"reading its reports failed ({reason_of(error)})"
            if not self.has_started.done():
                self.has_started.set_exception(SetupError(self.cause))
            self._listener.worker_gone(self, f"{self.words}: {self.cause}")

    async def _run(self) -> str:
        """Run one process from its start to its end; return how it ended, in words."""
        try:
            process = self._spawned = await self._launched()
        except SetupError as error:
            return self._start_failed(str(error))
        if process is None:
            return f"{self.words} was not needed any more"
        if self.state is EngineState.STARTING and not self._was_ready:
            self.cause = "the model is being loaded"
        try:
            ready = await process.first_report(LOADING_TIMEOUT_S)
            refusal = await self._refusal(process, ready)
            if refusal or not isinstance(ready, EngineReady):
                return self._start_failed(refusal)
            self.facts, self.geometry = ready.facts, ready.geometry
            self.meter = LoadMeter(ready.facts.max_num_seqs, is_fair=ready.facts.is_fair)
            self._process = process
            self._last_report_s = self._ready_s = monotonic_clock()
            await self._listener.worker_ready(self, ready)
            if not (self._is_closing.is_set() or self._is_retired):
                self.state, self.cause = EngineState.RUNNING, ""
            if not self._was_ready:
                self._was_ready = True
                if not self.has_started.done():  # the waiting caller may have been cancelled
                    self.has_started.set_result(None)
            return await self._read_reports(process)
        finally:
            if self._process is None:  # a process that has not loaded does not read commands
                process.kill()
            self._process = self._spawned = self.facts = self.geometry = None
            await process.stop()

    async def _refusal(self, process: EngineProcess, report: Report | None) -> str:
        """Return why a process cannot serve, after its first report; empty: it can."""
        match report:
            case EngineReady():
                return self._listener.refusal(self, report)
            case Refused(reason):
                return reason
            case _:
                return f"{self.words} {await process.ending()} before its model was loaded."

    async def _launched(self) -> EngineProcess | None:
        """Start a process, which may wait long for its place; return None if the worker was closed meanwhile."""
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

    def _start_failed(self, cause: str) -> str:
        """Return why no process started; a caller that waits for the first start gets the error."""
        if self._was_ready:
            return f"{self.words} could not be started again: {cause}"
        if not self.has_started.done():  # it will not start with these settings
            self.has_started.set_exception(SetupError(cause))
        return f"{self.words}: {cause}"

    async def _read_reports(self, process: EngineProcess) -> str:
        """Read reports until there are no more; return how the process ended, in words."""
        reason = ""
        while (report := await process.receive()) is not None:
            self._last_report_s = monotonic_clock()
            if isinstance(report, Failed):
                reason = f" ({report.reason})"
            elif not isinstance(report, Alive):
                if isinstance(report, Progress):
                    self._progress_s = self._last_report_s
                    if report.updates:
                        self._num_fast_deaths = 0
                self._listener.worker_reports(self, report)
                await asyncio.sleep(0)  # let other tasks run even if reports arrive faster than they are handled
        if self.is_ready:
            self.state = EngineState.STARTING
        return f"{self.words} {await process.ending()}{reason}" + (f": {self.cause}" if self.cause else "")
