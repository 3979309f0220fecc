"""The process that a pool's engines are forked from: `python -m twostroke.cluster.fork_server DESCRIPTOR`.

It has imported what an engine needs, which takes seconds of CPU time, and holds nothing else: no model, no thread, and
no socket but the one to the gateway. So a replacement for a dead worker starts before the workers that resumed its
streams have caught up, and takes no CPU time from them (docs/decisions/025-a-fork-server.md).
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
from twostroke.cluster.forking import FORK_REPLIES, FORKS, ChildEnded, ForkFailed, ForkReply

LARGEST_QUESTION = 1 << 16


def fork_on_demand(control: socket.socket) -> str | None:
    """Fork a child for each request, and report when a child has ended.

    If the other side closes the connection without a last message, it has died. Then all children are killed, because a
    stopped child would not notice.

    Returns:
        In each child, the folder of its sockets; in the server, None when the other side is gone.
    """
    children: dict[int, int] = {}  # pids by pidfd
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor != control.fileno():
                poll.unregister(descriptor)
                if not _send_reply(control, _ended(descriptor, children.pop(descriptor))):
                    return _drain_requests(control, children.values())
                continue
            folder, descriptors = _receive_request(control, children.values())
            if not folder:
                return None
            try:
                pid = os.fork()
            except OSError as error:
                os.close(descriptors[0])
                if not _send_reply(control, ForkFailed(str(error))):
                    return _drain_requests(control, children.values())
                continue
            if pid == 0:
                _detach(control, descriptors[0])
                return folder
            os.close(descriptors[0])
            child = os.pidfd_open(pid)
            children[child] = pid
            poll.register(child, select.POLLIN)
            if not _send_reply(control, ForkReply(pid), child):
                return _drain_requests(control, children.values())


def _receive_request(control: socket.socket, children: Iterable[int]) -> tuple[str, list[int]]:
    """Receive a request: the folder and standard input of a new child; an empty folder: there will be no more
    requests."""
    with contextlib.suppress(ConnectionResetError):
        question, descriptors, _, _ = socket.recv_fds(control, LARGEST_QUESTION, 1)
        if question:
            return FORKS.decode(question).folder, descriptors
    for pid in children:
        kill_child(pid)
    return "", []


def _drain_requests(control: socket.socket, children: Iterable[int]) -> None:
    """Read the remaining requests after a reply could not be sent; they tell how the connection ended."""
    while _receive_request(control, children)[0]:
        pass


def _ended(descriptor: int, pid: int) -> ChildEnded:
    """Collect a child's exit status and return the report of it."""
    os.close(descriptor)
    _, status = os.waitpid(pid, 0)
    return ChildEnded(pid, os.waitstatus_to_exitcode(status))


def _send_reply(control: socket.socket, reply: ForkReply | ForkFailed | ChildEnded, *descriptors: int) -> bool:
    """Send a reply; return whether the other side still receives."""
    try:
        socket.send_fds(control, [FORK_REPLIES.encode(reply)], descriptors)
    except OSError:
        return False
    return True


def _detach(control: socket.socket, standard_input: int) -> None:
    """Detach a child from the server: close all inherited descriptors and start a new session."""
    os.setsid()
    os.dup2(standard_input, 0)
    control.detach()  # otherwise its destructor would close a later file with the same descriptor
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))


def main() -> None:
    """Run the fork server, and an engine in each child."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()  # objects that are not collected are not written to, so all children share their memory
    folder = fork_on_demand(socket.socket(fileno=int(sys.argv[1])))
    if folder is not None:
        process.main(folder=folder)


if __name__ == "__main__":
    main()
