"""The event log: inputs and decisions of the scheduler, enough to replay all decisions.

    EngineStarted ─► RequestArrived ─► StepScheduled ─► StepCommitted ─► … ─► RequestFinishedByCaller
     the settings      an input         an outcome         an input               an input

Inputs are in the order in which they reached the scheduler, so scheduler/replay.py can feed them to a new one and
compare every decision. The log contains counts, ids and hashes, no token ids and no text, so it may be shared.
(A salted hash reveals nothing; an unsalted one lets a reader who has guessed a whole block's tokens verify the guess.)

One event is one line of JSON: {"v": 1, "event": "StepScheduled", …}. Every event has the process it comes from and
the time on that process's monotonic clock, in seconds.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

from twostroke.batch import Commit, ScheduledBatch
from twostroke.cost.expert_shares import ExpertShares
from twostroke.cost.step_cost import MachineLimits, StepCost
from twostroke.cost.step_model import StepTimeModel
from twostroke.errors import InvalidParameter
from twostroke.kv_check import NO_SUSPECTS, Suspects, Verdict
from twostroke.request import Arrival, FinishReason


@dataclass(frozen=True, slots=True)
class EngineStarted:
    """Everything the decisions depend on besides the requests."""

    time_s: float
    process: str
    scheduler: dict[str, Any]
    """Fields of SchedulerConfig."""
    cache: dict[str, Any]
    """Fields of CacheConfig."""
    layout: dict[str, Any]
    """Fields of KVLayout."""
    num_blocks: int
    max_model_len: int
    model: str
    """Name of the model and an identification of its weights."""
    machine: MachineLimits | None = None
    """Limits of the machine that the costs of steps are compared with."""
    speculation: dict[str, Any] | None = None
    """Fields of SpeculativeConfig; None without speculation."""
    max_drafts: int | None = None
    """Most tokens in a row that the drafter can propose; None: any number."""
    step_times: StepTimeModel | None = None
    """Model of step times that keeps steps below a time limit, if there is one."""
    weight_bytes: int | None = None
    """Bytes of all weights, of all ranks together; a step may read fewer, with experts. None in older logs."""


@dataclass(frozen=True, slots=True)
class MeasurementBegan:
    """Start of a benchmark; events before it warmed the engine up. No decision depends on it."""

    time_s: float
    process: str


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """A request that entered the queue."""

    time_s: float
    process: str
    request_id: str
    arrival: Arrival
    seed: int | None = None
    """Seed of the noise that its tokens are sampled with, given or assigned."""
    cache_salt: str | None = None
    submitted_time_s: float | None = None
    """Time at which it was ready (tokenized, checked) and handed to the engine, which takes requests between two
    steps."""


@dataclass(frozen=True, slots=True)
class RequestFinishedByCaller:
    """A request ended from outside: aborted, or its text contains a stop string. With pools the gateway writes it, too,
    since no other process may know."""

    time_s: float
    process: str
    request_id: str
    reason: FinishReason
    num_output_tokens: int | None = None
    """Tokens that count as output if a stop string cut off committed ones; None: all."""


@dataclass(frozen=True, slots=True)
class StepScheduled:
    """A step that was decided at `time_s`, which is the time that the scheduler was given."""

    time_s: float
    process: str
    batch: ScheduledBatch
    """The whole outcome, block ids included."""
    cost: StepCost | None = None
    """Cost of the step, and whether compute or memory binds; None if the machine was not measured."""


@dataclass(frozen=True, slots=True)
class StepCommitted:
    """A step whose result was applied."""

    time_s: float
    process: str
    step: int
    commits: tuple[Commit, ...]
    operator_time_s: float = 0.0
    """Time of the step in the model's operators."""
    accounted_time_s: float | None = None
    """Time at which the engine had processed it; `time_s` is when the result arrived, which is its tokens' time."""
    draft_time_s: float = 0.0
    """Time of the step for drafting."""


@dataclass(frozen=True, slots=True)
class PrefixCacheReset:
    """Reset of the prefix cache by an administrator."""

    time_s: float
    process: str


@dataclass(frozen=True, slots=True)
class KVBlockChecked:
    """A cached block that was recomputed, for the step that was just decided. An input: `quarantined` changes the pool,
    and `suspects` is the consequence."""

    time_s: float
    """Time of the verdict."""
    process: str
    begin_s: float
    """Time from which all running requests waited for the check."""
    request_id: str
    """Id of the request whose cached prefix contains it."""
    entry: int
    """Index of the checked block in that prefix or, if a block is quarantined, of the first bad one."""
    verdict: Verdict
    num_differences: int = 0
    """Numbers that differ from the recomputed ones."""
    first_layer: int | None = None
    """First layer with a difference."""
    largest_difference: float | None = 0.0
    """Largest difference, as in KVDifference; None if it is not finite."""
    quarantined: tuple[int | None, ...] = ()
    """Block taken out of use per KV group, None for none; empty unless the verdict is corruption."""
    suspects: Suspects = NO_SUSPECTS


