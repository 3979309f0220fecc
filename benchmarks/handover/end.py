"""One end of a hand-over in its own process: `python -m benchmarks.handover.end`, which ends with its stdin.

It reads calls and writes their answers (pickled): first the kind of end that it has to be, then that end's methods.

There is no model. The lender's blocks hold bytes that are a function of their number, so that the borrower can check
them. The lender's prefill is a clock that makes one layer after the other ready.
"""

from __future__ import annotations

import mmap
import pickle
import secrets
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.handover.pair import LAYOUT, Borrowed
from twostroke.config.layer_spec import KVSpec
from twostroke.kernels.head_order import HeadOrder, plain_order
from twostroke.kv_cache.holds import KVImport
from twostroke.kv_transfer.address import Address
from twostroke.kv_transfer.block_import import BlockReading
from twostroke.kv_transfer.borrower import KVBorrower
from twostroke.kv_transfer.geometry import KVGeometry, layout_facts
from twostroke.kv_transfer.lender import KVLender, LendableMemory
from twostroke.kv_transfer.memory import KVMemory, SharedMemory
from twostroke.kv_transfer.nixl_reads import NixlAgent
from twostroke.kv_transfer.transport import Fetched, KVSource

_GEOMETRY = KVGeometry({"model": "none"}, {}, layout_facts(LAYOUT, "none"))
_DIGEST = b"a prompt of no model"
_UNTOUCHED = 0xA5
"""Content of the borrower's blocks before a transfer."""


def _order(kv: KVSpec, block_size: int) -> HeadOrder:
    del block_size
    return plain_order(LAYOUT.kv_format, kv.head_dim)


def main() -> None:
    """Answer calls until there are no more."""
    ends: dict[str, Callable[..., Any]] = {"lender": _Lender, "borrower": _Borrower}
    end: Any = None
    while True:
        try:
            name, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        if end is None:
            end = ends[name](*arguments)
            answer = end.begun
        else:
            answer = getattr(end, name)(*arguments)
        pickle.dump(answer, sys.stdout.buffer)
        sys.stdout.buffer.flush()


def block_bytes(block_id: int) -> NDArray[np.uint8]:
    """Return the bytes of one of the lender's blocks."""
    return np.frombuffer(np.random.default_rng(block_id).bytes(LAYOUT.bytes_per_block), np.uint8)


class _Lender:
    """Lender with a pool whose blocks are all written."""

    def __init__(self, address: Address, num_blocks: int) -> None:
        num_bytes = num_blocks * LAYOUT.bytes_per_block
        shared = SharedMemory(1, num_bytes)
        pool = memoryview(mmap.mmap(shared.descriptors[0], num_bytes))
        blocks = np.frombuffer(pool, np.uint8).reshape(num_blocks, -1)
        for block_id in range(num_blocks):
            blocks[block_id] = block_bytes(block_id)
        epoch = secrets.randbits(63)
        memory = KVMemory(LAYOUT, pool)
        self._lender = KVLender(
            LendableMemory(memory, NixlAgent(memory) if address.by_nixl else shared),
            _GEOMETRY,
            epoch=epoch,
            clock=time.monotonic,
            is_over=lambda _: None,
        )
        self.begun = self._lender.listen(address), epoch

    def lend(self, lease_id: int, block_ids: tuple[int, ...], prefill_s: float) -> tuple[float, float]:
        """Lend blocks, layer by layer over `prefill_s`; return when that began and ended."""
        lender, num_blocks = self._lender, len(block_ids)
        began_s = time.monotonic()
        lender.grant(lease_id, num_blocks)
        lender.begin_part(lease_id, [block_ids], num_blocks, is_computed=not prefill_s)
        if prefill_s:
            for num_layers in range(1, len(LAYOUT.groups[0].layer_ids) + 1):
                due_s = began_s + prefill_s * num_layers / len(LAYOUT.groups[0].layer_ids)
                time.sleep(max(0.0, due_s - time.monotonic()))
                lender.layer_ready([lease_id], num_layers)
        lender.complete(lease_id, _DIGEST)
        return began_s, time.monotonic()


class _Borrower:
    """Borrower with a pool into which blocks are fetched."""

    begun = None
    """Answer to its construction; a borrower has none."""

    def __init__(self, num_blocks: int, by_nixl: bool) -> None:
        pool = mmap.mmap(-1, num_blocks * LAYOUT.bytes_per_block, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pool.madvise(mmap.MADV_HUGEPAGE)  # as the engine's is
        self._blocks = np.frombuffer(pool, np.uint8).reshape(num_blocks, -1)
        self._blocks[:] = _UNTOUCHED
        memory = KVMemory(LAYOUT, memoryview(pool))
        nixl = NixlAgent(memory) if by_nixl else None
        self._borrower = KVBorrower(memory, _GEOMETRY, reading=BlockReading(_order), clock=time.monotonic, nixl=nixl)

    def borrow(self, source: KVSource, block_ids: tuple[int, ...], theirs: tuple[int, ...]) -> Borrowed:
        """Fetch blocks; return when they have arrived and were compared with the lender's blocks."""
        is_done, ended = threading.Event(), list[tuple[float, Fetched]]()

        def done(fetched: Fetched) -> None:
            ended.append((time.monotonic(), fetched))
            is_done.set()

        num_blocks = len(block_ids)
        into = KVImport(num_blocks * LAYOUT.block_size, 0, (block_ids,), (0,))
        began_s = time.monotonic()
        self._borrower.fetch(source, into, _DIGEST, done)
        is_done.wait()
        ((ended_s, fetched),) = ended
        is_equal = self._looked_at(block_ids, theirs)
        return Borrowed(fetched.problem, fetched.num_bytes, began_s, ended_s, is_equal)

    def _looked_at(self, block_ids: Sequence[int], theirs: Sequence[int]) -> bool:
        """Return whether the blocks equal the lender's, and no other block changed; reset them."""
        is_equal = True
        for mine, other in zip(block_ids, theirs, strict=True):
            is_equal &= bool((self._blocks[mine] == block_bytes(other)).all())
            self._blocks[mine] = _UNTOUCHED
        return is_equal and bool((self._blocks == _UNTOUCHED).all())


if __name__ == "__main__":
    main()
