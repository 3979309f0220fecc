"""Two pools of KV blocks in one process, without any model: one lends, the other fetches."""

from __future__ import annotations

import itertools
import mmap
import queue
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from factories import uniform_layout, unlike_layout
from twostroke.kernels.head_order import plain_order
from twostroke.kv_cache.holds import KVImport
from twostroke.kv_cache.layout import KVLayout
from twostroke.kv_transfer.address import Address, connect
from twostroke.kv_transfer.block_import import BlockReading
from twostroke.kv_transfer.borrower import KVBorrower
from twostroke.kv_transfer.connection import Connection
from twostroke.kv_transfer.geometry import KVGeometry, layout_facts
from twostroke.kv_transfer.lender import KVLender, LendableMemory
from twostroke.kv_transfer.memory import KVMemory, SharedMemory
from twostroke.kv_transfer.nixl_reads import NixlAgent
from twostroke.kv_transfer.transport import Fetched, KVSource

PLAIN = uniform_layout([None] * 4, block_size=4, num_kv_heads=2, head_dim=8, kv_format="bf16")
UNLIKE = unlike_layout([(1, 8, 8), (1, 8, 8), (2, 12, None), (1, 8, 8), (2, 12, None)], block_size=4, kv_format="int8")
"""Layers of 96 and of 256 bytes in a page, in blocks of 576."""
WINDOWED = uniform_layout([None, 8, None, None, 8, None], block_size=4, num_kv_heads=2, head_dim=8, kv_format="bf16")
"""Two groups, of layers that are no neighbours in the model; a block is one page of the first, or two of the second."""
DIGEST = b"the last block"
EPOCH = 77
NUM_BLOCKS = 40
NUM_ENTRIES = 6
UNTOUCHED = 0xA5
_NAMES = itertools.count()


class Clock:
    """Clock that the test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Pools:
    """Both, and who serves them."""

    layout: KVLayout
    lender: KVLender
    address: Address
    blocks: np.ndarray[Any, np.dtype[np.uint8]]
    """The lender's."""
    geometry: KVGeometry
    over: queue.SimpleQueue[int]
    """Leases that are."""
    rows: tuple[tuple[int, ...], ...]
    """The lender's, of every prompt: page ids, per KV group."""

    def source(self, lease_id: int, **other: Any) -> KVSource:
        return KVSource(**{"address": self.address, "epoch": EPOCH, "lease_id": lease_id, **other})

    def lend(self, lease_id: int) -> None:
        """Lend a prompt that is computed."""
        self.lender.grant(lease_id, NUM_ENTRIES)
        self.lender.begin_part(lease_id, self.rows, NUM_ENTRIES, is_computed=True)
        self.lender.complete(lease_id, DIGEST)

    def borrowing(self, geometry: KVGeometry | None = None, **options: Any) -> Borrowing:
        """Return another pool that fetches from this one by the same transport."""
        return Borrowing(self.layout, geometry or self.geometry, by_nixl=self.address.by_nixl, **options)

    def connect(self) -> Connection:
        """Return the connection of a borrower that the test plays itself."""
        if self.address.name:
            connection = connect(self.address, 30)
            connection.settimeout(30)
            return connection
        family = socket.AF_UNIX if self.address.is_local else socket.AF_INET
        connection = socket.socket(family)
        connection.settimeout(30)
        connection.connect(self.address.path or (self.address.host, self.address.port))
        return connection


def address_by(transport: str, folder: Path) -> Address:
    """Return a new address, at which no lender listens yet."""
    match transport:
        case "shm":
            return Address(path=str(folder / f"kv-{next(_NAMES)}"))
        case "inproc":
            return Address(name=f"test-{next(_NAMES)}")
        case _:
            return Address(host="127.0.0.1", by_nixl=transport == "nixl")


