"""Messages between borrower and lender over one connection, which serves one lease.

```
borrower                                            lender
Fetch(epoch, lease, what it needs, geometry)  ──►
                                              ◄──   FetchRefused(why), and nothing more
                                              ◄──   Terms(geometry)
                                              ◄──   EntriesReady(entries, layers) [+ their bytes], as they are computed
                                              ◄──   Waiting(), while there is nothing to send
                                              ◄──   All(digest)
Copied()                                      ──►
                                              ◄──   Valid() | FetchRefused(why)
```

The last exchange makes it safe to read memory that the lender may reuse at any time: a lease that is valid at the end
was valid throughout. Either side gives up by closing the connection.

A frame is its length in four bytes, then msgpack. Where bytes are sent, they follow the `EntriesReady` that announces
them.
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
    """The other side closed the connection or violated the protocol."""


class _Frame(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A message of one of the unions below, tagged with its name."""


class Fetch(_Frame, frozen=True):
    """The borrower's request for a lease."""

    protocol: int
    epoch: int
    """Epoch of the process that granted the lease; another process at its address does not know it."""
    lease_id: int
    first_entries: tuple[int, ...]
    """First entry needed, per KV group. Entries are the lender's, whatever the borrower's block size."""
    num_blocks: int
    """Number of entries of the prefix."""
    shares_memory: bool
    """Whether the borrower reads the blocks itself."""
    geometry: KVGeometry
    allows_drift: bool


class FetchRefused(_Frame, frozen=True):
    """Refusal of the request, at the beginning or the end."""

    reason: str


class RemoteMemory(msgspec.Struct, frozen=True, array_like=True):
    """A lender's KV memory, as NIXL in another process finds it."""

    agent: bytes
    """NIXL's metadata: how the agent is reached, and what it has registered."""
    addresses: tuple[int, ...]
    """Start of the memory in the lender's process, for each rank."""


class Terms(_Frame, frozen=True):
    """Description of the lender's blocks; the lease exists."""

    geometry: KVGeometry
    num_bytes_shared: int
    """Bytes of the lender's KV memory per rank, which the borrower reads itself; 0: the bytes are sent."""
    remote: RemoteMemory | None = None
    """Memory to read by NIXL; None: its descriptors come with this frame, or it is in the borrower's own process."""
    orders: tuple[HeadOrder, ...] = ()
    """Places of tokens in a head of the lender's pages, per KV group, for a borrower whose blocks have another format
    or order."""


class EntriesReady(_Frame, frozen=True):
    """Notice that layers from `first_layer` up to but not including `end_layer` of some entries are ready."""

    first: int
    end: int
    first_layer: int
    end_layer: int
    rows: tuple[tuple[int, ...], ...]
    """The lender's blocks, if the borrower reads them itself; else empty."""


class Waiting(_Frame, frozen=True):
    """Sign of life from a lender that has nothing to send yet."""


class All(_Frame, frozen=True):
    """Notice that all entries were sent, with the hash of the last block."""

    digest: bytes


class Copied(_Frame, frozen=True):
    """Notice that the borrower has copied everything."""


class Valid(_Frame, frozen=True):
    """Confirmation that the lease stayed valid, so the copied bytes may be used."""


LenderFrame = FetchRefused | Terms | EntriesReady | Waiting | All | Valid
BorrowerFrame = Fetch | Copied
_ENCODER = msgspec.msgpack.Encoder()
FROM_LENDER: msgspec.msgpack.Decoder[LenderFrame] = msgspec.msgpack.Decoder(LenderFrame)
FROM_BORROWER: msgspec.msgpack.Decoder[BorrowerFrame] = msgspec.msgpack.Decoder(BorrowerFrame)
_Said = TypeVar("_Said")


def encode_frame(frame: LenderFrame | BorrowerFrame) -> bytes:
    """Return the encoded frame with its length prefix."""
    body = _ENCODER.encode(frame)
    return _LENGTH.pack(len(body)) + body


def receive(connection: Connection, decoder: msgspec.msgpack.Decoder[_Said], head: bytes = b"") -> _Said:
    """Receive the next frame, of which `head` has been received already.

    Raises:
        TransferBroken: the connection was closed, or the frame cannot be decoded.
        OSError: the connection broke, or nothing came in time.
    """
    (length,) = _LENGTH.unpack(head + receive_exactly(connection, _LENGTH.size - len(head)))
    if length > _MAX_FRAME_BYTES:
        raise TransferBroken(f"a frame of {length:,} bytes, at most {_MAX_FRAME_BYTES:,}: not a peer of ours.")
    try:
        return decoder.decode(receive_exactly(connection, length))
    except msgspec.MsgspecError as error:
        raise TransferBroken(f"a frame that is not understood ({error}): a peer of another version?") from error


def receive_exactly(connection: Connection, num_bytes: int) -> bytearray:
    """Receive exactly `num_bytes` bytes into new memory."""
    data = bytearray(num_bytes)
    if num_bytes:
        receive_pieces(connection, [memoryview(data)])
    return data


def send_pieces(connection: Connection, pieces: Sequence[memoryview]) -> None:
    """Send all pieces in order, without gathering them first."""
    for batch in _batches(pieces):
        left = batch
        while left:
            left = _remaining(left, connection.sendmsg(left))


def receive_pieces(connection: Connection, places: Sequence[memoryview]) -> None:
    """Fill all places in order; none may be empty.

    Raises:
        TransferBroken: the other side has closed the connection.
        OSError: the connection broke, or nothing came in time.
    """
    for batch in _batches(places):
        left = batch
        while left:
            num_bytes = connection.recvmsg_into(left)[0]
            if not num_bytes:
                raise TransferBroken("the other side has closed the connection.")
            left = _remaining(left, num_bytes)


_BATCH_PIECES = 64
_BATCH_BYTES = 4 << 20
"""Most pieces and bytes of one system call. A call takes what the connection's buffers hold, which is less. With larger
batches most of the preparation of a call would be repeated for the next."""


def _batches(pieces: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Yield the pieces in order, in batches."""
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


def _remaining(batch: list[memoryview], num_bytes: int) -> list[memoryview]:
    """Return what is left of a batch after `num_bytes` bytes."""
    for index, piece in enumerate(batch):
        if num_bytes < len(piece):
            return [piece[num_bytes:], *batch[index + 1 :]]
        num_bytes -= len(piece)
    return []
