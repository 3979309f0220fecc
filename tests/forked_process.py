"""Commands and engines in processes of their own, without the seconds of their imports (fork_parent.py forks them)."""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, Literal

import pytest

from twostroke.cluster import child as early_child
from twostroke.cluster import engine_process, forking

Program = Literal["twostroke", "engine", "fork server"]


class ForkedProcess:
    """A process that runs a command of `twostroke`, or an engine; used as `subprocess.Popen` is.

    Args:
        arguments: of the command, or the folder of an engine's sockets.
        program: what it runs.
        stdin: `subprocess.PIPE`, `subprocess.DEVNULL` or a descriptor.
        stdout: a descriptor.
        stderr: `subprocess.PIPE` or a descriptor.
        control: descriptor of a fork server's socket.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        program: Program = "twostroke",
        stdin: int = subprocess.DEVNULL,
        stdout: int = 1,
        stderr: int = 2,
        control: int | None = None,
    ) -> None:
        self.args = list(arguments)
        self.returncode: int | None = None
        self.stdin: IO[bytes] | None = None
        self.stderr: IO[str] | None = None
        self._lock = threading.Lock()
        passed: list[int] = []
        if stdin == subprocess.PIPE:
            stdin, writing = os.pipe()
            passed.append(stdin)
            self.stdin = open(writing, "wb")  # noqa: SIM115 (its owner closes it)
        elif stdin == subprocess.DEVNULL:
            stdin = os.open(os.devnull, os.O_RDONLY)
            passed.append(stdin)
        if stderr == subprocess.PIPE:
            reading, stderr = os.pipe()
            passed.append(stderr)
            self.stderr = open(reading)  # noqa: SIM115
        report, told = os.pipe()
        passed.append(told)
        more = [] if control is None else [control]
        environment = dict(os.environ)  # noqa: TID251 (a new process has it, too)
        asked = {"program": program, "arguments": self.args, "cwd": os.getcwd(), "environment": environment}
        with tempfile.TemporaryFile() as message:
            message.write(json.dumps(asked).encode())
            message.seek(0)
            socket.send_fds(_parent(), [b"fork"], [message.fileno(), told, stdin, stdout, stderr, *more])
        for descriptor in passed:
            os.close(descriptor)
        self._report = open(report)  # noqa: SIM115
        self.pid = int(self._report.readline())

    def poll(self) -> int | None:
        """Return the exit code; None while the process runs."""
        if self._lock.acquire(blocking=False):
            try:
                self._look(0)
            finally:
                self._lock.release()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code when the process has ended; negative for a signal.

        Args:
            timeout: in seconds.

        Raises:
            subprocess.TimeoutExpired: it has not ended in time.
        """
        with self._lock:
            self._look(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal if the process runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once if it runs."""
        self.send_signal(signal.SIGKILL)

    def _look(self, timeout_s: float | None) -> None:
        """Wait for the end, and read how it was."""
        if self.returncode is not None:
            return
        ended = select.poll()  # `select.select` takes no descriptor from 1,024 on
        ended.register(self._report, select.POLLIN)
        if ended.poll(None if timeout_s is None else timeout_s * 1000):
            self.returncode = int(self._report.readline())
            self._report.close()


@contextmanager
def forked_engines() -> Iterator[None]:
    """Have the engines of this process, and their pools, fork what they would start in a Python of its own."""
    start = asyncio.create_subprocess_exec

    def popen(command: tuple[str, ...], **more: Any) -> Any:
        if command[:-1] != engine_process.COMMAND:
            return subprocess.Popen(command, **more)
        return ForkedProcess(command[-1:], program="engine", stdin=subprocess.PIPE, stdout=2)

    async def start_or_fork(*command: str, **more: Any) -> Any:
        if command[:-1] != forking.SERVER:
            return await start(*command, **more)
        return _Awaited(ForkedProcess([], program="fork server", stdout=2, control=int(command[-1])))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(early_child, "subprocess", SimpleNamespace(Popen=popen, PIPE=subprocess.PIPE))
        patch.setattr(asyncio, "create_subprocess_exec", start_or_fork)
        yield


class _Awaited:
    """A forked process, as ForkServer uses `asyncio.subprocess.Process`."""

    def __init__(self, process: ForkedProcess) -> None:
        self._process = process
        self.pid = process.pid
        self.kill = process.kill

    async def wait(self) -> int:
        """Return the exit code when the process has ended."""
        return await asyncio.to_thread(self._process.wait)


@cache
def _parent() -> socket.socket:
    """Start the process that forks, once, and return its socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("fork_parent.py")), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
        )

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours
