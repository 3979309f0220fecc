"""The gateway's side of the fork server: requests children, and watches them like any others."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import msgspec

from twostroke.child_command import child_command
from twostroke.cluster.child import ending_words, kill_group
from twostroke.errors import SetupError

SERVER = child_command("twostroke.cluster.fork_server")
EXIT_REPORT_TIMEOUT_S = 1.0
"""Seconds to wait for the server's report of how a child ended; the server, as its parent, knows at once."""
FORK_TIMEOUT_S = 60.0
"""Seconds for a fork; the server first imports everything."""
LARGEST_REPLY = 1 << 12


class ForkRequest(msgspec.Struct, frozen=True, array_like=True):
    """Request for a child; its standard input is passed along."""

    folder: str
    """Folder of its sockets; empty: no more requests, and running children continue."""


class ForkReply(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Report of a new child, passed with a pidfd that identifies it for certain."""

    pid: int


class ForkFailed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Report that the system refused to fork."""

    reason: str


class ChildEnded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Report that a child has ended."""

    pid: int
    code: int
    """Exit code as in subprocess: negative for a signal."""


FORKS = msgspec.msgpack.Decoder(ForkRequest)
FORK_REPLIES = msgspec.msgpack.Encoder()
_REPLIES: msgspec.msgpack.Decoder[ForkReply | ForkFailed | ChildEnded] = msgspec.msgpack.Decoder(
    ForkReply | ForkFailed | ChildEnded
)


def can_fork() -> bool:
    """Return whether this system supports the fork server: Linux does."""
    return sys.platform == "linux" and hasattr(os, "pidfd_open") and hasattr(signal, "pidfd_send_signal")


class ForkedChild:
    """A child of the fork server. This process holds a pipe to its standard input, so the child ends when this process
    does."""

    def __init__(self, pid: int, descriptor: int, pipe: int, folder: Path) -> None:
        self._pid = pid
        self._descriptor = descriptor
        self._pipe = pipe
        self.folder = folder
        """Folder of its sockets."""
        loop = asyncio.get_running_loop()
        self._ending: asyncio.Future[str] = loop.create_future()
        loop.add_reader(descriptor, self._has_ended)

    @property
    def pid(self) -> int:
        return self._pid

    async def ending(self) -> str:
        return await asyncio.shield(self._ending)

    def kill(self) -> None:
        if not self._ending.done():
            kill_group(self._pid)
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def forget(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def ended(self, how: str) -> None:
        """Record that the child exited, and release its pipe and pidfd."""
        if not self._ending.done():
            self._ending.set_result(how)
            asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._descriptor)
            os.close(self._pipe)

    def _has_ended(self) -> None:
        """Handle the end of the child; wait only a moment for the server, which may be gone, to report how it ended."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._descriptor)
        loop.call_later(EXIT_REPORT_TIMEOUT_S, self.ended, "has ended")


@dataclass(frozen=True, slots=True)
class _PendingFork:
    """A child that was requested and does not exist yet."""

    folder: Path
    pipe: int
    """Writing end of its standard input."""
    child: asyncio.Future[ForkedChild]


class ForkServer:
    """A process that children are forked from. It starts with the first child, and again after it dies. `close` it."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._control: socket.socket | None = None
        self._starts = asyncio.Lock()
        self._asked: deque[_PendingFork] = deque()
        """Requests without a reply, in order."""
        self._children: dict[int, ForkedChild] = {}

    @property
    def pid(self) -> int:
        """Process id of the server; it starts with the first child."""
        assert self._process is not None, "not started"
        return self._process.pid

    async def fork(self, folder: Path) -> ForkedChild:
        """Fork a child that owns a folder, which is removed with it.

        Raises:
            SetupError: the fork failed.
        """
        reading, writing = os.pipe()
        try:
            async with self._starts:
                control = self._control or await self._start()
            socket.send_fds(control, [msgspec.msgpack.encode(ForkRequest(str(folder)))], [reading])
        except BaseException as error:
            os.close(writing)
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, OSError):
                raise SetupError(f"no process could be forked ({error}).") from None
            raise
        finally:
            os.close(reading)
        asked = _PendingFork(folder, writing, asyncio.get_running_loop().create_future())
        self._asked.append(asked)
        in_time = asyncio.get_running_loop().call_later(FORK_TIMEOUT_S, self._end_server)
        try:
            return await asked.child
        finally:
            in_time.cancel()

    async def close(self) -> None:
        """Stop forking; running children continue."""
        if self._control is not None:
            with contextlib.suppress(OSError):
                self._control.send(msgspec.msgpack.encode(ForkRequest("")))
        self._disconnect()
        if self._process is not None:
            await self._process.wait()

    def _end_server(self) -> None:
        """Kill a server that hangs; waiting requests fail, and the next request starts another server."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *SERVER,
                str(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sys.stderr,
                start_new_session=True,  # Ctrl-C must not end it
                pass_fds=[theirs.fileno()],
            )
        ours.setblocking(False)
        self._control = ours
        asyncio.get_running_loop().add_reader(ours, self._read)
        return ours

    def _read(self) -> None:
        while self._control is not None:
            try:
                reply, descriptors, _, _ = socket.recv_fds(self._control, LARGEST_REPLY, 1)
            except BlockingIOError:
                return
            except OSError:
                reply, descriptors = b"", []
            if not reply:
                self._disconnect()
                return
            self._take(_REPLIES.decode(reply), descriptors)

    def _take(self, reply: ForkReply | ForkFailed | ChildEnded, descriptors: list[int]) -> None:
        match reply:
            case ForkReply(pid):
                asked = self._asked.popleft()
                child = self._children[pid] = ForkedChild(pid, descriptors[0], asked.pipe, asked.folder)
                if asked.child.cancelled():
                    child.kill()
                    child.forget()
                else:
                    asked.child.set_result(child)
            case ForkFailed(reason):
                self._refuse(self._asked.popleft(), reason)
            case ChildEnded(pid, code):
                child = self._children.pop(pid, None)
                if child is not None:
                    child.ended(ending_words(code))

    def _disconnect(self) -> None:
        """Close the connection, which ends the server, and refuse all waiting requests."""
        if self._control is None:
            return
        asyncio.get_running_loop().remove_reader(self._control)
        self._control.close()
        self._control = None
        while self._asked:
            self._refuse(self._asked.popleft(), "the fork server has ended")
        self._children.clear()

    @staticmethod
    def _refuse(asked: _PendingFork, reason: str) -> None:
        os.close(asked.pipe)
        shutil.rmtree(asked.folder, ignore_errors=True)
        if not asked.child.done():
            asked.child.set_exception(SetupError(f"no process could be forked ({reason})."))
