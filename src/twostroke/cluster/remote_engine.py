"""RemoteEngine: an EngineClient whose engine runs in a process of its own, which is watched and restarted when it dies.

    API ──► generate ──► StreamingFrontend ──► sequences ──► PoolWorker ──► the engine's process
        ◄── streams ◄── StreamingFrontend ◄── updates ◄──────────┘

`ProcessClient` is the part shared with the pools of `pooled_engine.py`: streams, health, life cycle, listeners.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypedDict, Unpack

from twostroke.client.engine_client import EngineHealth, EngineState, OutputStream
from twostroke.client.load import EngineLoad
from twostroke.client.submission import Submission
from twostroke.client.text_frontend import StreamingFrontend
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
from twostroke.cluster.pool_worker import HEARTBEATS_PER_TIMEOUT, PoolWorker
from twostroke.config.engine import EngineConfig
from twostroke.engine.clock import monotonic_clock
from twostroke.engine.garbage import collect_when_idle
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

SHUTTING_DOWN = "the server is shutting down after its running requests"


class ClientOptions(TypedDict, total=False):
    """Keyword arguments of every ProcessClient."""

    listeners: Sequence[PackedEventLog]
    """Receivers of every event of all processes, as it is reported."""
    stall_after_s: float
    """Seconds without a step, while there are requests, after which the engine counts as stalled."""
    chat_template: str | None
    """Jinja source of the chat template; None: the model's own."""
    on_trouble: Callable[[str], object]
    """Called in a thread with the cause, when a process has died, the engine stalls or its KV memory is corrupt."""


