"""What the two processes of a server say to each other: msgpack over two one-way ZeroMQ sockets.

    HTTP process                                               engine process
    ────────────                                               ──────────────
    StartEngine(config)        ──────────────────────────────►   loads the model
                               ◄──────────────────────────────   EngineReady(facts) | Refused(reason)
    Add, Finish, ResetPrefixCache, Stop  ────────────────────►   between steps
    FetchKV, DropKV
                               ◄──────────────────────────────   Progress(updates, events), once a step
                               ◄──────────────────────────────   Alive, where nothing else was said for a while

Neither end ever waits for the other: sending is queueing, and who has work to do only looks whether something came.
Token ids only; text and templates stay in the HTTP process.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from twostroke.config.engine import EngineConfig
from twostroke.config.path_codec import plain_path, read_path
from twostroke.cost.step_cost import MachineLimits
from twostroke.engine.facts import EngineFacts
from twostroke.engine.generation import GenerationRequest
from twostroke.engine.handover_port import DropKV, EndHold, FetchKV, HandoverPort, KVFetched, LenderFacts
from twostroke.engine.heartbeat import Heartbeat
from twostroke.engine.token_update import TokenUpdate
from twostroke.event_codec import PackedEvent
from twostroke.kv_transfer.geometry import KVGeometry
from twostroke.request import FinishReason


class _Message(msgspec.Struct, array_like=True, tag=True):
    """One of a union; its name travels with it."""


class StartEngine(_Message):
    """The first message: what to load."""

    config: EngineConfig
    handover: HandoverPort | None = None
    """Where it hands KV over, and takes it; None: to nobody, from nobody."""
    clock_ahead_s: float = 0.0
    """How far the clock of its machine is ahead of the gateway's: what it tells meets what the gateway knows."""
    machine: MachineLimits | None = None
    """What its machine can do; None: it measures that."""
    heartbeat: Heartbeat | None = None
    """How an engine that hands nothing over shows that it lives; None: it does not, or `handover` says how."""


class Add(_Message):
    """A sequence to run."""

    request: GenerationRequest


class Finish(_Message):
    """A sequence to end."""

    request_id: str
    reason: FinishReason
    num_output_tokens: int | None = None


class ResetPrefixCache(_Message):
    """Forget what no running request uses."""


class Stop(_Message):
    """End the process; whatever runs ends without a word."""


Command = StartEngine | Add | Finish | ResetPrefixCache | FetchKV | DropKV | KVFetched | EndHold | Stop


class EngineReady(_Message):
    """The model is loaded."""

    facts: EngineFacts
    lender: LenderFacts | None = None
    """Where its KV can be fetched; None: nowhere."""
    geometry: KVGeometry | None = None
    """What it computes and by what, in a pool."""
    machine: MachineLimits | None = None
    """What its machine can do."""
    imports_s: float = 0.0
    """From the process's start to when it had imported everything; 0: it was forked from one that had."""
    ready_s: float = 0.0
    """From the process's start to now."""


class Refused(_Message):
    """It cannot be loaded as asked."""

    reason: str


class Failed(_Message):
    """A step broke the engine's books; the process ends with this."""

    reason: str


class Alive(_Message):
    """From a thread that does nothing else: the process runs, however long its step takes."""


class Progress(_Message):
    """What happened since the last one: a step's tokens, and every event in its order."""

    updates: Sequence[TokenUpdate]
    events: Sequence[PackedEvent]
    sent_s: float = 0.0
    """Time at which it was queued, on the clock that all processes of a machine share."""


class CacheWasReset(_Message):
    """The answer to ResetPrefixCache."""

    had_blocks: bool


Report = EngineReady | Refused | Failed | Alive | Progress | CacheWasReset


encode_message = msgspec.msgpack.Encoder(enc_hook=plain_path).encode
"""Return the bytes of a command or a report."""
decode_command = msgspec.msgpack.Decoder[Command](Command, dec_hook=read_path).decode
"""Return the command of some bytes."""
decode_report = msgspec.msgpack.Decoder[Report](Report, dec_hook=read_path).decode
"""Return the report of some bytes."""
