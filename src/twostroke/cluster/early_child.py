"""An engine process that starts before it is known what it will run, since its imports take longer than anything else.

A command that is going to need an engine calls `start_early` first of all. The process imports what it needs beside the
command's own imports, and then waits for its first command like any other. `take_early` gives it to who asks first.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from twostroke.cluster.child import ending_words, kill_child


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
