"""The engine in a process of its own: `python -m twostroke.cluster.process FOLDER`, started by a Launcher.

Its loop never blocks while there is work: it reads commands between steps, and queues one report after each step. It
ends when it is told to, when a step leaves its state inconsistent, or when its parent is gone. It notices the last
by its standard input, and by a signal if it is stopped.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from twostroke.cluster.messages import (
    Add,
    Alive,
    CacheWasReset,
    Command,
    EngineReady,
    Failed,
    Finish,
    Progress,
    Refused,
    Report,
    ResetPrefixCache,
    StartEngine,
    Stop,
    decode_command,
    encode_message,
)
from twostroke.cluster.process_sockets import engine_ends, unbounded
from twostroke.engine.clock import monotonic_clock
from twostroke.engine.engine import Engine
from twostroke.engine.garbage import freeze_gc
from twostroke.engine.handover_messages import DropKV, EndHold, FetchKV, KVFetched
from twostroke.engine.heartbeat import Heartbeat
from twostroke.engine.pool_engine import PoolEngine
from twostroke.errors import TwostrokeError
from twostroke.event_codec import PackedEvent, pack
from twostroke.events import Event, StepScheduled
from twostroke.log import get_logger
from twostroke.parent_death import signal_at_parent_death
from twostroke.plain_words import reason_of
from twostroke.process_start import seconds_since_start
from twostroke.runner.model_runner import Executor
from twostroke.startup.assembly import build_engine
from twostroke.startup.handover_setup import HandoverSetup

log = get_logger(__name__)

_OWN_COMMANDS = "inproc://own-commands"
MAX_STEP_SLOWDOWN = 20
"""Multiple of the machine's best time for a step up to which a slow step counts as late, not lost."""
MAX_COMMANDS_PER_STEP = 64
"""Most commands handled between two steps, so that a request of a thousand prompts does not delay running ones."""


class _EventQueue:
    """Events that wait to be sent to the other process."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._events: list[PackedEvent] = []

    def append(self, event: Event) -> None:
        """Keep an event until the next report; for a step that begins, also record its minimum time for the
        heartbeat."""
        if isinstance(event, StepScheduled):
            self._channel.step_floor_s = 0.0 if event.cost is None else event.cost.seconds
        self._events.append(pack(event))

    def take(self) -> list[PackedEvent]:
        """Return and remove all events kept so far."""
        events, self._events = self._events, []
        return events


class Channel:
    """The engine process's ends of the two sockets."""

    def __init__(self, folder: Path) -> None:
        self._context = zmq.Context()
        self._commands, self._reports = engine_ends(self._context, folder)
        self._commands.bind(_OWN_COMMANDS)
        self._reports.setsockopt(zmq.LINGER, 1000)  # time to send the last report, which has the cause
        self._sends = threading.Lock()
        self._posts = threading.Lock()
        self._own: Any = None
        self._is_closed = False
        self._has_reported = False
        """Whether a report was sent since the heartbeat thread last looked."""
        self._last_pass_s = math.inf
        """Time at which the loop last read commands; infinite before it runs and while it waits for some."""
        self.step_floor_s = 0.0
        """Minimum time of the current step on this machine."""
        self.imports_s = 0.0
        """Seconds from the start of the process to the end of its imports; 0: it had none."""
        self.is_abandoned = False
        """Whether the engine was abandoned: nothing is sent any more."""

    def is_loading(self) -> None:
        """Suspend the loop's deadline while the model loads, however long that takes."""
        self._last_pass_s = math.inf

    def abandon(self) -> None:
        """Drop all later reports and end the loop after its current step; may be called from any thread."""
        self.is_abandoned = True
        self.post(Stop())

    def post(self, command: Command) -> None:
        """Queue a command from this process for the loop; may be called from any thread."""
        with self._posts:
            if self._is_closed:
                return
            if self._own is None:
                self._own = unbounded(self._context.socket(zmq.PUSH))
                self._own.connect(_OWN_COMMANDS)
            self._own.send(encode_message(command))

    def send_heartbeats(self, is_over: threading.Event, every_s: float, step_timeout_s: float) -> None:
        """Send a heartbeat whenever nothing else was sent for a while, in a thread that does nothing else.

        A report makes a heartbeat unnecessary, and each heartbeat wakes up the gateway.

        Args:
            is_over: ends the thread.
            every_s: seconds between heartbeats.
            step_timeout_s: seconds without a pass of the loop, beyond the time of its step, after which none is sent.
        """
        while not is_over.wait(every_s):
            allowed_s = step_timeout_s + MAX_STEP_SLOWDOWN * self.step_floor_s
            if not self._has_reported and monotonic_clock() - self._last_pass_s < allowed_s:
                self.send(Alive())
            self._has_reported = False

    def receive(self, *, wait: bool) -> Command | None:
        """Return the next command; None if there is none and `wait` is False."""
        self._last_pass_s = math.inf if wait else monotonic_clock()
        try:
            return decode_command(self._commands.recv(0 if wait else zmq.NOBLOCK))
        except zmq.Again:
            return None
        finally:
            self._last_pass_s = monotonic_clock()

    def send(self, report: Report) -> None:
        """Queue a report; may be called from any thread."""
        if self.is_abandoned:
            return
        self._has_reported = True
        with self._sends:
            self._reports.send(encode_message(report))

    def close(self) -> None:
        """Send what is queued, for a second at most, and close the sockets."""
        with self._posts:
            self._is_closed = True
            if self._own is not None:
                self._own.close()
        self._commands.close()
        self._reports.close()
        self._context.term()


