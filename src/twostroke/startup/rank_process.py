"""Process of a rank above 0: `python -m twostroke.startup.rank_process RANK SIZE ADDRESS`.

A rank ends when rank 0 tells it to, and when any other rank is gone.
"""

from __future__ import annotations

import argparse
import logging
import os
import select
import signal
import socket
import sys
import threading

import msgspec

from twostroke.communicator.rendezvous import is_path, join
from twostroke.config.path_codec import read_path
from twostroke.errors import RankLost, TwostrokeError
from twostroke.log import get_logger
from twostroke.parent_death import signal_at_parent_death
from twostroke.startup.ranks import RENDEZVOUS_TIMEOUT_S, RankStart, connect, on_device

log = get_logger(__name__)


def serve_rank(rank: int, size: int, address: str, *, exits_with_rank0: bool = False) -> None:
    """Run a rank above 0, from the rendezvous to its end.

    Args:
        rank: this rank, from 1.
        size: number of ranks, the same as rank 0's `tensor_parallel_size`.
        address: rank 0's `tensor_parallel_address`.
        exits_with_rank0: whether this process ends at once when rank 0 is gone, whatever it is doing.

    Raises:
        SetupError: rank 0 was not found, or this rank's share cannot be loaded.
        RankLost: another rank is gone.
    """
    sockets = join(address, rank, size, RENDEZVOUS_TIMEOUT_S)
    if exits_with_rank0:
        _exit_with_rank0(sockets[0])
    communicator = sockets_or_memory = connect(rank, sockets, shares_memory=is_path(address))
    try:
        start = msgspec.msgpack.decode(communicator.broadcast(None), type=RankStart, dec_hook=read_path)
        communicator = on_device(sockets_or_memory, start.config.load)
        # imported only now, so that a rank that finds no rank 0 fails at once
        from twostroke.startup.assembly import run_rank

        run_rank(start, communicator)
    finally:
        communicator.close()


def _exit_with_rank0(first: socket.socket) -> None:
    """End this process when rank 0 ends; while loading, it would not notice for minutes."""
    poll = select.poll()
    watched = first.dup()
    poll.register(watched, getattr(select, "POLLRDHUP", select.POLLHUP))

    def watch() -> None:
        poll.poll()
        watched.close()
        os._exit(0)

    threading.Thread(target=watch, daemon=True, name="twostroke-first").start()


def main() -> int:
    """Run a rank's process; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m twostroke.startup.rank_process", description=__doc__)
    parser.add_argument("rank", type=int, help="from 1")
    parser.add_argument("size", type=int, help="ranks in all; rank 0's --tensor-parallel-size")
    parser.add_argument("address", help="rank 0's --tensor-parallel-address, host:port")
    given = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; rank 0 handles it
    signal_at_parent_death(signal.SIGCONT)  # a stopped process would not notice the end of rank 0
    logging.basicConfig(
        level=logging.WARNING, stream=sys.stderr, format=f"rank {given.rank}: %(levelname)s %(message)s"
    )
    try:
        serve_rank(given.rank, given.size, given.address, exits_with_rank0=True)
    except RankLost:
        return 0  # the lost rank has logged the cause
    except TwostrokeError as error:
        log.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
