"""The process that the engines of a pool are forked from: `python -m twostroke.cluster.fork_server DESCRIPTOR`.

It has imported what an engine needs, which takes seconds of a processor, and does nothing else: no model, no thread of
its own, no socket but the one to the gateway. So a worker that takes the place of a dead one is there before those who
took over its streams have caught up, and takes no processor away from them (docs/decisions/025-a-fork-server.md).
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import sys
from collections.abc import Iterable

from twostroke.cluster import process
from twostroke.cluster.child import kill_child
from twostroke.cluster.forking import FORK_REPLIES, FORKS, ChildEnded, Forked, ForkFailed

LARGEST_QUESTION = 1 << 16


def fork_on_demand(control: socket.socket) -> str | None:
    """Forks whenever it is asked to, and says when a child has ended.

    When the other side is gone without a word it has died: its children are killed, as those that are stopped would
    not notice.

    Returns:
        In each child, the folder of what it needs; in the server, None when the other side is gone.
    """
    children: dict[int, int] = {}  # pids by their descriptors
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor != control.fileno():
                poll.unregister(descriptor)
                if not _tell(control, _ended(descriptor, children.pop(descriptor))):
                    return _leave(control, children.values())
                continue
            folder, descriptors = _asked_for(control, children.values())
            if not folder:
                return None
            try:
                pid = os.fork()
            except OSError as error:
                os.close(descriptors[0])
                if not _tell(control, ForkFailed(str(error))):
                    return _leave(control, children.values())
                continue
            if pid == 0:
                _leave_home(control, descriptors[0])
                return folder
            os.close(descriptors[0])
            child = os.pidfd_open(pid)
            children[child] = pid
            poll.register(child, select.POLLIN)
            if not _tell(control, Forked(pid), child):
                return _leave(control, children.values())


def _asked_for(control: socket.socket, children: Iterable[int]) -> tuple[str, list[int]]:
    """The folder of one more child, and the descriptor that comes with it; no folder: nobody asks any more."""
    with contextlib.suppress(ConnectionResetError):
        question, descriptors, _, _ = socket.recv_fds(control, LARGEST_QUESTION, 1)
        if question:
            return FORKS.decode(question).folder, descriptors
    for pid in children:
        kill_child(pid)
    return "", []


def _leave(control: socket.socket, children: Iterable[int]) -> None:
    """Nobody hears any more; what was said before tells why."""
    while _asked_for(control, children)[0]:
        pass


def _ended(descriptor: int, pid: int) -> ChildEnded:
    """How a child has ended."""
    os.close(descriptor)
    _, status = os.waitpid(pid, 0)
    return ChildEnded(pid, os.waitstatus_to_exitcode(status))


def _tell(control: socket.socket, reply: Forked | ForkFailed | ChildEnded, *descriptors: int) -> bool:
    """Whether somebody was there to hear it."""
    try:
        socket.send_fds(control, [FORK_REPLIES.encode(reply)], descriptors)
    except OSError:
        return False
    return True


def _leave_home(control: socket.socket, standard_input: int) -> None:
    """In a child: nothing of the server stays open, and it is no part of its session."""
    os.setsid()
    os.dup2(standard_input, 0)
    control.detach()  # or its end would close whatever has its number then
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))


def main() -> None:
    """The process's entry."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()  # what is never looked at is never written to, and stays one copy for all
    folder = fork_on_demand(socket.socket(fileno=int(sys.argv[1])))
    if folder is not None:
        process.main(folder=folder)


if __name__ == "__main__":
    main()
