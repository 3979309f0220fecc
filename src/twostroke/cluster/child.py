"""A process that runs an engine, as whoever started it sees it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
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