@dataclass(frozen=True, slots=True)
class RequestRouted:
    """Routing decision of a gateway: the workers that run a request. No engine writes this."""

    time_s: float
    process: str
    request_id: str
    """Id of the request in the workers."""
    decode: str
    prefill: str | None
    """Worker that computes its prompt and hands the KV over; None: the decode worker does everything."""
    reason: str
    """Reason in words."""


@dataclass(frozen=True, slots=True)
class PoolScaled:
    """New size of a pool, set by a gateway. No engine writes this."""

    time_s: float
    process: str
    pool: str
    num_workers: int
    """Workers before the change."""
    num_wanted: int
    reason: str
    """Reason in words."""


@dataclass(frozen=True, slots=True)
class KVImportBegan:
    """Allocation of blocks for a prefix that is fetched from another process; an input with its outcome."""

    time_s: float
    process: str
    import_id: int
    request_id: str
    """Id of the request whose prefix it is; the request arrives when the prefix is complete."""
    block_hashes: tuple[bytes, ...]
    num_tokens: int
    """Tokens of the prefix; whole blocks."""
    rows: tuple[tuple[int, ...], ...]
    """Blocks for the prefix, per KV group."""


@dataclass(frozen=True, slots=True)
class KVImportEnded:
    """End of the fetching of a prefix."""

    time_s: float
    process: str
    import_id: int
    request_id: str
    problem: str = ""
    """Reason why part of it has not arrived; empty: all has arrived, and requests find it from now on."""
    num_bytes: int = 0
    """Fetched bytes."""
    begin_s: float = 0.0
    """Time of the request for it."""
    first_byte_s: float = 0.0
    """Time of the first byte; 0: none has arrived."""
    busy_s: float = 0.0
    """Seconds in which bytes arrived, without waiting for them to be computed."""
    drift: str = ""
    """Differences of the computing worker's numerics, if drift is allowed."""
    last_byte_s: float = 0.0
    """Time at which all of it had arrived and the lender had confirmed it, or fetching had failed; 0: not known. The
    engine notes it between two steps, at `time_s`."""

    @property
    def done_s(self) -> float:
        """Time at which it ended, whether or not the engine had noted it."""
        return self.last_byte_s or self.time_s


@dataclass(frozen=True, slots=True)
class KVHoldEnded:
    """End of a hold: lent blocks were fetched or given up, or an import's request is gone."""

    time_s: float
    process: str
    hold_id: int


@dataclass(frozen=True, slots=True)
class EngineLost:
    """Death of the engine with all its requests. The process that started it writes this; no engine does."""

    time_s: float
    process: str
    cause: str


@dataclass(frozen=True, slots=True)
class MemorySampled:
    """Memory of the engine's process, sampled at intervals while it works."""

    time_s: float
    process: str
    anonymous_bytes: int
    """Resident bytes, without mapped files and shared memory."""


@dataclass(frozen=True, slots=True)
class ExpertsMeasured:
    """Shares of the tokens so far that chose each expert; the costs of later steps follow from them."""

    time_s: float
    process: str
    shares: tuple[ExpertShares, ...]
    """For each kind of experts, in order of its first layer."""


@dataclass(frozen=True, slots=True)
class TokensDelivered:
    """The delivery of one engine report's tokens to their clients. The HTTP process records it, never an engine.

    The order is sampled_s <= sent_s <= received_s <= time_s.
    """

    time_s: float
    """Time at which the last token was written to its connection."""
    process: str
    sampled_s: float
    """Time of the step's result: `time_s` of its StepCommitted."""
    sent_s: float
    """Time at which the engine queued the report."""
    received_s: float
    """Time at which the HTTP process had read it."""


@dataclass(frozen=True, slots=True)
class EventsDropped:
    """Gap in a history: the buffer only held the later events. No engine writes this."""

    time_s: float
    """Time of the event after the gap."""
    process: str
    num_events: int


Event = (
    EngineStarted
    | MeasurementBegan
    | RequestArrived
    | RequestFinishedByCaller
    | StepScheduled
    | StepCommitted
    | PrefixCacheReset
    | KVBlockChecked
    | RequestRouted
    | PoolScaled
    | KVImportBegan
    | KVImportEnded
    | KVHoldEnded
    | EngineLost
    | MemorySampled
    | ExpertsMeasured
    | TokensDelivered
    | EventsDropped
)


UNNAMED_LOG = "these events"
"""Value in the error about events that a program holds. Commands replace it by the file or the server."""


def gap_error(gap: EventsDropped) -> InvalidParameter:
    """Return the error of readers that need every event from the beginning."""
    return InvalidParameter(
        "event_log",
        UNNAMED_LOG,
        f"must hold every event from the engine's start; it lacks {gap.num_events} before {gap.time_s:.3f} s",
        "Give a file that --event-log wrote.",
    )


class EventLog(Protocol):
    """Log that takes events, in their order."""

    def append(self, event: Event, /) -> None:
        """Keep one event."""
        ...


class EventRing(deque[Event]):
    """The last `capacity` events, in memory."""

    def __init__(self, capacity: int) -> None:
        super().__init__(maxlen=capacity)