def pools(
    layout: KVLayout, folder: Path, transport: str, *, timeout_s: float = 30, clock: Callable[[], float]
) -> Pools:
    """Yield pools with random bytes in the lender's blocks."""
    size = NUM_BLOCKS * layout.bytes_per_block
    shared = SharedMemory(1, size)
    data = memoryview(mmap.mmap(shared.descriptors[0], size))
    blocks = np.frombuffer(data, np.uint8).reshape(NUM_BLOCKS, -1)
    rng = np.random.default_rng(5)
    blocks[:] = rng.integers(0, 256, blocks.shape, np.uint8)
    geometry = KVGeometry({"model": "m"}, {"kernels": "k"}, layout_facts(layout, "any"))
    over: queue.SimpleQueue[int] = queue.SimpleQueue()
    memory = KVMemory(layout, data)
    lender = KVLender(
        LendableMemory(memory, NixlAgent(memory) if transport == "nixl" else shared),
        geometry,
        epoch=EPOCH,
        clock=clock,
        is_over=over.put,
        timeout_s=timeout_s,
    )
    address = lender.listen(address_by(transport, folder))
    return Pools(layout, lender, address, blocks, geometry, over, rows_of(layout, rng))


def rows_of(layout: KVLayout, rng: np.random.Generator) -> tuple[tuple[int, ...], ...]:
    """Return page ids of NUM_ENTRIES pages in each KV group, in blocks of their own."""
    blocks = iter(rng.permutation(NUM_BLOCKS).tolist())
    return tuple(
        tuple(layout.page_ids(group).of_blocks([next(blocks) for _ in range(NUM_ENTRIES // group.pages_per_block)]))
        for group in layout.groups
    )


def layers_of_pages(layout: KVLayout, group_id: int, page_ids: Sequence[int]) -> NDArray[np.int64]:
    """Return where the bytes of pages are in the pool, [layers of the pages, bytes of a layer]."""
    group = layout.groups[group_id]
    firsts = np.array(page_ids, np.int64).reshape(-1, 1, 1) * layout.page_ids(group).bytes_per_id
    in_page = np.arange(layout.bytes_per_page(group)).reshape(1, len(group.layer_ids), -1)
    return (firsts + in_page).reshape(-1, layout.bytes_per_layer(group))


class Borrowing:
    """The other pool."""

    def __init__(
        self, layout: KVLayout, geometry: KVGeometry, *, seed: int = 0, by_nixl: bool = False, **options: Any
    ) -> None:
        self.layout = layout
        data = bytearray(NUM_BLOCKS * layout.bytes_per_block)
        self.blocks = np.frombuffer(data, np.uint8).reshape(NUM_BLOCKS, -1)
        self.blocks[:] = UNTOUCHED
        given = {
            "reading": BlockReading(lambda kv, _: plain_order(layout.kv_format, kv.head_dim)),
            "clock": lambda: 1.0,
            "timeout_s": 30,
            **options,
        }
        memory = KVMemory(layout, memoryview(data))
        self.borrower = KVBorrower(memory, geometry, nixl=NixlAgent(memory) if by_nixl else None, **given)
        rows = rows_of(layout, np.random.default_rng(seed))
        num_tokens = NUM_ENTRIES * layout.block_size
        self.into = KVImport(num_tokens, 0, rows, (0,) * len(layout.groups))
        self.ended: queue.SimpleQueue[Fetched] = queue.SimpleQueue()

    def missing_from(self, *first_missing: int) -> None:
        self.into = replace(self.into, first_missing=first_missing)

    def begin(self, source: KVSource, digest: bytes = DIGEST) -> Callable[[], None]:
        return self.borrower.fetch(source, self.into, digest, self.ended.put)

    def end(self) -> Fetched:
        return self.ended.get(timeout=60)

    def fetch(self, source: KVSource, digest: bytes = DIGEST) -> Fetched:
        self.begin(source, digest)
        return self.end()

    @property
    def num_bytes_missing(self) -> int:
        """Return the number of missing bytes by the formula."""
        missing = zip(self.layout.groups, self.into.rows, self.into.first_missing, strict=True)
        return sum((len(row) - first) * self.layout.bytes_per_page(group) for group, row, first in missing)

    def check(self, blocks: np.ndarray[Any, np.dtype[np.uint8]], rows: Sequence[Sequence[int]]) -> None:
        """Check that the fetched bytes equal the lender's, and that nothing else changed."""
        found, theirs = (pool.reshape(-1) for pool in (self.blocks, blocks))
        expected = np.full_like(found, UNTOUCHED)
        for group_id, first in enumerate(self.into.first_missing):
            here, there = (
                layers_of_pages(self.layout, group_id, row[group_id][first:]) for row in (self.into.rows, rows)
            )
            expected[here] = theirs[there]
        np.testing.assert_array_equal(found, expected)
