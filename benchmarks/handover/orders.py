"""What `benchmarks handover` says to the two processes that it starts, a line of JSON each, and what they answer."""

from __future__ import annotations

import msgspec

from twostroke.config.layer_spec import KVSpec
from twostroke.kv_cache.layout import KVLayout
from twostroke.kv_transfer.address import Address
from twostroke.kv_transfer.transport import KVSource

LAYER = KVSpec(num_kv_heads=8, head_dim=128)
LAYOUT = KVLayout.of([LAYER] * 28, block_size=16, kv_format="bf16")
"""Qwen3-0.6B's: 112 KiB a token."""
DIGEST = b"a prompt of no model"


class _Line(msgspec.Struct, frozen=True, tag=True):
    """One of a union; its name travels with it."""


class BeLender(_Line, frozen=True):
    """The first order of one process."""

    address: Address
    num_blocks: int
    """Of its pool."""


class BeBorrower(_Line, frozen=True):
    """The first order of the other."""

    num_blocks: int
    by_nixl: bool
    """The lender lends by it."""


class Lend(_Line, frozen=True):
    """A prompt of these blocks, which is computed in so many seconds, every layer in as many; 0: it is there."""

    lease_id: int
    block_ids: tuple[int, ...]
    prefill_s: float


class Borrow(_Line, frozen=True):
    """The same, into blocks of the other pool."""

    source: KVSource
    block_ids: tuple[int, ...]
    theirs: tuple[int, ...]
    """The lender's blocks, whose bytes are known (`block_bytes`)."""


class Begun(_Line, frozen=True):
    """Ready for orders."""

    address: Address
    epoch: int


class Lent(_Line, frozen=True):
    """The prompt was computed, from when to when; the clock is the machine's."""

    began_s: float
    ended_s: float


class Borrowed(_Line, frozen=True):
    """It was fetched."""

    problem: str
    num_bytes: int
    began_s: float
    ended_s: float
    is_equal: bool
    """Every byte is the lender's, and the other blocks are as they were."""


Order = BeLender | BeBorrower | Lend | Borrow
Report = Begun | Lent | Borrowed
ORDERS: msgspec.json.Decoder[Order] = msgspec.json.Decoder(Order)
REPORTS: msgspec.json.Decoder[Report] = msgspec.json.Decoder(Report)


def line_of(said: Order | Report) -> bytes:
    """As it travels."""
    return msgspec.json.encode(said) + b"\n"