class ProcessClient(StreamingFrontend, ABC):
    """An EngineClient over engines in other processes: streams, health and life cycle."""

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
        """Unanswered resets, each with the ids of the workers that have not replied."""
        self._tasks: list[asyncio.Task[None]] = []

    # ------------------------------------------------------------------ EngineClient

    def now_s(self) -> float:
        """Return the time of the monotonic clock, which all processes of a machine share."""
        return monotonic_clock()

    def health(self) -> EngineHealth:
        num_requests = self.num_streams
        state, cause = (EngineState.CLOSED, "it was closed") if self._is_closed else self._state_and_cause()
        waited_s = self.now_s() - self._progress_s
        if state is EngineState.RUNNING and num_requests and waited_s > self._stall_after_s:
            state = EngineState.STALLED
            cause = f"{num_requests} requests are queued and no step was committed for {waited_s:.1f} s"
        if state is EngineState.RUNNING and self._is_draining:
            state, cause = EngineState.DRAINING, SHUTTING_DOWN
        return EngineHealth(state, cause, num_requests, sum(worker.num_restarts for worker in self._workers))

    def generate(self, submission: Submission) -> OutputStream:
        if self._is_draining or self._is_closed or not self._takes_requests:
            health = self.health()
            cause = SHUTTING_DOWN if self._is_draining else health.cause
            may_return = health.state is not EngineState.FAILED
            raise EngineUnavailable(f"the engine takes no requests now: {cause}.", may_return=may_return)
        if not self.num_streams:
            self._progress_s = self.now_s()  # idle time is no stall
        return self.open_stream(submission, self._is_waiting)

    async def reset_prefix_cache(self) -> bool:
        """Reset the prefix caches of all processes."""
        asked = {worker.worker_id: worker for worker in self._workers if worker.is_ready}
        if not asked:
            raise EngineUnavailable(f"the engine takes no commands now: {self.health().cause}.")
        reset: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._resets.append((set(asked), reset))
        for worker in asked.values():
            worker.send(ResetPrefixCache())
        return await reset

    # ------------------------------------------------------------------ life cycle

    def drain(self) -> None:
        """Accept no more requests; running ones continue."""
        self._is_draining = True

    def end_all(self, cause: str) -> None:
        """End all streams with the cause."""
        self.fail_all(cause)

    async def close(self) -> None:
        """End the processes; streams that are still open end with an EngineError. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.end_all("it was closed")
        self._fail_resets("it was closed")
        await self._end_processes()

    def _run(self, task: Coroutine[Any, Any, None], name: str) -> None:
        """Run a task until this client is closed."""
        self._tasks.append(asyncio.create_task(task, name=name))

    async def _watch_workers(self, every_s: float, timeout_s: float, also: Callable[[], object] = lambda: None) -> None:
        """Kill silent processes, and report each stall once.

        Args:
            every_s: seconds between two checks.
            timeout_s: seconds of silence after which a process is killed: it was stopped, or hangs.
            also: called after each check.
        """
        was_stalled = False
        looked_s = self.now_s()
        while True:
            await asyncio.sleep(every_s)
            before_s, looked_s = looked_s, self.now_s()
            for worker in self._workers:
                if looked_s - before_s < timeout_s / 2:
                    worker.end_if_silent(timeout_s)
                else:  # this process did not run meanwhile
                    worker.reset_silence()
            also()
            health = self.health()
            is_stalled = health.state is EngineState.STALLED
            if is_stalled and not was_stalled:
                with contextlib.suppress(Exception):
                    await asyncio.to_thread(self._on_trouble, f"the engine stalls: {health.cause}")
            was_stalled = is_stalled

    # ------------------------------------------------------------------ WorkerListener

    def worker_reports(self, worker: PoolWorker, report: Report) -> None:
        match report:
            case Progress():
                self._take_progress(worker, report)
            case CacheWasReset(had_blocks):
                self._note_reset(worker.worker_id, had_blocks=had_blocks)
            case _:
                raise AssertionError(f"not expected of an engine that runs: {report}")

    def _take_progress(self, worker: PoolWorker, report: Progress) -> Sequence[TokenUpdate]:
        """Process the report of a step; return the updates that were delivered."""
        received_s = self._progress_s = self.now_s()
        events = report.events
        updates = self._deliver(worker, report.updates, events)
        if updates:
            delivered = TokensDelivered(
                self.now_s(), self._name_of(worker), report.updates[0].time_s, report.sent_s, received_s
            )
            events = [*events, pack(delivered)]
        if events:  # after the streams that were just woken: tokens are more urgent than listeners
            asyncio.get_running_loop().call_soon(self._notify_listeners, events)
        return updates

    def _notify_listeners(self, events: Sequence[PackedEvent]) -> None:
        for event in events:
            for listener in self._listeners:
                listener.append(event)
            if kind_of(event) == KVBlockChecked.__name__:
                self._report_corruption(unpack(event))
        collect_when_idle()

    def _report_corruption(self, event: Event) -> None:
        """Report corrupt KV memory."""
        if isinstance(event, KVBlockChecked) and event.quarantined:
            self._report_trouble(f"KV memory is corrupt in the cached prefix of {event.request_id}")

    def _notify_soon(self, event: Event) -> None:
        """Send listeners an event of this process, after all events reported before."""
        asyncio.get_running_loop().call_soon(self._notify_listeners, [pack(event)])

    def _report_trouble(self, cause: str) -> None:
        """Call `on_trouble` in a thread: it writes a dump, which takes a while."""
        asyncio.get_running_loop().run_in_executor(None, self._on_trouble, cause)

    def _note_reset(self, worker_id: str, *, had_blocks: bool, for_all: bool = False) -> None:
        """Record that a worker has reset its cache: for its oldest reset request, or for all of them if it has died."""
        for asked, reset in self._resets:
            if worker_id in asked:
                asked.discard(worker_id)
                if not asked and not reset.done():
                    reset.set_result(had_blocks)
                if not for_all:
                    break
        self._resets = [(asked, reset) for asked, reset in self._resets if asked]

    def _fail_resets(self, cause: str) -> None:
        """Fail all waiting resets with the cause."""
        resets, self._resets = self._resets, []
        for _, reset in resets:
            if not reset.done():  # the caller may have been cancelled
                reset.set_exception(EngineError(cause))

    # ------------------------------------------------------------------ what differs between one process and several

    @property
    @abstractmethod
    def _workers(self) -> Sequence[PoolWorker]:
        """Workers that run, start or leave."""

    @property
    @abstractmethod
    def _takes_requests(self) -> bool:
        """Whether the processes can take a request now."""

    @abstractmethod
    def _state_and_cause(self) -> tuple[EngineState, str]:
        """Return the state of the processes, and its cause in words."""

    @abstractmethod
    def _is_waiting(self, sequence_id: str) -> bool:
        """Return whether a sequence has not begun on any worker."""

    @abstractmethod
    def _name_of(self, worker: PoolWorker) -> str:
        """Return the name of a worker's process in events."""

    @abstractmethod
    def _deliver(
        self, worker: PoolWorker, updates: Sequence[TokenUpdate], events: Sequence[PackedEvent]
    ) -> Sequence[TokenUpdate]:
        """Deliver the updates of a worker's step; return those that reached a stream."""

    @abstractmethod
    async def _end_processes(self) -> None:
        """End all processes."""


