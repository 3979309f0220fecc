"""RemoteEngine: an EngineClient whose engine runs in a process of its own, watched and started again when it dies.

    API ──► generate ──► Reception ──► sequences ──► PoolWorker ──► the engine's process
        ◄── streams ◄── Reception ◄── updates ◄──────────┘

`ProcessClient` is what one process and the pools of `pooled_engine.py` share: streams, health, life cycle, listeners.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypedDict, Unpack

from twostroke.client.engine_client import EngineHealth, EngineState, OutputStream
from twostroke.client.front_desk import Reception
from twostroke.client.load import EngineLoad
from twostroke.client.submission import Submission
from twostroke.cluster.engine_process import COMMAND, EngineProcess
from twostroke.cluster.messages import (
    Add,
    CacheWasReset,
    EngineReady,
    Finish,
    Progress,
    Report,
    ResetPrefixCache,
    StartEngine,
)
from twostroke.cluster.pool_worker import HEARTBEATS_IN_TIME, PoolWorker
from twostroke.config.engine import EngineConfig
from twostroke.engine.clock import monotonic_clock
from twostroke.engine.garbage import look_in_a_lull
from twostroke.engine.generation import GenerationRequest
from twostroke.engine.heartbeat import Heartbeat
from twostroke.engine.token_update import TokenUpdate
from twostroke.errors import EngineError, EngineUnavailable
from twostroke.event_codec import PackedEvent, PackedEventLog, kind_of, pack, unpack
from twostroke.events import EngineLost, Event, KVBlockChecked, TokensDelivered
from twostroke.log import get_logger
from twostroke.pools.member import Role
from twostroke.request import FinishReason

log = get_logger(__name__)

SHUTTING_DOWN = "the server is shutting down, and ends what runs"


class ClientOptions(TypedDict, total=False):
    """Keyword arguments of every ProcessClient."""

    listeners: Sequence[PackedEventLog]
    """Hear every event of every process that runs, as it is reported."""
    stall_after_s: float
    """With requests and no step for so long, the engine counts as stalled."""
    chat_template: str | None
    """Jinja source instead of the model's own."""
    on_trouble: Callable[[str], object]
    """Called with the cause when a process has died, the engine stalls or its memory has gone bad, in a thread."""