def serve(folder: Path, wrap_executor: Callable[[Executor], Executor] | None = None, imports_s: float = 0.0) -> int:
    """Load the engine that the first command names and run it to the end; return the process's exit code.

    Args:
        folder: folder of the sockets.
        wrap_executor: wraps the executor that computes; tests inject faults there.
        imports_s: seconds that this process took for its imports.
    """
    channel = Channel(folder)
    channel.imports_s = imports_s
    return run(channel, wrap_executor)


def run(
    channel: Channel,
    wrap_executor: Callable[[Executor], Executor] | None = None,
    *,
    is_whole_process: bool = True,
    step_timeout_s: float | None = None,
) -> int:
    """Load and run an engine over an open channel, and close the channel in the end.

    Args:
        channel: source of commands.
        wrap_executor: see serve.
        is_whole_process: whether this process runs nothing else, so that its clock and memory are the engine's.
        step_timeout_s: seconds without reading commands, beyond the time of a step, up to which it counts as alive;
            None: as the first command says.
    """
    try:
        start = channel.receive(wait=True)
        if isinstance(start, Stop):
            return 0
        assert isinstance(start, StartEngine), f"the first command was {start}"
        if is_whole_process:
            monotonic_clock.ahead_s = start.clock_ahead_s
        return _run(channel, start, wrap_executor, is_whole_process, step_timeout_s)
    finally:
        channel.close()


def _run(
    channel: Channel,
    start: StartEngine,
    wrap_executor: Callable[[Executor], Executor] | None,
    is_whole_process: bool,
    step_timeout_s: float | None,
) -> int:
    outbox = _EventQueue(channel)
    heartbeat = start.heartbeat if start.handover is None else start.handover.heartbeat
    heart = None if heartbeat is None else _HeartbeatThread(channel, heartbeat, step_timeout_s)
    try:
        return _serve(channel, start, wrap_executor, outbox, is_whole_process=is_whole_process)
    finally:
        if heart is not None:
            heart.stop()


class _HeartbeatThread:
    """A thread that sends heartbeats, from the first command on."""

    def __init__(self, channel: Channel, heartbeat: Heartbeat, step_timeout_s: float | None) -> None:
        channel.is_loading()
        self._is_over = threading.Event()
        timeout_s = heartbeat.step_timeout_s if step_timeout_s is None else step_timeout_s
        beat = (self._is_over, heartbeat.every_s, timeout_s)
        self._thread = threading.Thread(target=channel.send_heartbeats, args=beat, daemon=True, name="twostroke-heart")
        self._thread.start()

    def stop(self) -> None:
        """Stop the heartbeats."""
        self._is_over.set()
        self._thread.join()


