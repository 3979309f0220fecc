"""One end of a hand-over in a process of its own: `python -m benchmarks.handover.end`, which ends with its stdin.

There is no model. The lender's blocks hold bytes that are a function of their number, so that the borrower can tell
whether it has got them; its prefill is a clock that makes one layer after the other ready.
"""

from __future__ import annotations

import mmap
import secrets
import sys
import threading
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from benchmarks.handover.orders import (
    DIGEST,
    LAYOUT,
    ORDERS,
    BeBorrower,
    Begun,
    BeLender,
    Borrow,
    Borrowed,
    Lend,
    Lent,
    Report,
    line_of,
)
from twostroke.config.layer_spec import KVSpec
from twostroke.kernels.head_order import HeadOrder, plain_order
from twostroke.kv_cache.holds import KVImport
from twostroke.kv_transfer.address import Address
from twostroke.kv_transfer.borrower import KVBorrower
from twostroke.kv_transfer.geometry import KVGeometry, layout_facts
from twostroke.kv_transfer.intake import BlockReading
from twostroke.kv_transfer.lender import KVLender
from twostroke.kv_transfer.memory import KVMemory, SharedMemory
from twostroke.kv_transfer.nixl_reads import NixlAgent
from twostroke.kv_transfer.transport import Fetched

_GEOMETRY = KVGeometry({"model": "none"}, {}, layout_facts(LAYOUT, "none"))
_UNTOUCHED = 0xA5
"""What the borrower's blocks hold before."""


def _order(kv: KVSpec, block_size: int) -> HeadOrder:
    del block_size
    return plain_order(LAYOUT.kv_format, kv.head_dim)


def main() -> None:
    """Takes orders until there are no more."""
    end: _Lender | _Borrower | None = None
    for line in sys.stdin.buffer:
        match ORDERS.decode(line):
            case BeLender() as order:
                end = _Lender(order)
                _report(end.begun)
            case BeBorrower() as order:
                end = _Borrower(order)
                _report(Begun(Address(), 0))
            case Lend() as order:
                assert isinstance(end, _Lender)
                _report(end.lend(order))
            case Borrow() as order:
                assert isinstance(end, _Borrower)
                _report(end.borrow(order))


def block_bytes(block_id: int) -> NDArray[np.uint8]:
    """Of one block of the lender's."""
    return np.frombuffer(np.random.default_rng(block_id).bytes(LAYOUT.bytes_per_block), np.uint8)


class _Lender:
    """A pool whose blocks are all written, and who lends them."""

    def __init__(self, order: BeLender) -> None:
        num_bytes = order.num_blocks * LAYOUT.bytes_per_block
        shared = SharedMemory(1, num_bytes)
        pool = memoryview(mmap.mmap(shared.descriptors[0], num_bytes))
        blocks = np.frombuffer(pool, np.uint8).reshape(order.num_blocks, -1)
        for block_id in range(order.num_blocks):
            blocks[block_id] = block_bytes(block_id)
        epoch = secrets.randbits(63)
        memory = KVMemory(LAYOUT, pool)
        self._lender = KVLender(
            memory,
            NixlAgent(memory) if order.address.by_nixl else shared,
            _GEOMETRY,
            epoch=epoch,
            clock=time.monotonic,
            is_over=lambda _: None,
        )
        self.begun = Begun(self._lender.listen(order.address), epoch)

    def lend(self, order: Lend) -> Lent:
        """Returns when all of it is complete."""
        lender, lease_id, num_blocks = self._lender, order.lease_id, len(order.block_ids)
        began_s = time.monotonic()
        lender.grant(lease_id, num_blocks)
        lender.begin_part(lease_id, [order.block_ids], num_blocks, is_computed=not order.prefill_s)
        if order.prefill_s:
            for num_layers in range(1, len(LAYOUT.groups[0].layer_ids) + 1):
                due_s = began_s + order.prefill_s * num_layers / len(LAYOUT.groups[0].layer_ids)
                time.sleep(max(0.0, due_s - time.monotonic()))
                lender.layer_ready([lease_id], num_layers)
        lender.complete(lease_id, DIGEST)
        return Lent(began_s, time.monotonic())


class _Borrower:
    """A pool into which blocks are fetched."""

    def __init__(self, order: BeBorrower) -> None:
        num_blocks = order.num_blocks
        pool = mmap.mmap(-1, num_blocks * LAYOUT.bytes_per_block, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pool.madvise(mmap.MADV_HUGEPAGE)  # as the engine's is
        self._blocks = np.frombuffer(pool, np.uint8).reshape(num_blocks, -1)
        self._blocks[:] = _UNTOUCHED
        memory = KVMemory(LAYOUT, memoryview(pool))
        nixl = NixlAgent(memory) if order.by_nixl else None
        self._borrower = KVBorrower(memory, _GEOMETRY, reading=BlockReading(_order), clock=time.monotonic, nixl=nixl)

    def borrow(self, order: Borrow) -> Borrowed:
        """Returns when it is there, and was looked at."""
        is_done, ended = threading.Event(), list[tuple[float, Fetched]]()

        def done(fetched: Fetched) -> None:
            ended.append((time.monotonic(), fetched))
            is_done.set()

        num_blocks = len(order.block_ids)
        into = KVImport(num_blocks * LAYOUT.block_size, 0, (order.block_ids,), (0,))
        began_s = time.monotonic()
        self._borrower.fetch(order.source, into, DIGEST, done)
        is_done.wait()
        ((ended_s, fetched),) = ended
        is_equal = self._looked_at(order.block_ids, order.theirs)
        return Borrowed(fetched.problem, fetched.num_bytes, began_s, ended_s, is_equal)

    def _looked_at(self, block_ids: Sequence[int], theirs: Sequence[int]) -> bool:
        """Whether they are the lender's, and no other was touched; they are made as before."""
        is_equal = True
        for mine, other in zip(block_ids, theirs, strict=True):
            is_equal &= bool((self._blocks[mine] == block_bytes(other)).all())
            self._blocks[mine] = _UNTOUCHED
        return is_equal and bool((self._blocks == _UNTOUCHED).all())


def _report(report: Report) -> None:
    sys.stdout.buffer.write(line_of(report))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
