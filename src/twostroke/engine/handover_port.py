"""What an engine is told of handing KV over, and what it tells of it."""

from __future__ import annotations

import msgspec

from twostroke.engine.heartbeat import Heartbeat
from twostroke.kv_transfer.address import Address
from twostroke.kv_transfer.transport import Fetched, KVSource


class HandoverPort(msgspec.Struct, frozen=True, array_like=True):
    """Where it lends, and whether it fetches."""

    lends_at: Address | None = None
    """Its KV can be fetched here; None: it lends nothing."""
    fetches: bool = False
    fetches_by_nixl: bool = False
    """Others lend to it by NIXL."""
    allows_drift: bool = False
    """It takes KV that was computed by other kernels or on other devices."""
    memory_share: float = 1.0
    """Of the memory that is free; the rest is for the other processes of the pools."""
    heartbeat: Heartbeat = Heartbeat()
    name: str = ""
    """Of the process, in its events; empty: it names itself."""


class LenderFacts(msgspec.Struct, frozen=True, array_like=True):
    """How others find what it lends."""

    address: Address
    epoch: int
    """Of the process: a lease of another one at the same address is unknown there."""


class FetchKV(msgspec.Struct, array_like=True, tag=True):
    """Fetch the KV of a prompt from the process that computes it; its request, or DropKV, comes later."""

    import_id: int
    request_id: str
    token_ids: tuple[int, ...]
    cache_salt: str | None
    source: KVSource


class DropKV(msgspec.Struct, array_like=True, tag=True):
    """No request will come for what was, or is, fetched."""

    import_id: int


class KVFetched(msgspec.Struct, array_like=True, tag=True):
    """From a thread of the process itself: the bytes have come, or will not."""

    import_id: int
    fetched: Fetched


class EndHold(msgspec.Struct, array_like=True, tag=True):
    """From a thread of the process itself: nobody reads these blocks any more."""

    hold_id: int
