"""A process that runs an engine, as whoever started it sees it."""

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
    """How a process ended.

    >>> ending_words(1), ending_words(-9)
    ('exited with code 1', 'was ended by signal 9')
    """
    return f"was ended by signal {-code}" if code < 0 else f"exited with code {code}"


class Child(Protocol):
    """A process that runs an engine, here or on another machine, and how it ends."""

    @property
    def pid(self) -> int:
        """On its machine."""
        ...

    async def ending(self) -> str:
        """How it ended, in words; waits until it has."""
        ...

    def kill(self) -> None:
        """Ends it at once, also one that was stopped; who waits for its end does so for a moment only."""
        ...

    def forget(self) -> None:
        """It has ended: what was kept for it goes."""
        ...


def kill_group(pid: int) -> None:
    """Kills whoever a child has started in its session, its ranks, also those that are stopped; and itself."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def kill_child(pid: int) -> None:
    """Kills a child and whoever it has started in its session, also those that are stopped."""
    kill_group(pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


class LocalChild:
    """A child of this process. Its standard input is a pipe that is held here: when this process ends, it ends too."""

    def __init__(self, process: asyncio.subprocess.Process, folder: Path) -> None:
        self._process = process
        self._folder = folder

    @classmethod
    async def start(cls, command: Sequence[str], folder: Path, descriptors: Sequence[int] = ()) -> LocalChild:
        """Starts one.

        Args:
            command: starts it, with the folder behind it.
            folder: of what it needs; it is removed at its end.
            descriptors: that it inherits.
        """
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                str(folder),
                stdin=asyncio.subprocess.PIPE,
                stdout=sys.stderr,
                start_new_session=True,  # a Ctrl-C is for the HTTP process, which lets running requests end
                pass_fds=descriptors,
            )
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return cls(process, folder)

    @property
    def pid(self) -> int:
        """See Child."""
        return self._process.pid

    async def ending(self) -> str:
        """See Child."""
        return ending_words(await self._process.wait())

    def kill(self) -> None:
        """See Child."""
        if self._process.returncode is None:
            kill_group(self._process.pid)
            self._process.kill()

    def forget(self) -> None:
        """See Child."""
        shutil.rmtree(self._folder, ignore_errors=True)


# ------------------------------------------------------------------ a process that starts early


class EarlyChild:
    """See Child; its standard input is a pipe that is held here, so it ends when this process does."""

    def __init__(self, command: Sequence[str]) -> None:
        self.command = tuple(command)
        self.folder = Path(tempfile.mkdtemp(prefix="twostroke-"))  # for this user only
        """Holds its sockets."""
        try:
            self._process = subprocess.Popen(
                (*command, str(self.folder)),
                stdin=subprocess.PIPE,
                stdout=sys.stderr,
                start_new_session=True,  # as LocalChild's
            )
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        self._ending: asyncio.Future[str] | None = None

    @property
    def pid(self) -> int:
        """See Child."""
        return self._process.pid

    def adopt(self) -> None:
        """Watch it from the running event loop."""
        loop = asyncio.get_running_loop()
        self._ending = ending = loop.create_future()

        def tell(how: str) -> None:
            if not ending.done():
                ending.set_result(how)

        def wait() -> None:
            how = ending_words(self._process.wait())
            with contextlib.suppress(RuntimeError):  # a loop that is closed hears nothing any more
                loop.call_soon_threadsafe(tell, how)

        threading.Thread(target=wait, daemon=True, name="twostroke-child").start()

    async def ending(self) -> str:
        """See Child."""
        assert self._ending is not None, "nobody has adopted it"
        return await asyncio.shield(self._ending)

    def kill(self) -> None:
        """See Child."""
        if self._process.returncode is None:
            kill_child(self._process.pid)

    def forget(self) -> None:
        """See Child."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


waiting: list[EarlyChild] = []
"""At most one."""


def start_early(command: Sequence[str]) -> None:
    """Start a process; where the system allows none, whoever needs it will say so."""
    if waiting:
        return
    with contextlib.suppress(OSError):
        waiting.append(EarlyChild(command))
        atexit.register(drop_early)


def take_early(command: Sequence[str]) -> EarlyChild | None:
    """Return the process that was started by this command, watched from the running event loop; None: there is none."""
    if not waiting or waiting[0].command != tuple(command):
        return None
    child = waiting.pop()
    child.adopt()
    return child


def drop_early() -> None:
    """End the process if nobody has taken it."""
    while waiting:
        child = waiting.pop()
        child.kill()
        child.forget()
