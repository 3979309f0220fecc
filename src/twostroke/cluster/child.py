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
    """A child of this process; see Child. Its standard input is a pipe that is held here, so it ends when this does.

    Args:
        command: starts it, with the folder behind it.
        folder: of what it needs, which is removed at its end; None: a new one, for this user only.
        descriptors: that it inherits.
    """

    def __init__(self, command: Sequence[str], folder: Path | None = None, descriptors: Sequence[int] = ()) -> None:
        self.command = tuple(command)
        self.folder = folder or Path(tempfile.mkdtemp(prefix="twostroke-"))
        """Holds what it needs: its sockets."""
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
        """See Child."""
        return self._process.pid

    def adopt(self) -> LocalChild:
        """Watch it from the running event loop, and return it."""
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
        return self

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


# ------------------------------------------------------------------ a process that starts early

waiting: list[LocalChild] = []
"""The engine process that was started early, if any: at most one."""


def start_early(command: Sequence[str]) -> None:
    """Start an engine process before it is known what it will run: its imports take longer than anything else.

    It imports what it needs beside the command's own imports, and then waits for its first command like any other.
    Where the system allows none, whoever needs it will say so.
    """
    if waiting:
        return
    with contextlib.suppress(OSError):
        waiting.append(LocalChild(command))
        atexit.register(drop_early)


def take_early(command: Sequence[str]) -> LocalChild | None:
    """Return the process that was started by this command, watched from the running event loop; None: there is none."""
    if not waiting or waiting[0].command != tuple(command):
        return None
    return waiting.pop().adopt()


def drop_early() -> None:
    """End the process if nobody has taken it."""
    while waiting:
        child = waiting.pop()
        child.kill()
        child.forget()
