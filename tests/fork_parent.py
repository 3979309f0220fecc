"""The process that tests fork commands from: `python tests/fork_parent.py DESCRIPTOR`.

It has imported what the command line, a server and an engine need, and measured the machine, which takes seconds of a
processor. It does nothing else. Each message on its socket asks for one process (forked_process.py sends them), and it
ends when the socket closes.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
import uvloop  # noqa: F401 (what a server imports when it starts)

from twostroke.cli.main import has_early_engine
from twostroke.cli.main import main as run_command
from twostroke.cluster import child as early_child
from twostroke.cluster import fork_server, process
from twostroke.kernels.dispatch import operators_for
from twostroke.parent_death import signal_at_parent_death
from twostroke.runner.machine_limits import measure_machine_limits

LARGEST_MESSAGE = 1 << 16
MOST_DESCRIPTORS = 6
STREAMS = 3
INTERRUPT = signal.getsignal(signal.SIGINT)
"""Python's own handler of Ctrl-C, for the processes that are forked."""


def fork_on_demand(control: socket.socket) -> Callable[[], None] | None:
    """Fork a process for each message.

    Returns:
        In a forked process, what it is to run; in this one, None, when the socket is closed.
    """
    keepers: list[int] = []
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, LARGEST_MESSAGE, MOST_DESCRIPTORS)
        keepers = [pid for pid in keepers if os.waitpid(pid, os.WNOHANG)[0] == 0]
        if not message:
            return None
        keeper = os.fork()
        if keeper == 0:
            control.close()
            return _fork_kept(*descriptors)
        keepers.append(keeper)
        for descriptor in descriptors:
            os.close(descriptor)


def _fork_kept(message: int, report: int, *given: int) -> Callable[[], None]:
    """Fork the process that is asked for, tell its id and its exit code, and end.

    Args:
        message: descriptor of a file that says what is asked for, as JSON.
        report: descriptor that its id and its exit code are written to, a line each.
        given: the process's own descriptors, numbered from 0.

    Returns:
        In the forked process alone: what it is to run.
    """
    child = os.fork()
    if child:
        os.closerange(3, report)
        os.closerange(report + 1, os.sysconf("SC_OPEN_MAX"))
        os.write(report, f"{child}\n".encode())
        _, status = os.waitpid(child, 0)
        with contextlib.suppress(BrokenPipeError):  # the reader has gone
            os.write(report, f"{os.waitstatus_to_exitcode(status)}\n".encode())
        os._exit(0)
    with open(message) as file:
        asked: dict[str, Any] = json.load(file)
    _take_descriptors(given)
    os.chdir(asked["cwd"])
    os.environ.clear()  # noqa: TID251 (a new process inherits the environment of its parent)
    os.environ.update(asked["environment"])  # noqa: TID251
    signal.signal(signal.SIGINT, INTERRUPT)
    arguments: list[str] = asked["arguments"]
    if asked["program"] != "twostroke":
        os.setsid()
    if asked["program"] == "engine":
        return lambda: _run_engine(*arguments)
    if asked["program"] == "fork server":
        signal_at_parent_death(signal.SIGCONT)
        sys.argv = [fork_server.__file__, str(STREAMS)]
        return fork_server.main
    sys.argv = ["twostroke", *arguments]
    return _run_server if has_early_engine(arguments) else run_command


def _take_descriptors(descriptors: Sequence[int]) -> None:
    """Number this process's descriptors anew from 0, the standard streams first, and close all others."""
    above = max(descriptors) + len(descriptors)  # where none of them is written over
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, above + number)
    for number in range(len(descriptors)):
        os.dup2(above + number, number)
    os.closerange(len(descriptors), os.sysconf("SC_OPEN_MAX"))
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 (for as long as the process runs)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, errors="backslashreplace", buffering=1)  # noqa: SIM115


def _run_engine(folder: str) -> None:
    """Run an engine's process, as twostroke.child does."""
    signal_at_parent_death(signal.SIGCONT)
    gc.disable()
    sys.argv = [process.__file__, folder]
    process.main()


def _run_server() -> None:
    """Run a server. Its engine's process is forked, too: here, before anything of the server is there."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        os.setsid()
        ours.close()
        folder, streams, _, _ = socket.recv_fds(theirs, LARGEST_MESSAGE, STREAMS)
        if not folder:  # the server has ended before it wanted an engine
            os._exit(0)
        theirs.detach()
        _take_descriptors(streams)
        _run_engine(folder.decode())
        return
    theirs.close()

    def popen(command: tuple[str, ...], **_: object) -> _EarlyEngine:
        early_child.subprocess = subprocess  # one was forked; the others start normally
        return _EarlyEngine(pid, ours, command[-1])

    early_child.subprocess = cast(Any, SimpleNamespace(Popen=popen, PIPE=subprocess.PIPE))
    run_command()


class _EarlyEngine:
    """The forked process of an engine, as LocalChild uses `subprocess.Popen`.

    Args:
        pid: of a child that waits for its folder and its streams.
        control: where it waits.
        folder: of its sockets.
    """

    def __init__(self, pid: int, control: socket.socket, folder: str) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._lock = threading.Lock()
        reading, writing = os.pipe()
        with control:
            socket.send_fds(control, [folder.encode()], [reading, 2, 2])
        os.close(reading)
        self.stdin = open(writing, "wb")  # noqa: SIM115 (its owner closes it)

    def wait(self) -> int:
        """Return the exit code when the process has ended; negative for a signal."""
        with self._lock:
            if self.returncode is None:
                self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            return self.returncode


def main() -> None:
    """Run the fork server's process."""
    del sys.path[0]  # the tests' folder, where no command of ours looks for modules
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for dtype in (torch.bfloat16, torch.float32):  # every engine measures them, once per process
        read = operators_for(torch.device("cpu"), dtype).read_stream
        measure_machine_limits(dtype, torch.device("cpu"), 1, read=read)
    gc.freeze()  # what a child does not look through at its end need not be copied for it
    program = fork_on_demand(socket.socket(fileno=int(sys.argv[1])))
    if program is not None:
        program()


if __name__ == "__main__":
    main()