class ProcessClient(Reception, ABC):
    """See EngineClient: the streams of a reception, and health and life cycle of engines in other processes."""

    def __init__(
        self,
        *,
        listeners: Sequence[PackedEventLog] = (),
        stall_after_s: float = 30.0,
        chat_template: str | None = None,
        on_trouble: Callable[[str], object] = log.error,
    ) -> None:
        self._listeners = tuple(listeners)
        self._stall_after_s = stall_after_s
        self._on_trouble = on_trouble
        super().__init__(chat_template)
        self._progress_s = monotonic_clock()
        self._is_draining = self._is_closed = False
        self._resets: list[tuple[set[str], asyncio.Future[bool]]] = []
        """Of each reset, the workers that have not answered."""
        self._tasks: list[asyncio.Task[None]] = []

    # ------------------------------------------------------------------ what EngineClient promises

    def now_s(self) -> float:
        """The monotonic clock, which all processes of a machine share."""
        return monotonic_clock()

    def health(self) -> EngineHealth:
        """See EngineClient."""
        num_requests = self.num_streams
        state, cause = (EngineState.CLOSED, "it was closed") if self._is_closed else self._standing()
        waited_s = self.now_s() - self._progress_s
        if state is EngineState.RUNNING and num_requests and waited_s > self._stall_after_s:
            state = EngineState.STALLED
            cause = f"{num_requests} requests are queued and no step was committed for {waited_s:.1f} s"
        if state is EngineState.RUNNING and self._is_draining:
            state, cause = EngineState.DRAINING, SHUTTING_DOWN
        return EngineHealth(state, cause, num_requests, sum(worker.num_restarts for worker in self._workers))

    def generate(self, submission: Submission) -> OutputStream:
        """See EngineClient."""
        if self._is_draining or self._is_closed or not self._takes_requests:
            health = self.health()
            cause = SHUTTING_DOWN if self._is_draining else health.cause
            may_return = health.state is not EngineState.FAILED
            raise EngineUnavailable(f"the engine takes no requests now: {cause}.", may_return=may_return)
        if not self.num_streams:
            self._progress_s = self.now_s()  # it was idle, which is no stall
        return self.receive(submission, self._is_waiting)

    async def reset_prefix_cache(self) -> bool:
        """See EngineClient; in every process."""
        asked = {worker.worker_id: worker for worker in self._workers if worker.is_ready}
        if not asked:
            raise EngineUnavailable(f"the engine takes no commands now: {self.health().cause}.")
        reset: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._resets.append((set(asked), reset))
        for worker in asked.values():
            worker.send(ResetPrefixCache())
        return await reset

    # ------------------------------------------------------------------ its own life

    def drain(self) -> None:
        """Takes no more requests; what runs goes on."""
        self._is_draining = True

    def give_up(self, cause: str) -> None:
        """Ends what still runs; whoever reads a stream is told why."""
        self.lose(cause)

    async def close(self) -> None:
        """Ends the processes; streams that are still open end with an EngineError. A second time does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.give_up("it was closed")
        self._fail_resets("it was closed")
        await self._end_processes()

    def _run(self, task: Coroutine[Any, Any, None], name: str) -> None:
        """Run a task until this client is closed."""
        self._tasks.append(asyncio.create_task(task, name=name))

    async def _look_after(self, every_s: float, silence_s: float, also: Callable[[], object] = lambda: None) -> None:
        """End processes that have gone silent, and report each stall once.

        Args:
            every_s: seconds between two looks.
            silence_s: a process that says nothing for so long never will again: it was stopped, or hangs.
            also: called after each look.
        """
        was_stalled = False
        looked_s = self.now_s()
        while True:
            await asyncio.sleep(every_s)
            before_s, looked_s = looked_s, self.now_s()
            for worker in self._workers:
                if looked_s - before_s < silence_s / 2:
                    worker.end_if_silent(silence_s)
                else:  # it is we who have slept
                    worker.heard()
            also()
            health = self.health()
            is_stalled = health.state is EngineState.STALLED
            if is_stalled and not was_stalled:
                with contextlib.suppress(Exception):
                    await asyncio.to_thread(self._on_trouble, f"the engine stalls: {health.cause}")
            was_stalled = is_stalled

    # ------------------------------------------------------------------ what workers tell

    def worker_reports(self, worker: PoolWorker, report: Report) -> None:
        """See WorkerListener."""
        match report:
            case Progress():
                self._take_progress(worker, report)
            case CacheWasReset(had_blocks):
                self._note_reset(worker.worker_id, had_blocks=had_blocks)
            case _:
                raise AssertionError(f"not expected of an engine that runs: {report}")

    def _take_progress(self, worker: PoolWorker, report: Progress) -> Sequence[TokenUpdate]:
        """Take in what a step made; return what of it was delivered."""
        received_s = self._progress_s = self.now_s()
        events = report.events
        updates = self._deliver(worker, report.updates, events)
        if updates:
            delivered = TokensDelivered(
                self.now_s(), self._name_of(worker), report.updates[0].time_s, report.sent_s, received_s
            )
            events = [*events, pack(delivered)]
        if events:  # behind the streams that were just woken: who waits for a token goes before who takes notes
            asyncio.get_running_loop().call_soon(self._tell_listeners, events)
        return updates

    def _tell_listeners(self, events: Sequence[PackedEvent]) -> None:
        for event in events:
            for listener in self._listeners:
                listener.append(event)
            if kind_of(event) == KVBlockChecked.__name__:
                self._look_at_check(unpack(event))
        look_in_a_lull()

    def _look_at_check(self, event: Event) -> None:
        """Report memory that has gone bad."""
        if isinstance(event, KVBlockChecked) and event.quarantined:
            self._report_trouble(f"KV memory has gone bad in the cached prefix of {event.request_id}")

    def _tell_soon(self, event: Event) -> None:
        """Tell listeners an event of this process, behind everything that was reported before."""
        asyncio.get_running_loop().call_soon(self._tell_listeners, [pack(event)])

    def _report_trouble(self, cause: str) -> None:
        """Call `on_trouble` beside the loop: it writes a dump, which takes a while."""
        asyncio.get_running_loop().run_in_executor(None, self._on_trouble, cause)

    def _note_reset(self, worker_id: str, *, had_blocks: bool, for_all: bool = False) -> None:
        """A worker has forgotten its prefixes: as it was told the longest ago, or by its death, whoever asked."""
        for asked, reset in self._resets:
            if worker_id in asked:
                asked.discard(worker_id)
                if not asked and not reset.done():
                    reset.set_result(had_blocks)
                if not for_all:
                    break
        self._resets = [(asked, reset) for asked, reset in self._resets if asked]

    def _fail_resets(self, cause: str) -> None:
        """Whoever waits for a reset is told why none comes."""
        resets, self._resets = self._resets, []
        for _, reset in resets:
            if not reset.done():  # who asked may have left
                reset.set_exception(EngineError(cause))

    # ------------------------------------------------------------------ what differs between one process and several

    @property
    @abstractmethod
    def _workers(self) -> Sequence[PoolWorker]:
        """Processes that run, start or leave."""

    @property
    @abstractmethod
    def _takes_requests(self) -> bool:
        """Whether the processes can take a request now."""

    @abstractmethod
    def _standing(self) -> tuple[EngineState, str]:
        """Return what can be said of the processes, and its cause in words."""

    @abstractmethod
    def _is_waiting(self, sequence_id: str) -> bool:
        """Return whether a sequence has not begun anywhere."""

    @abstractmethod
    def _name_of(self, worker: PoolWorker) -> str:
        """Return the name of a worker's process in events."""

    @abstractmethod
    def _deliver(
        self, worker: PoolWorker, updates: Sequence[TokenUpdate], events: Sequence[PackedEvent]
    ) -> Sequence[TokenUpdate]:
        """Deliver what a step of a worker made; return what reached a stream."""

    @abstractmethod
    async def _end_processes(self) -> None:
        """End all processes."""