class _SingleWorker(PoolWorker):
    """The worker of an engine without a pool; restarts end after some deaths."""

    restart_delays_s = (0.0, 0.0, 1.0)
    fast_death_s = float("inf")
    gives_up = True

    @property
    def words(self) -> str:
        return "the engine process"


class RemoteEngine(ProcessClient):
    """An EngineClient of one engine process. `start` it, and `close` it; it watches its process by itself.

    Args:
        config: of the engine.
        step_timeout_s: a process is killed and restarted if it is silent for so many seconds, or if a pass of its loop
            takes so much longer than its step should.
        command: command line of the process; tests wrap it.
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
        self._own_workers: tuple[PoolWorker, ...] = ()
        """The one worker, once it was started."""
        self._name = ""
        """Name of the running process in events; empty while none runs."""
        self.imports_s = self.ready_s = 0.0
        """Seconds from the start of the running process to the end of its imports, and to its readiness."""

    @property
    def pid(self) -> int | None:
        """Id of the running process."""
        return self._own_workers[0].pid if self._own_workers else None

    @property
    def is_idle(self) -> bool:
        return self._takes_requests and not self.num_streams

    def load(self, tenant: str, *, background: bool = False) -> EngineLoad:
        return self._own_workers[0].meter.load(tenant, background=background)

    async def start(self) -> None:
        """Start the process and load the model.

        Raises:
            SetupError: it cannot be loaded as configured.
        """
        self.preload_tokenizer(self._config.load.tokenizer or self._config.load.model)
        worker = _SingleWorker(Role.BOTH, 0, self._launch, self)
        self._own_workers = (worker,)
        worker.start()
        try:
            await worker.has_started
        except BaseException:
            await self.close()
            raise
        heartbeat_s = self._step_timeout_s / HEARTBEATS_PER_TIMEOUT
        every_s = min(1.0, self._stall_after_s / 4, heartbeat_s)
        self._run(self._watch_workers(every_s, self._step_timeout_s), "twostroke-watch")

    async def _launch(self, name: str) -> EngineProcess:
        del name
        heartbeat = Heartbeat(self._step_timeout_s / HEARTBEATS_PER_TIMEOUT, self._step_timeout_s)
        return await EngineProcess.spawn(StartEngine(self._config, heartbeat=heartbeat), self._command)

    # ------------------------------------------------------------------ interface to StreamingFrontend

    def add_request(self, request: GenerationRequest) -> None:
        """Queue a sequence."""
        self._own_workers[0].send(Add(request))

    def finish(self, request_id: str, reason: FinishReason, num_output_tokens: int | None = None) -> None:
        """End a sequence, if a process may still run it."""
        self._own_workers[0].send(Finish(request_id, reason, num_output_tokens))

    # ------------------------------------------------------------------ WorkerListener

    def refusal(self, worker: PoolWorker, ready: EngineReady) -> str:
        """Return no objection: a single process has no others to agree with."""
        del worker, ready
        return ""

    async def worker_ready(self, worker: PoolWorker, ready: EngineReady) -> None:
        self.imports_s, self.ready_s = ready.imports_s, ready.ready_s
        await self.prepare_for(ready.facts, self)
        self._name = f"engine-{worker.pid}"
        self._progress_s = self.now_s()

    def worker_gone(self, worker: PoolWorker, cause: str) -> None:
        """End every stream, because no other process can resume its sequences."""
        self.end_all(worker.cause)
        self._fail_resets(worker.cause)
        if self._name:
            self._notify_soon(EngineLost(self.now_s(), self._name, cause))
            self._report_trouble(cause)
        self._name = ""

    @property
    def _workers(self) -> Sequence[PoolWorker]:
        return self._own_workers

    @property
    def _takes_requests(self) -> bool:
        return self._own_workers[0].is_ready

    def _state_and_cause(self) -> tuple[EngineState, str]:
        if not self._own_workers:
            return EngineState.STARTING, "the model is being loaded"
        worker = self._own_workers[0]
        return worker.state, worker.cause or "steps are committed while there is work"

    def _is_waiting(self, sequence_id: str) -> bool:
        return self._own_workers[0].meter.is_waiting(sequence_id)

    def _name_of(self, worker: PoolWorker) -> str:
        del worker
        return self._name

    def _deliver(
        self, worker: PoolWorker, updates: Sequence[TokenUpdate], events: Sequence[PackedEvent]
    ) -> Sequence[TokenUpdate]:
        worker.meter.keep(events)  # before the updates: delivering the last one removes its request
        if updates:
            self.deliver(updates)
        return updates

    async def _end_processes(self) -> None:
        for worker in self._own_workers:
            await worker.close()
