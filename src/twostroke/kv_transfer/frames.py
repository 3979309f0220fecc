"""What borrower and lender say to each other over one connection, which serves one lease.

```
borrower                                            lender
Fetch(epoch, lease, what it needs, geometry)  ──►
                                              ◄──   FetchRefused(why), and no more
                                              ◄──   Terms(geometry)
                                              ◄──   EntriesReady(entries, layers) [+ their bytes], as they are computed
                                              ◄──   Waiting(), while there is nothing to send
                                              ◄──   All(digest)
Copied()                                      ──►
                                              ◄──   Valid() | FetchRefused(why)
```

The last exchange is what makes it safe to read memory that the lender may give away at any time: a lease that was
good all along is good at its end. Closing the connection is how either side gives up.

A frame is its length in four bytes and msgpack; the bytes that `EntriesReady` announces follow it, where they are sent.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import TypeVar

import msgspec

from twostroke.errors import EngineError
from twostroke.kernels.head_order import HeadOrder
from twostroke.kv_transfer.connection import Connection
from twostroke.kv_transfer.geometry import KVGeometry

PROTOCOL = 5
_LENGTH = struct.Struct("<I")
_MAX_FRAME_BYTES = 1 << 20


class TransferBroken(EngineError):
    """The other side is gone, or says what nobody expects."""


class _Frame(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One of a union; its name travels with it."""


class Fetch(_Frame, frozen=True):
    """The borrower's question."""

    protocol: int
    epoch: int
    """Of the process that granted the lease: another one at its address knows nothing of it."""
    lease_id: int
    first_entries: tuple[int, ...]
    """Per KV group, the first entry that it needs. Entries are the lender's, whatever the borrower's blocks are."""
    num_blocks: int
    """Entries of the prefix."""
    shares_memory: bool
    """It reads the blocks itself."""
    geometry: KVGeometry
    allows_drift: bool


class FetchRefused(_Frame, frozen=True):
    """Nothing comes of it."""

    reason: str


class RemoteMemory(msgspec.Struct, frozen=True, array_like=True):
    """Where another process's NIXL finds a lender's KV memory."""

    agent: bytes
    """How its agent is reached, and what it has registered: NIXL's own words."""
    addresses: tuple[int, ...]
    """Rank by rank, where the memory begins in the lender's process."""


class Terms(_Frame, frozen=True):
    """The lease is there."""

    geometry: KVGeometry
    num_bytes_shared: int
    """Of the lender's KV memory, of each rank, which the borrower reads itself; 0: the bytes are sent."""
    remote: RemoteMemory | None = None
    """Where NIXL reads it; None: its descriptors come with this frame, or it lies in the borrower's own process."""
    orders: tuple[HeadOrder, ...] = ()
    """Per KV group, places of tokens in a head of the lender's pages, for a borrower whose blocks have another format
    or order."""


class EntriesReady(_Frame, frozen=True):
    """Layers `first_layer` to before `end_layer` of some entries."""

    first: int
    end: int
    first_layer: int
    end_layer: int
    rows: tuple[tuple[int, ...], ...]
    """The lender's blocks, where the borrower reads them itself; else empty."""


class Waiting(_Frame, frozen=True):
    """The lender is alive."""


class All(_Frame, frozen=True):
    """There is no more."""

    digest: bytes


class Copied(_Frame, frozen=True):
    """The borrower has all of it."""


class Valid(_Frame, frozen=True):
    """It may believe it."""


LenderSays = FetchRefused | Terms | EntriesReady | Waiting | All | Valid
BorrowerSays = Fetch | Copied
_ENCODER = msgspec.msgpack.Encoder()
FROM_LENDER: msgspec.msgpack.Decoder[LenderSays] = msgspec.msgpack.Decoder(LenderSays)
FROM_BORROWER: msgspec.msgpack.Decoder[BorrowerSays] = msgspec.msgpack.Decoder(BorrowerSays)
_Said = TypeVar("_Said")


def framed(frame: LenderSays | BorrowerSays) -> bytes:
    """As it travels."""
    body = _ENCODER.encode(frame)
    return _LENGTH.pack(len(body)) + body


def receive(connection: Connection, decoder: msgspec.msgpack.Decoder[_Said], head: bytes = b"") -> _Said:
    """The next frame, of which `head` has come already.

    Raises:
        TransferBroken: there is none, or none that is understood.
        OSError: the connection has broken, or nothing came in time.
    """
    (length,) = _LENGTH.unpack(head + receive_exactly(connection, _LENGTH.size - len(head)))
    if length > _MAX_FRAME_BYTES:
        raise TransferBroken(f"a frame of {length:,} bytes, at most {_MAX_FRAME_BYTES:,}: no peer of ours.")
    try:
        return decoder.decode(receive_exactly(connection, length))
    except msgspec.MsgspecError as error:
        raise TransferBroken(f"a frame that is not understood ({error}): a peer of another version?") from error


def receive_exactly(connection: Connection, num_bytes: int) -> bytearray:
    """So many bytes, in memory of their own."""
    data = bytearray(num_bytes)
    if num_bytes:
        receive_pieces(connection, [memoryview(data)])
    return data


def send_pieces(connection: Connection, pieces: Sequence[memoryview]) -> None:
    """All of them in their order, without gathering them first."""
    for batch in _batches(pieces):
        left = batch
        while left:
            left = _behind(left, connection.sendmsg(left))


def receive_pieces(connection: Connection, places: Sequence[memoryview]) -> None:
    """Fills all of them in their order, which were not empty.

    Raises:
        TransferBroken: the other side has closed the connection.
        OSError: it has broken, or nothing came in time.
    """
    for batch in _batches(places):
        left = batch
        while left:
            num_bytes = connection.recvmsg_into(left)[0]
            if not num_bytes:
                raise TransferBroken("the other side has closed the connection.")
            left = _behind(left, num_bytes)


_BATCH_PIECES = 64
_BATCH_BYTES = 4 << 20
"""What one call to the system is given. It takes what the connection's buffers hold, which is less: with more, most of
what was prepared for a call would be prepared again for the next."""


def _batches(pieces: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Pieces in their order, some at once."""
    batch: list[memoryview] = []
    num_bytes = 0
    for piece in pieces:
        if batch and (len(batch) == _BATCH_PIECES or num_bytes + len(piece) > _BATCH_BYTES):
            yield batch
            batch, num_bytes = [], 0
        batch.append(piece)
        num_bytes += len(piece)
    if batch:
        yield batch


def _behind(batch: list[memoryview], num_bytes: int) -> list[memoryview]:
    """What is left of it when so many bytes are done."""
    for index, piece in enumerate(batch):
        if num_bytes < len(piece):
            return [piece[num_bytes:], *batch[index + 1 :]]
        num_bytes -= len(piece)
    return []
