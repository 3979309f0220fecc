"""A process that runs an engine, as its parent sees it."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol


def ending_words(code: int) -> str:
    """Return how a process ended, in words.

    >>> ending_words(1), ending_words(-9)
    ('exited with code 1', 'was ended by signal 9')
    """
    return f"was ended by signal {-code}" if code < 0 else f"exited with code {code}"


class Child(Protocol):
    """A process that runs an engine, on this or another machine."""

    @property
    def pid(self) -> int:
        """Process id on its machine."""
        ...

    async def ending(self) -> str:
        """Wait for the process to end; return how it ended, in words."""
        ...

    def kill(self) -> None:
        """Kill the process, even if it is stopped; it ends shortly after."""
        ...

    def forget(self) -> None:
        """Release what is kept for a process that has ended."""
        ...


def kill_group(pid: int) -> None:
    """Kill a child and the processes of its session (its ranks), even if they are stopped."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def kill_child(pid: int) -> None:
    """Kill a child and all processes it has started in its session, even if they are stopped."""
    kill_group(pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


class LocalChild:
    """A child of this process. This process holds a pipe to its standard input, so the child ends when this process
    does.

    Args:
        command: command line, to which the folder is appended.
        folder: folder of its sockets, removed at its end; None: a new one, for this user only.
        descriptors: file descriptors that it inherits.
    """

    def __init__(self, command: Sequence[str], folder: Path | None = None, descriptors: Sequence[int] = ()) -> None:
        self.command = tuple(command)
        self.folder = folder or Path(tempfile.mkdtemp(prefix="twostroke-"))
        """Folder of its sockets."""
        try:
            self._process = subprocess.Popen(
                (*command, str(self.folder)),
                stdin=subprocess.PIPE,
                stdout=sys.stderr,
                start_new_session=True,  # a Ctrl-C is for the HTTP process, which lets running requests end
                pass_fds=descriptors,
            )
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        self._ending: asyncio.Future[str] | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    def adopt(self) -> LocalChild:
        """Watch the process from the running event loop, and return this object."""
        loop = asyncio.get_running_loop()
        self._ending = ending = loop.create_future()

        def tell(how: str) -> None:
            if not ending.done():
                ending.set_result(how)

        def wait() -> None:
            how = ending_words(self._process.wait())
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(tell, how)

        threading.Thread(target=wait, daemon=True, name="twostroke-child").start()
        return self

    async def ending(self) -> str:
        assert self._ending is not None, "nobody has adopted it"
        return await asyncio.shield(self._ending)

    def kill(self) -> None:
        if self._process.returncode is None:
            kill_child(self._process.pid)

    def forget(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


# ------------------------------------------------------------------ a process that starts early

waiting: list[LocalChild] = []
"""The engine process that was started early, if any: at most one."""


def start_early(command: Sequence[str]) -> None:
    """Start an engine process before its configuration is known, because its imports take longest.

    It imports what it needs while the command does the same, and then waits for its first command like any other. If it
    cannot be started, the later start reports the error.
    """
    if waiting:
        return
    with contextlib.suppress(OSError):
        waiting.append(LocalChild(command))
        atexit.register(drop_early)


def take_early(command: Sequence[str]) -> LocalChild | None:
    """Return the process that was started early by this command, watched from the running event loop; None: there is
    none."""
    if not waiting or waiting[0].command != tuple(command):
        return None
    return waiting.pop().adopt()


def drop_early() -> None:
    """End the early process if it is unused."""
    while waiting:
        child = waiting.pop()
        child.kill()
        child.forget()
