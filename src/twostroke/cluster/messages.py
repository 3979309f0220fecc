"""Messages between the two processes of a server: msgpack over two one-way ZeroMQ sockets.

    HTTP process                                               engine process
    ────────────                                               ──────────────
    StartEngine(config)        ──────────────────────────────►   loads the model
                               ◄──────────────────────────────   EngineReady(facts) | Refused(reason)
    Add, Finish, ResetPrefixCache, Stop  ────────────────────►   between steps
    FetchKV, DropKV
                               ◄──────────────────────────────   Progress(updates, events), once a step
                               ◄──────────────────────────────   Alive, if nothing else was sent for a while

Neither end waits for the other: sends are queued, and a process with work to do polls for messages without blocking.
Messages carry token ids; text and templates stay in the HTTP process.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from twostroke.config.engine import EngineConfig
from twostroke.config.path_codec import plain_path, read_path
from twostroke.cost.step_cost import MachineLimits
from twostroke.engine.facts import EngineFacts
from twostroke.engine.generation import GenerationRequest
from twostroke.engine.handover_messages import DropKV, EndHold, FetchKV, HandoverSettings, KVFetched, LenderAddress
from twostroke.engine.heartbeat import Heartbeat
from twostroke.engine.token_update import TokenUpdate
from twostroke.event_codec import PackedEvent
from twostroke.kv_transfer.geometry import KVGeometry
from twostroke.request import FinishReason


class _Message(msgspec.Struct, array_like=True, tag=True):
    """A message of one of the unions below, tagged with its name."""


class StartEngine(_Message):
    """The first message to an engine process: the engine to load."""

    config: EngineConfig
    handover: HandoverSettings | None = None
    """Hand-over settings; None: no KV is handed over."""
    clock_ahead_s: float = 0.0
    """Seconds by which its machine's clock is ahead of the gateway's; the process subtracts them from its times."""
    machine: MachineLimits | None = None
    """Limits of its machine; None: it measures them."""
    heartbeat: Heartbeat | None = None
    """Heartbeat of an engine that hands no KV over; None: none, or `handover` has it."""


class Add(_Message):
    """Request to run a sequence."""

    request: GenerationRequest


class Finish(_Message):
    """Request to end a sequence."""

    request_id: str
    reason: FinishReason
    num_output_tokens: int | None = None


class ResetPrefixCache(_Message):
    """Request to forget the cached prefixes that no running request uses."""


class Stop(_Message):
    """Request to end the process at once, without reports of what still runs."""


Command = StartEngine | Add | Finish | ResetPrefixCache | FetchKV | DropKV | KVFetched | EndHold | Stop


class EngineReady(_Message):
    """Report that the model is loaded."""

    facts: EngineFacts
    lender: LenderAddress | None = None
    """Address at which its KV can be fetched; None: it lends none."""
    geometry: KVGeometry | None = None
    """Identity, numerics and layout of its KV, in a pool."""
    machine: MachineLimits | None = None
    """Limits of its machine."""
    imports_s: float = 0.0
    """Seconds from the process's start to the end of its imports; 0: it was forked from a process that had imported
    all."""
    ready_s: float = 0.0
    """Seconds from the process's start to this report."""


class Refused(_Message):
    """Report that the engine cannot be loaded as configured."""

    reason: str


class Failed(_Message):
    """Last report of a process that ends because a step left the engine's state inconsistent."""

    reason: str


class Alive(_Message):
    """Heartbeat from a separate thread: the process runs, however long its step takes."""


class Progress(_Message):
    """Report of the tokens and events since the last one, in order."""

    updates: Sequence[TokenUpdate]
    events: Sequence[PackedEvent]
    sent_s: float = 0.0
    """Time at which it was queued, on the clock shared by all processes of a machine."""


class CacheWasReset(_Message):
    """Reply to ResetPrefixCache."""

    had_blocks: bool


Report = EngineReady | Refused | Failed | Alive | Progress | CacheWasReset


encode_message = msgspec.msgpack.Encoder(enc_hook=plain_path).encode
"""Encoder of commands and reports to bytes."""
decode_command = msgspec.msgpack.Decoder[Command](Command, dec_hook=read_path).decode
"""Decoder of commands."""
decode_report = msgspec.msgpack.Decoder[Report](Report, dec_hook=read_path).decode
"""Decoder of reports."""