class _OnlyWorker(PoolWorker):
    """The place of an engine that has no pool: what ends it again and again is not tried for ever."""

    restart_delays_s = (0.0, 0.0, 1.0)
    soon_s = float("inf")
    gives_up = True

    @property
    def words(self) -> str:
        """See PoolWorker."""
        return "the engine process"


class RemoteEngine(ProcessClient):
    """See EngineClient. `start` it, and `close` it; in between it looks after its process by itself.

    Args:
        config: of the engine.
        step_timeout_s: a process that says nothing for so long, or whose engine does not come round for so long beyond
            what its step takes, is ended and started again.
        command: starts the process; tests put another around it.
        options: the fields of ClientOptions, by name.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        step_timeout_s: float = 15.0,
        command: Sequence[str] = COMMAND,
        **options: Unpack[ClientOptions],
    ) -> None:
        super().__init__(**options)
        self._config = config
        self._step_timeout_s = step_timeout_s
        self._command = tuple(command)
        self._places: tuple[PoolWorker, ...] = ()
        """The one place, once it was started."""
        self._name = ""
        """Of the process that runs now, in events; empty while none does."""
        self.imports_s = self.ready_s = 0.0
        """Seconds from the start of the running process to the end of its imports, and to when it was ready."""

    @property
    def pid(self) -> int | None:
        """Of the process that runs now."""
        return self._places[0].pid if self._places else None

    @property
    def is_idle(self) -> bool:
        """See EngineClient."""
        return self._takes_requests and not self.num_streams

    def load(self, tenant: str, *, background: bool = False) -> EngineLoad:
        """See EngineClient."""
        return self._places[0].meter.load(tenant, background=background)

    async def start(self) -> None:
        """Loads the model.

        Raises:
            SetupError: it cannot be loaded as the config says.
        """
        self.expect(self._config.load.tokenizer or self._config.load.model)
        worker = _OnlyWorker(Role.BOTH, 0, self._launch, self)
        self._places = (worker,)
        worker.start()
        try:
            await worker.has_started
        except BaseException:
            await self.close()
            raise
        heartbeat_s = self._step_timeout_s / HEARTBEATS_IN_TIME
        every_s = min(1.0, self._stall_after_s / 4, heartbeat_s)
        self._run(self._look_after(every_s, self._step_timeout_s), "twostroke-watch")

    async def _launch(self, name: str) -> EngineProcess:
        del name
        heartbeat = Heartbeat(self._step_timeout_s / HEARTBEATS_IN_TIME, self._step_timeout_s)
        return await EngineProcess.spawn(StartEngine(self._config, heartbeat=heartbeat), self._command)

    # ------------------------------------------------------------------ what a front desk needs of who runs sequences

    def add_request(self, request: GenerationRequest) -> None:
        """Queues a sequence."""
        self._places[0].send(Add(request))

    def finish(self, request_id: str, reason: FinishReason, num_output_tokens: int | None = None) -> None:
        """Ends a sequence, if there is a process that may still run it."""
        self._places[0].send(Finish(request_id, reason, num_output_tokens))

    # ------------------------------------------------------------------ what its worker tells

    def objection(self, worker: PoolWorker, ready: EngineReady) -> str:
        """See WorkerListener: one process has nobody to agree with."""
        del worker, ready
        return ""

    async def worker_ready(self, worker: PoolWorker, ready: EngineReady) -> None:
        """See WorkerListener."""
        self.imports_s, self.ready_s = ready.imports_s, ready.ready_s
        await self.meet(ready.facts, self)
        self._name = f"engine-{worker.pid}"
        self._progress_s = self.now_s()

    def worker_gone(self, worker: PoolWorker, cause: str) -> None:
        """See WorkerListener: every stream ends, as nobody else has what its engine had."""
        self.give_up(worker.cause)
        self._fail_resets(worker.cause)
        if self._name:
            self._tell_soon(EngineLost(self.now_s(), self._name, cause))
            self._report_trouble(cause)
        self._name = ""

    @property
    def _workers(self) -> Sequence[PoolWorker]:
        return self._places

    @property
    def _takes_requests(self) -> bool:
        return self._places[0].is_ready

    def _standing(self) -> tuple[EngineState, str]:
        if not self._places:
            return EngineState.STARTING, "the model is being loaded"
        worker = self._places[0]
        return worker.state, worker.cause or "steps are committed while there is work"

    def _is_waiting(self, sequence_id: str) -> bool:
        return self._places[0].meter.is_waiting(sequence_id)

    def _name_of(self, worker: PoolWorker) -> str:
        del worker
        return self._name

    def _deliver(
        self, worker: PoolWorker, updates: Sequence[TokenUpdate], events: Sequence[PackedEvent]
    ) -> Sequence[TokenUpdate]:
        worker.meter.keep(events)  # before the outputs: delivering the last one makes its request unknown
        if updates:
            self.deliver(updates)
        return updates

    async def _end_processes(self) -> None:
        for worker in self._places:
            await worker.close()
