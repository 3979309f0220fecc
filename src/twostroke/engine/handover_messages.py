"""Settings and messages of KV hand-overs, as an engine process gets and sends them."""

from __future__ import annotations

import msgspec

from twostroke.engine.heartbeat import Heartbeat
from twostroke.kv_transfer.address import Address
from twostroke.kv_transfer.transport import Fetched, KVSource


class HandoverSettings(msgspec.Struct, frozen=True, array_like=True):
    """Hand-over settings of an engine process."""

    lends_at: Address | None = None
    """Address at which its KV can be fetched; None: it lends nothing."""
    fetches: bool = False
    fetches_by_nixl: bool = False
    """Whether the processes it fetches from lend by NIXL."""
    allows_drift: bool = False
    """Whether it accepts KV computed with other numerics: kernels, device."""
    memory_share: float = 1.0
    """Share of the free memory that it may use; the rest is for the other processes of the pools."""
    heartbeat: Heartbeat = Heartbeat()
    name: str = ""
    """Name of the process in its events; empty: it names itself."""


class LenderAddress(msgspec.Struct, frozen=True, array_like=True):
    """Address and epoch under which other processes find its loans."""

    address: Address
    epoch: int
    """Epoch of the process: leases of an earlier process at the same address are unknown to it."""


class FetchKV(msgspec.Struct, array_like=True, tag=True):
    """Request to fetch a prompt's KV from the process that computes it; the request, or DropKV, follows later."""

    import_id: int
    request_id: str
    token_ids: tuple[int, ...]
    cache_salt: str | None
    source: KVSource


class DropKV(msgspec.Struct, array_like=True, tag=True):
    """Notice that no request will come for a prefix that is, or was, fetched."""

    import_id: int


class KVFetched(msgspec.Struct, array_like=True, tag=True):
    """Notice from a thread of the same process: the bytes of an import have arrived, or failed to."""

    import_id: int
    fetched: Fetched


class EndHold(msgspec.Struct, array_like=True, tag=True):
    """Notice from a thread of the same process: nothing reads these blocks any more."""

    hold_id: int