def _serve(
    channel: Channel,
    start: StartEngine,
    wrap_executor: Callable[[Executor], Executor] | None,
    outbox: _EventQueue,
    *,
    is_whole_process: bool,
) -> int:
    # messages of the hand-over's threads go through the command queue
    ends = None if start.handover is None else HandoverSetup(start.handover, secrets.randbits(63), channel.post)
    try:
        built = build_engine(start.config, wrap_executor, listeners=(outbox,), handover=ends, machine=start.machine)
    except TwostrokeError as error:
        channel.send(Refused(str(error)))
        return 1
    ready = EngineReady(
        built.facts,
        built.lender,
        built.geometry,
        built.machine,
        imports_s=channel.imports_s,
        ready_s=seconds_since_start(),
    )
    if ends is None:  # the other side prepares the same grammars meanwhile, and admits requests only afterwards
        channel.send(ready)
    built.grammars.warm_up()
    if is_whole_process:
        freeze_gc()
    if ends is not None:
        channel.send(ready)
    channel.send(Progress((), outbox.take()))
    try:
        _loop(channel, built.engine, outbox)
    except Exception as error:
        log.exception("the engine has stopped")
        channel.send(Progress((), outbox.take()))
        channel.send(Failed(f"{reason_of(error)}"))
        return 1
    finally:
        built.engine.close()
    return 0


def _loop(channel: Channel, engine: Engine, outbox: _EventQueue) -> None:
    """Run commands between steps, and steps while there is work; otherwise wait for a command."""
    while not channel.is_abandoned:
        command = channel.receive(wait=not engine.has_work)
        num_handled = 0
        while command is not None:
            if not _handle(command, channel, engine):
                return
            num_handled += 1
            command = channel.receive(wait=False) if num_handled < MAX_COMMANDS_PER_STEP else None
        updates = engine.step() if engine.has_work else ()
        events = outbox.take()
        if updates or events:
            channel.send(Progress(updates, events, monotonic_clock()))


def _handle(command: Command, channel: Channel, engine: Engine) -> bool:
    """Handle a command; return False to end the loop."""
    match command:
        case Add(request):
            engine.add_request(request)
        case Finish(request_id, reason, num_output_tokens):
            engine.finish(request_id, reason, num_output_tokens)
        case ResetPrefixCache():
            channel.send(CacheWasReset(engine.reset_prefix_cache()))
        case FetchKV() | DropKV() | KVFetched() | EndHold():
            assert isinstance(engine, PoolEngine), f"{command} to an engine of no pool"
            engine.hand_over(command)
        case _:
            return False
    return True


def end_with_parent(at_death: signal.Signals) -> None:
    """End this process when its standard input closes, because its parent has ended.

    Args:
        at_death: signal to receive when the parent ends; it kills a stopped process, or lets it continue.
    """

    def watch() -> None:
        while os.read(0, 4096):  # nothing is ever sent; a buffered reader would hold a lock at exit
            pass
        os._exit(0)

    signal_at_parent_death(at_death)
    threading.Thread(target=watch, daemon=True, name="twostroke-parent").start()


def main(wrap_executor: Callable[[Executor], Executor] | None = None, folder: str | None = None) -> None:
    """Run an engine process.

    Args:
        wrap_executor: see serve.
        folder: folder of the sockets; None: the command line names it.
    """
    imports_s = seconds_since_start() if folder is None else 0.0
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the HTTP process handles it
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="engine: %(levelname)s %(message)s")
    # the parent of a forked child is the fork server, whose end must not kill the child
    end_with_parent(signal.SIGKILL if folder is None else signal.SIGCONT)
    home = Path(folder or sys.argv[1])
    try:
        code = serve(home, wrap_executor, imports_s)
    except Exception:
        if home.exists():
            raise
        code = 1  # the parent has given this process up and removed its folder: no report is needed
    sys.exit(code)


if __name__ == "__main__":
    main()
