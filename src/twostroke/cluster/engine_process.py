"""One engine process seen from the other side: its life from spawn to exit, and the two sockets."""

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
from twostroke.cluster.wires import FolderWires, Wires

COMMAND = child_command("twostroke.cluster.process")
STOP_PATIENCE_S = 10.0
"""How long a process that was told to stop may take, before it is killed."""
LOADING_SILENCE_S = 60.0
"""From its start on a process loads its model; one that was stopped meanwhile, or hangs before it begins, is ended."""
LAST_WORDS_S = 0.2
"""What a process sent at its very end may still be on its way through the socket so long after its exit."""


class EngineProcess:
    """A process that runs an engine, and what is said to it and by it.

    The sockets are new for each process, so nothing of one that died is ever taken for its successor's.

    Args:
        child: the process.
        wires: to it.
        last_words_s: so long after its exit is listened; nothing is lost without where others make what it made.
    """

    def __init__(self, child: Child, wires: Wires, last_words_s: float) -> None:
        self._child = child
        self._last_words_s = last_words_s
        self._context: zmq.Context[Any] = zmq.Context()
        # Sending never blocks: the sockets queue from the first moment on, whether or not the other process is there.
        self._commands, self._reports = wires.ends(self._context)
        self._exit = asyncio.create_task(child.ending())
        self._something: asyncio.Future[None] | None = None
        """Whoever waits for a report, or for the end."""
        # Watched by hand: the binding's own futures cost a step as much as three of its tokens. Read until nothing is
        # left whenever it becomes readable, which it does not again for what was there before.
        loop = asyncio.get_running_loop()
        self._readable: list[int] = [self._reports.getsockopt(zmq.FD)]
        loop.add_reader(self._readable[0], self._wake)
        self._monitors: list[Any] = []
        if wires.break_for_good:
            for socket in (self._commands, self._reports):
                monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
                self._monitors.append(monitor)
                self._readable.append(monitor.getsockopt(zmq.FD))
                loop.add_reader(self._readable[-1], self._look, monitor)
        self._exit.add_done_callback(self._wake)

    @classmethod
    async def spawn(
        cls,
        start: StartEngine,
        command: Sequence[str] = COMMAND,
        *,
        forks: ForkServer | None = None,
        last_words_s: float = LAST_WORDS_S,
    ) -> EngineProcess:
        """Start a child of this process and send it its first message; its reports tell how that goes.

        Args:
            start: what it loads.
            command: starts it.
            forks: it is forked from this one's process instead.
            last_words_s: see EngineProcess.

        Raises:
            SetupError: it could not be forked.
        """
        child: LocalChild | ForkedChild
        if forks is None:
            child = take_early(command) or LocalChild(command).adopt()
        else:
            child = await forks.fork(Path(tempfile.mkdtemp(prefix="twostroke-")))  # for this user only
        process = cls(child, FolderWires(child.folder), last_words_s)
        process.send(start)
        return process

    @property
    def pid(self) -> int:
        """Of the child."""
        return self._child.pid

    def send(self, command: Command) -> None:
        """Queues a command; one that nobody is left to read is lost."""
        with contextlib.suppress(zmq.Again):
            self._commands.send(encode_message(command), zmq.NOBLOCK)

    async def receive(self) -> Report | None:
        """The next report; None when the child has exited and everything it said was read."""
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
                self._something = asyncio.get_running_loop().create_future()
                await self._something

    async def first_report(self, silence_s: float) -> Report | None:
        """What it says when its model is loaded; until then it says that it lives, from when it knows what to load.

        Args:
            silence_s: one that says nothing for so long is killed, and counts as one that refuses.
        """
        while True:
            try:
                report = await asyncio.wait_for(self.receive(), silence_s)
            except TimeoutError:
                self.kill()
                return Refused(f"it said nothing for {silence_s:g} s while it was loaded.")
            if not isinstance(report, Alive):
                return report

    def _wake(self, *_: object) -> None:
        if self._something is not None and not self._something.done():
            self._something.set_result(None)
        elif not self._reports.closed:
            # Nobody waits: without a look the descriptor stays readable, and the loop would come here again and again.
            # Whoever waits next tries the socket first.
            self._reports.getsockopt(zmq.EVENTS)

    def _look(self, monitor: Any) -> None:
        """A connection of these is never made again: who is not heard through it is not heard at all."""
        with contextlib.suppress(zmq.Again):
            monitor.recv_multipart(zmq.NOBLOCK)
            self.kill()

    async def ending(self) -> str:
        """How it ended, in words; waits until it has."""
        return await self._exit

    def kill(self) -> None:
        """Ends the child at once, also one that was stopped."""
        if not self._exit.done():
            self._child.kill()

    async def stop(self) -> None:
        """Ends the child, kindly first, and removes the sockets. A second time does nothing."""
        if not self._exit.done():
            self.send(Stop())
            try:
                await asyncio.wait_for(asyncio.shield(self._exit), STOP_PATIENCE_S)
            except TimeoutError:
                self._child.kill()
                await self._exit
        if not self._reports.closed:  # afterwards the number may be that of another's descriptor
            for descriptor in self._readable:
                asyncio.get_running_loop().remove_reader(descriptor)
        for monitor in self._monitors:
            monitor.close()
        self._commands.close()
        self._reports.close()
        self._context.term()  # each has a thread of its own: a server that starts engines again must not collect them
        self._child.forget()
