"""An engine process as its parent sees it: its life from spawn to exit, and the two sockets."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zmq

from twostroke.child_command import child_command
from twostroke.cluster.child import Child, LocalChild, take_early
from twostroke.cluster.forking import ForkedChild, ForkServer
from twostroke.cluster.messages import (
    Alive,
    Command,
    Refused,
    Report,
    StartEngine,
    Stop,
    decode_report,
    encode_message,
)
from twostroke.cluster.process_sockets import FolderSockets, ProcessSockets

COMMAND = child_command("twostroke.cluster.process")
STOP_TIMEOUT_S = 10.0
"""Seconds that a process may take to stop before it is killed."""
LOADING_TIMEOUT_S = 60.0
"""Seconds that a loading process may be silent before it is killed, because it was stopped or hangs."""
FINAL_REPORTS_S = 0.2
"""Seconds after its exit during which a process's last reports may still arrive through the socket."""


class EngineProcess:
    """A process that runs an engine, with its commands and reports.

    Each process has new sockets, so reports of a dead process are never taken for its successor's.

    Args:
        child: the process.
        sockets: sockets to it.
        final_reports_s: seconds to wait for reports after its exit; 0 loses nothing where other workers recompute them.
    """

    def __init__(self, child: Child, sockets: ProcessSockets, final_reports_s: float) -> None:
        self._child = child
        self._last_words_s = final_reports_s
        self._context: zmq.Context[Any] = zmq.Context()
        # Sending never blocks: the sockets queue messages even before the other process exists.
        self._commands, self._reports = sockets.ends(self._context)
        self._exit = asyncio.create_task(child.ending())
        self._wake_up: asyncio.Future[None] | None = None
        """Future of the caller that waits for a report or for the end."""
        # The descriptors are watched directly: the binding's own futures cost a step as much as three of its tokens.
        # They are edge-triggered, so each wake-up reads until nothing is left.
        loop = asyncio.get_running_loop()
        self._readable: list[int] = [self._reports.getsockopt(zmq.FD)]
        loop.add_reader(self._readable[0], self._wake)
        self._monitors: list[Any] = []
        if sockets.break_for_good:
            for socket in (self._commands, self._reports):
                monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
                self._monitors.append(monitor)
                self._readable.append(monitor.getsockopt(zmq.FD))
                loop.add_reader(self._readable[-1], self._on_disconnect, monitor)
        self._exit.add_done_callback(self._wake)

    @classmethod
    async def spawn(
        cls,
        start: StartEngine,
        command: Sequence[str] = COMMAND,
        *,
        forks: ForkServer | None = None,
        final_reports_s: float = FINAL_REPORTS_S,
    ) -> EngineProcess:
        """Start a child of this process and send it its first message.

        Args:
            start: the engine to load.
            command: command line of the child.
            forks: fork server to fork the child from instead.
            final_reports_s: see EngineProcess.

        Raises:
            SetupError: it could not be forked.
        """
        child: LocalChild | ForkedChild
        if forks is None:
            child = take_early(command) or LocalChild(command).adopt()
        else:
            child = await forks.fork(Path(tempfile.mkdtemp(prefix="twostroke-")))  # for this user only
        process = cls(child, FolderSockets(child.folder), final_reports_s)
        process.send(start)
        return process

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._child.pid

    def send(self, command: Command) -> None:
        """Queue a command; it is lost if the child has ended."""
        with contextlib.suppress(zmq.Again):
            self._commands.send(encode_message(command), zmq.NOBLOCK)

    async def receive(self) -> Report | None:
        """Wait for the next report; return None when the child has exited and all its reports were read."""
        had_exited = False
        while True:
            try:
                return decode_report(self._reports.recv(zmq.NOBLOCK))
            except zmq.Again:
                if had_exited:
                    return None
            had_exited = self._exit.done()
            if had_exited:
                await asyncio.sleep(self._last_words_s)
            else:
                self._wake_up = asyncio.get_running_loop().create_future()
                await self._wake_up

    async def first_report(self, timeout_s: float) -> Report | None:
        """Wait for the report that the model is loaded, skipping heartbeats.

        Args:
            timeout_s: seconds of silence after which the process is killed and counts as refused.
        """
        while True:
            try:
                report = await asyncio.wait_for(self.receive(), timeout_s)
            except TimeoutError:
                self.kill()
                return Refused(f"it said nothing for {timeout_s:g} s while it was loaded.")
            if not isinstance(report, Alive):
                return report

    def _wake(self, *_: object) -> None:
        if self._wake_up is not None and not self._wake_up.done():
            self._wake_up.set_result(None)
        elif not self._reports.closed:
            # No caller waits. Without this call the descriptor stays readable, and the event loop would call this
            # method again and again. The next caller tries the socket before it waits.
            self._reports.getsockopt(zmq.EVENTS)

    def _on_disconnect(self, monitor: Any) -> None:
        """Kill the child, because a broken connection is never made again and its reports are lost."""
        with contextlib.suppress(zmq.Again):
            monitor.recv_multipart(zmq.NOBLOCK)
            self.kill()

    async def ending(self) -> str:
        """Wait for the child to end; return how it ended, in words."""
        return await self._exit

    def kill(self) -> None:
        """Kill the child, even if it is stopped."""
        if not self._exit.done():
            self._child.kill()

    async def stop(self) -> None:
        """Ask the child to stop, kill it after a while, and remove the sockets. A second call does nothing."""
        if not self._exit.done():
            self.send(Stop())
            try:
                await asyncio.wait_for(asyncio.shield(self._exit), STOP_TIMEOUT_S)
            except TimeoutError:
                self._child.kill()
                await self._exit
        if not self._reports.closed:  # after closing, another file may have the same descriptor
            for descriptor in self._readable:
                asyncio.get_running_loop().remove_reader(descriptor)
        for monitor in self._monitors:
            monitor.close()
        self._commands.close()
        self._reports.close()
        self._context.term()  # each context has a thread, which restarts must not accumulate
        self._child.forget()
