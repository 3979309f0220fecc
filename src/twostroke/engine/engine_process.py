"""One engine process seen from the other side: its life from spawn to exit, and the two sockets."""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import zmq

from twostroke.config.engine import EngineConfig
from twostroke.engine.handover_port import HandoverPort
from twostroke.engine.messages import COMMANDS, REPORTS, Command, Report, Start, Stop, addresses, unbounded

COMMAND = (sys.executable, "-m", "twostroke.engine.process")
STOP_PATIENCE_S = 10.0
"""How long a process that was told to stop may take, before it is killed."""
LAST_WORDS_S = 0.2
"""What a process sent at its very end may still be on its way through the socket so long after its exit."""


class EngineProcess:
    """A child process that runs an engine.

    Its standard input is a pipe that this object holds: when this process ends, however it does, the child ends too.
    The sockets are new for each process, so nothing of one that died is ever taken for its successor's.
    """

    def __init__(self, child: asyncio.subprocess.Process, folder: Path, last_words_s: float) -> None:
        self._child = child
        self._last_words_s = last_words_s
        self._folder = folder
        to_engine, from_engine = addresses(folder)
        self._context = zmq.Context()
        # The sender is the end that connects, both ways: its queue is there at once and stays, whether or not the other
        # process is, so sending never blocks.
        self._commands = unbounded(self._context.socket(zmq.PUSH))
        self._commands.connect(to_engine)
        self._reports = unbounded(self._context.socket(zmq.PULL))
        self._reports.bind(from_engine)
        self._exit = asyncio.create_task(child.wait())
        self._something: asyncio.Future[None] | None = None
        """Whoever waits for a report, or for the end."""
        # Watched by hand: the binding's own futures cost a step as much as three of its tokens. Read until nothing is
        # left whenever it becomes readable, which it does not again for what was there before.
        self._readable: int = self._reports.getsockopt(zmq.FD)
        asyncio.get_running_loop().add_reader(self._readable, self._wake)
        self._exit.add_done_callback(self._wake)

    @classmethod
    async def spawn(
        cls,
        config: EngineConfig,
        command: Sequence[str] = COMMAND,
        handover: HandoverPort | None = None,
        last_words_s: float = LAST_WORDS_S,
    ) -> EngineProcess:
        """Starts a child that loads what the config says; its reports tell how that goes.

        Args:
            config: of the engine.
            command: starts it.
            handover: where its KV goes and comes from, in a pool.
            last_words_s: so long after its exit is listened; nothing is lost without where others make what it made.
        """
        folder = Path(tempfile.mkdtemp(prefix="twostroke-"))  # for this user only
        child = await asyncio.create_subprocess_exec(
            *command,
            str(folder),
            stdin=asyncio.subprocess.PIPE,
            stdout=sys.stderr,
            start_new_session=True,  # a Ctrl-C is for the HTTP process, which lets running requests end
        )
        process = cls(child, folder, last_words_s)
        process.send(Start(config, handover))
        return process

    @property
    def pid(self) -> int:
        """Of the child."""
        return self._child.pid

    def send(self, command: Command) -> None:
        """Queues a command; one that nobody is left to read is lost."""
        self._commands.send(COMMANDS.encode(command))

    async def receive(self) -> Report | None:
        """The next report; None when the child has exited and everything it said was read."""
        had_exited = False
        while True:
            try:
                return REPORTS.decode(self._reports.recv(zmq.NOBLOCK))
            except zmq.Again:
                if had_exited:
                    return None
            had_exited = self._exit.done()
            if had_exited:
                await asyncio.sleep(self._last_words_s)
            else:
                self._something = asyncio.get_running_loop().create_future()
                await self._something

    def _wake(self, *_: object) -> None:
        if self._something is not None and not self._something.done():
            self._something.set_result(None)

    async def ending(self) -> str:
        """How it ended, in words; waits until it has."""
        code = await self._exit
        return f"was ended by signal {-code}" if code < 0 else f"exited with code {code}"

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
            asyncio.get_running_loop().remove_reader(self._readable)
        self._commands.close()
        self._reports.close()
        self._context.term()  # each has a thread of its own: a server that starts engines again must not collect them
        shutil.rmtree(self._folder, ignore_errors=True)
