"""RemoteEngine: an EngineClient whose engine runs in a process of its own, watched and started again when it dies."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence

from twostroke.client.engine_client import EngineHealth, EngineState, OutputStream
from twostroke.client.input_processor import InputProcessor
from twostroke.client.load import EngineLoad, LoadMeter
from twostroke.client.reception import Reception
from twostroke.client.submission import Submission
from twostroke.cluster.delivery import delivery_of
from twostroke.cluster.engine_process import COMMAND, LOADING_SILENCE_S, EngineProcess
from twostroke.cluster.messages import (
    Add,
    Alive,
    CacheWasReset,
    EngineReady,
    Failed,
    Finish,
    Progress,
    Refused,
    Report,
    ResetPrefixCache,
)
from twostroke.config.engine import EngineConfig
from twostroke.engine.clock import monotonic_clock
from twostroke.engine.facts import EngineFacts
from twostroke.engine.garbage import look_in_a_lull
from twostroke.engine.generation import GenerationRequest
from twostroke.engine.heartbeat import Heartbeat
from twostroke.errors import EngineError, EngineUnavailable, SetupError
from twostroke.event_codec import PackedEvent, PackedEventLog, kind_of, pack, unpack
from twostroke.events import EngineLost, Event, KVBlockChecked
from twostroke.log import get_logger
from twostroke.plain_words import reason_of
from twostroke.request import FinishReason
from twostroke.tokenizer.tokenizer import Tokenizer

log = get_logger(__name__)

MAX_FAST_DEATHS = 3
"""Deaths in a row without a step between them: then it is no accident, and starting again would not help."""
RESTART_DELAY_S = 1.0
HEARTBEATS_IN_TIME = 4
"""A process says so often that it lives before it is taken for dead."""
SHUTTING_DOWN = "the server is shutting down, and ends what runs"


class _Wire:
    """The engine as the front desk sees it: what it is asked becomes a command to the process that runs now."""

    def __init__(self) -> None:
        self.process: EngineProcess | None = None
        self.meter = LoadMeter(1, is_fair=False)

    def add_request(self, request: GenerationRequest) -> None:
        """Queues a sequence."""
        assert self.process is not None, "nobody checks requests in while no engine runs"
        new = request.new_request
        num_tokens = len(new.prompt_token_ids)
        self.meter.sent(
            new.request_id,
            request.tenant,
            num_tokens=num_tokens,
            max_tokens=request.max_tokens,
            background=request.background,
        )
        self.process.send(Add(request))

    def finish(self, request_id: str, reason: FinishReason, num_output_tokens: int | None = None) -> None:
        """Ends a sequence, if there is a process that may still run it."""
        self.meter.ended(request_id)
        if self.process is not None:
            self.process.send(Finish(request_id, reason, num_output_tokens))


class RemoteEngine:
    """See EngineClient. `start` it, and `close` it; in between it looks after its process by itself.

    Args:
        config: of the engine.
        listeners: hear every event of every process that runs, as it is reported.
        stall_after_s: with work queued and no step for so long, the engine counts as stalled.
        step_timeout_s: a process that says nothing for so long, or whose engine does not come round for so long beyond
            what its step takes, is ended and started again.
        chat_template: Jinja source instead of the model's own.
        on_trouble: called with the cause when the process has died or stalls, or its memory has gone bad, in a thread.
        command: starts the process; tests put another around it.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        listeners: Sequence[PackedEventLog] = (),
        stall_after_s: float = 30.0,
        step_timeout_s: float = 15.0,
        chat_template: str | None = None,
        on_trouble: Callable[[str], object] = log.error,
        command: Sequence[str] = COMMAND,
    ) -> None:
        self._config = config
        self._listeners = tuple(listeners)
        self._stall_after_s = stall_after_s
        self._step_timeout_s = step_timeout_s
        self._reception = Reception(chat_template)
        self._on_trouble = on_trouble
        self._command = tuple(command)
        self._wire = _Wire()
        self.imports_s = self.ready_s = 0.0
        """Seconds from the start of the running process to the end of its imports, and to when it was ready."""
        self._resets: deque[asyncio.Future[bool]] = deque()
        self._state = EngineState.STARTING
        self._cause = "the model is being loaded"
        self._is_draining = False
        self._num_restarts = 0
        self._num_fast_deaths = 0
        self._progress_s = self._heard_s = self.now_s()
        self._why_ended = ""
        """What the process that runs now was killed for."""
        self._supervisor: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------ what EngineClient promises

    @property
    def facts(self) -> EngineFacts:
        """See EngineClient."""
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
        """The monotonic clock, which all processes of a machine share."""
        return monotonic_clock()

    def health(self) -> EngineHealth:
        """See EngineClient."""
        state, cause = self._state, self._cause
        num_requests = self._reception.num_streams
        waited_s = self.now_s() - self._progress_s
        if state is EngineState.RUNNING and num_requests and waited_s > self._stall_after_s:
            state = EngineState.STALLED
            cause = f"{num_requests} requests are queued and no step was committed for {waited_s:.1f} s"
        if state is EngineState.RUNNING and self._is_draining:
            state, cause = EngineState.DRAINING, SHUTTING_DOWN
        return EngineHealth(state, cause, num_requests, self._num_restarts)

    def generate(self, submission: Submission) -> OutputStream:
        """See EngineClient."""
        if self._state is not EngineState.RUNNING or self._is_draining:
            cause = SHUTTING_DOWN if self._is_draining else self._cause
            may_return = self._state is not EngineState.FAILED
            raise EngineUnavailable(f"the engine takes no requests now: {cause}.", may_return=may_return)
        if not self._reception.num_streams:
            self._progress_s = self.now_s()  # it was idle, which is no stall
        return self._reception.receive(submission, self._wire.meter.is_waiting)

    @property
    def is_idle(self) -> bool:
        """See EngineClient."""
        return self._state is EngineState.RUNNING and not self._reception.num_streams

    def load(self, tenant: str, *, background: bool = False) -> EngineLoad:
        """See EngineClient."""
        return self._wire.meter.load(tenant, background=background)

    def abort(self, request_id: str, tenant: str = "") -> bool:
        """See EngineClient."""
        return self._reception.abort(request_id, tenant)

    async def reset_prefix_cache(self) -> bool:
        """See EngineClient."""
        if self._wire.process is None or self._state is not EngineState.RUNNING:
            raise EngineUnavailable(f"the engine takes no commands now: {self._cause}.")
        reset: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._resets.append(reset)
        self._wire.process.send(ResetPrefixCache())
        return await reset

    # ------------------------------------------------------------------ its own life

    @property
    def pid(self) -> int | None:
        """Of the process that runs now."""
        return None if self._wire.process is None else self._wire.process.pid

    async def start(self) -> None:
        """Loads the model.

        Raises:
            SetupError: it cannot be loaded as the config says.
        """
        self._reception.expect(self._config.load.tokenizer or self._config.load.model)
        process = await self._spawn()
        self._supervisor = asyncio.create_task(self._supervise(process), name="twostroke-supervisor")
        self._supervisor.add_done_callback(self._supervision_ended)
        self._watch = asyncio.create_task(self._watch_progress(), name="twostroke-watch")

    def drain(self) -> None:
        """Takes no more requests; what runs goes on."""
        self._is_draining = True

    def give_up(self, cause: str) -> None:
        """Ends what still runs; whoever reads a stream is told why."""
        self._reception.lose(cause)

    async def close(self) -> None:
        """Ends the process; streams that are still open end with an EngineError. A second time does nothing."""
        for task in (self._supervisor, self._watch):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        self._supervisor = self._watch = None
        self._end(EngineState.CLOSED, "it was closed")
        process, self._wire.process = self._wire.process, None
        if process is not None:
            await process.stop()

    async def _spawn(self) -> EngineProcess:
        """A process whose model is loaded."""
        heartbeat = Heartbeat(self._step_timeout_s / HEARTBEATS_IN_TIME, self._step_timeout_s)
        process = await EngineProcess.spawn(self._config, self._command, heartbeat=heartbeat)
        try:
            report = await process.first_report(LOADING_SILENCE_S)
            match report:
                case EngineReady(facts, imports_s=imports_s, ready_s=ready_s):
                    self.imports_s, self.ready_s = imports_s, ready_s
                    await self._reception.meet(facts, self._wire)
                    self._wire.meter = LoadMeter(facts.max_num_seqs, is_fair=facts.is_fair)
                case Refused(reason):
                    raise SetupError(reason)
                case _:
                    raise SetupError(f"the engine process {await process.ending()} before its model was loaded.")
        except BaseException:
            process.kill()  # it has nothing to lose, and would not hear that it is to stop before its model is loaded
            await process.stop()
            raise
        self._wire.process = process
        self._progress_s = self._heard_s = self.now_s()
        self._why_ended = ""
        self._state, self._cause = EngineState.RUNNING, "steps are committed while there is work"
        return process

    async def _supervise(self, process: EngineProcess) -> None:
        """Reads reports while the process lives; starts another when it has died."""
        current: EngineProcess | None = process
        while current is not None:
            reason = await self._read(current)
            ending = f"the engine process {await current.ending()}{reason}{self._why_ended}"
            self._wire.process = None
            # first of all, before anything is awaited: nobody may be let in, and whoever waits is told at once
            self._end(EngineState.STARTING, f"{ending}; it is being started again")
            self._tell_of_loss(current, ending)
            await current.stop()
            await asyncio.to_thread(self._on_trouble, ending)  # it writes a dump, which takes a while
            current = await self._restart(ending)

    def _supervision_ended(self, supervisor: asyncio.Task[None]) -> None:
        """A mistake of ours must not look like an engine that runs: nobody would read its reports any more."""
        error = None if supervisor.cancelled() else supervisor.exception()
        if error is not None:
            log.error("the engine's reports are not read any more", exc_info=error)
            self._end(EngineState.FAILED, f"its reports could not be read any more ({reason_of(error)})")

    async def _watch_progress(self) -> None:
        """Ends a process that has gone silent, and reports each stall once."""
        was_stalled = False
        looked_s = self.now_s()
        while True:
            await asyncio.sleep(min(1.0, self._stall_after_s / 4, self._step_timeout_s / HEARTBEATS_IN_TIME))
            before_s, looked_s = looked_s, self.now_s()
            if looked_s - before_s < self._step_timeout_s / 2:
                self._end_if_silent()
            else:  # it is we who have slept
                self._heard_s = looked_s
            health = self.health()
            is_stalled = health.state is EngineState.STALLED
            if is_stalled and not was_stalled:
                await asyncio.to_thread(self._on_trouble, f"the engine stalls: {health.cause}")
            was_stalled = is_stalled

    def _end_if_silent(self) -> None:
        """Kills a process that says nothing; one that was stopped or hangs never would again."""
        process = self._wire.process
        if process is not None and self.now_s() - self._heard_s > self._step_timeout_s and not self._why_ended:
            self._why_ended = f": it said nothing for {self._step_timeout_s:g} s"
            process.kill()

    async def _restart(self, ending: str) -> EngineProcess | None:
        """Another process; None when that does not help."""
        while self._num_fast_deaths < MAX_FAST_DEATHS:
            self._num_fast_deaths += 1
            self._num_restarts += 1
            try:
                return await self._spawn()
            except SetupError as error:
                log.error("the engine could not be started again: %s", error)
                self._cause = f"{ending}; starting it again failed ({error})"
                await asyncio.sleep(RESTART_DELAY_S)
        self._state = EngineState.FAILED
        self._cause = f"{ending}, {MAX_FAST_DEATHS} times in a row; it was given up"
        return None

    async def _read(self, process: EngineProcess) -> str:
        """Takes reports in until there are no more; returns what the process said of its end."""
        reason = ""
        while (report := await process.receive()) is not None:
            self._heard_s = self.now_s()
            if isinstance(report, Failed):
                reason = f" ({report.reason})"
            else:
                self._take_in(report)
                await asyncio.sleep(0)  # where reports come faster than they are taken in, the others run all the same
        return reason

    def _take_in(self, report: Report) -> None:
        match report:
            case Progress(updates, packed):
                received_s = self._progress_s = self.now_s()
                self._wire.meter.keep(packed)
                if updates:
                    self._num_fast_deaths = 0
                    self._reception.deliver(updates)
                    process = f"engine-{self.pid}"
                    delivered = delivery_of(report, process, received_s, self.now_s())
                    packed = [*packed, pack(delivered)]
                if packed:  # behind the streams that were just woken: who waits for a token goes before who takes notes
                    asyncio.get_running_loop().call_soon(self._tell_listeners, packed)
            case CacheWasReset(had_blocks):
                reset = self._resets.popleft()
                if not reset.done():  # who asked may have left
                    reset.set_result(had_blocks)
            case Alive():
                pass
            case EngineReady() | Refused() | Failed():
                raise AssertionError(f"not expected of an engine that runs: {report}")

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
            trouble = f"KV memory has gone bad in the cached prefix of {event.request_id}"
            # beside the loop: whoever hears of it writes a dump, which takes a while
            asyncio.get_running_loop().run_in_executor(None, self._on_trouble, trouble)

    def _tell_of_loss(self, process: EngineProcess, cause: str) -> None:
        """Says behind everything the process has reported that nothing more will come of it."""
        lost = EngineLost(self.now_s(), f"engine-{process.pid}", cause)
        asyncio.get_running_loop().call_soon(self._tell_listeners, [pack(lost)])

    def _end(self, state: EngineState, cause: str) -> None:
        """Nothing runs any more: whoever waits is told why."""
        self._state, self._cause = state, cause
        self._reception.lose(cause)
        while self._resets:
            reset = self._resets.popleft()
            if not reset.done():
                reset.set_exception(EngineError(cause))
