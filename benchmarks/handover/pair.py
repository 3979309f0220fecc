"""A lender process and a borrower process, and hand-overs between them."""

from __future__ import annotations

import contextlib
import pickle
import random
import subprocess
import sys
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import IO, Any, NamedTuple, cast

from twostroke.config.layer_spec import KVSpec
from twostroke.errors import SetupError
from twostroke.kv_cache.layout import KVLayout
from twostroke.kv_transfer.address import Address
from twostroke.kv_transfer.transport import KVSource

LAYER = KVSpec(num_kv_heads=8, head_dim=128)
LAYOUT = KVLayout.of([LAYER] * 28, block_size=16, kv_format="bf16")
"""KV layout of Qwen3-0.6B: 112 KiB per token."""
_SPARE = 1.25
"""Blocks of a pool relative to the transferred ones; the others must not change."""
_TIMEOUT_S = 60.0


class Borrowed(NamedTuple):
    """A fetched prompt; the clock is the machine's."""

    problem: str
    num_bytes: int
    began_s: float
    ended_s: float
    is_equal: bool
    """Whether every byte is the lender's, and the other blocks are unchanged."""


@dataclass(frozen=True, slots=True)
class Handover:
    """One completed hand-over."""

    num_bytes: int
    prefill_s: float
    transfer_s: float
    """Seconds from the borrower's request to its completion."""
    total_s: float
    """Seconds from the beginning of the prefill."""


class Pair:
    """Both processes of hand-overs.

    Args:
        lender: a process that waits for its first order.
        borrower: another.
        address: for the lender to listen on.
        num_blocks: transferred each time, scattered over the pools in a different order on each side.
    """

    def __init__(self, lender: _End, borrower: _End, address: Address, num_blocks: int) -> None:
        self._lender, self._borrower = lender, borrower
        num_in_pool = int(num_blocks * _SPARE) + 1
        rng = random.Random(num_blocks)
        self._theirs = tuple(rng.sample(range(num_in_pool), num_blocks))
        self._ours = tuple(rng.sample(range(num_in_pool), num_blocks))
        self._num_leases = 0
        lender.send("lender", address, num_in_pool)
        borrower.send("borrower", num_in_pool, address.by_nixl)
        self._address, self._epoch = lender.receive()
        borrower.receive()

    def hand_over(self, prefill_s: float = 0.0) -> Handover:
        """Hand one prompt over, layer by layer during its prefill if `prefill_s` is above 0.

        Raises:
            SetupError: it did not arrive, or arrived changed.
        """
        self._num_leases += 1
        lend = ("lend", self._num_leases, self._theirs, prefill_s)
        borrow = ("borrow", KVSource(self._address, self._epoch, self._num_leases), self._ours, self._theirs)
        if prefill_s:  # the borrower asks before it begins
            self._borrower.send(*borrow)
        self._lender.send(*lend)
        began_s, ended_s = self._lender.receive()
        if not prefill_s:
            self._borrower.send(*borrow)
        borrowed: Borrowed = self._borrower.receive()
        if borrowed.problem or not borrowed.is_equal:
            raise SetupError(f"a hand-over failed: {borrowed.problem or 'its bytes are not those that were lent'}.")
        return Handover(
            borrowed.num_bytes,
            ended_s - began_s,
            borrowed.ended_s - borrowed.began_s,
            borrowed.ended_s - began_s,
        )


class _End:
    """A process of benchmarks/handover/end.py: it gets its kind first, then calls of methods, each with an answer."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def send(self, name: str, *arguments: Any) -> None:
        stdin = cast(IO[bytes], self._process.stdin)
        pickle.dump((name, arguments), stdin)
        stdin.flush()

    def receive(self) -> Any:
        try:
            return pickle.load(cast(IO[bytes], self._process.stdout))
        except (EOFError, pickle.UnpicklingError):
            raise SetupError("a process of the benchmark has ended; its output is above.") from None

    def end(self) -> None:
        """End the process by closing its stdin."""
        with contextlib.suppress(OSError):
            cast(IO[bytes], self._process.stdin).close()
        try:
            self._process.wait(_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        cast(IO[bytes], self._process.stdout).close()


@contextlib.contextmanager
def pair(address: Address, num_bytes: int, prefixes: tuple[Sequence[str], Sequence[str]] = ((), ())) -> Generator[Pair]:
    """Start both processes, and end them.

    Args:
        address: for the lender to listen on.
        num_bytes: of each hand-over, at least; whole blocks.
        prefixes: in front of the command of the lender and of the borrower.
    """
    with contextlib.ExitStack() as started:
        ends: list[_End] = []
        for prefix in prefixes:
            command = [*prefix, sys.executable, "-m", "benchmarks.handover.end"]
            ends.append(_End(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)))
            started.callback(ends[-1].end)
        yield Pair(ends[0], ends[1], address, num_blocks_for(num_bytes))


def num_blocks_for(num_bytes: int) -> int:
    """Return the whole blocks for at least so many bytes."""
    return -(-num_bytes // LAYOUT.bytes_per_block)


def formula_bytes(num_blocks: int) -> int:
    """Return the bytes of K and V: 2 x layers x KV heads x head size x 2 bytes (bf16) for each token."""
    num_layers = sum(len(group.layer_ids) for group in LAYOUT.groups)
    return num_blocks * LAYOUT.block_size * 2 * num_layers * LAYER.num_kv_heads * LAYER.head_dim * 2
