"""The process that the engines of a pool are forked from: `python -m twostroke.engine.fork_server DESCRIPTOR`.

It has imported what an engine needs, which takes seconds of a processor, and does nothing else: no model, no thread of
its own, no socket but the one to the gateway. So a worker that takes the place of a dead one is there before those who
took over its streams have caught up, and takes no processor away from them (docs/decisions/025-a-fork-server.md).
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import sys

from twostroke.engine import process
from twostroke.engine.forking import FORK_REPLIES, FORKS, Ended, Forked, ForkFailed

LARGEST_QUESTION = 1 << 16


def fork_on_demand(control: socket.socket) -> str | None:
    """Forks whenever it is asked to, and says when a child has ended.

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
                pid = children.pop(descriptor)
                os.close(descriptor)
                _, status = os.waitpid(pid, 0)
                if not _tell(control, Ended(pid, os.waitstatus_to_exitcode(status))):
                    return None
                continue
            question, descriptors, _, _ = socket.recv_fds(control, LARGEST_QUESTION, 1)
            if not question:
                return None
            folder = FORKS.decode(question).folder
            try:
                pid = os.fork()
            except OSError as error:
                os.close(descriptors[0])
                if not _tell(control, ForkFailed(str(error))):
                    return None
                continue
            if pid == 0:
                _leave_home(control, descriptors[0])
                return folder
            os.close(descriptors[0])
            child = os.pidfd_open(pid)
            children[child] = pid
            poll.register(child, select.POLLIN)
            if not _tell(control, Forked(pid), child):
                return None


def _tell(control: socket.socket, reply: Forked | ForkFailed | Ended, *descriptors: int) -> bool:
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
