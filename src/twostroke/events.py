"""The event log: what went into the scheduler and what it decided, enough to decide it all again.

    EngineStarted ─► RequestArrived ─► StepScheduled ─► StepCommitted ─► … ─► RequestFinishedByCaller
     the settings      an input         an outcome         an input               an input

Inputs stand in the order in which they reached the scheduler, so scheduler/replay.py can feed them to a fresh one and
compare every decision. There are counts, ids and hashes in it, no token ids and no text: a log may be shown around.
(A salted hash tells nobody anything; an unsalted one lets somebody who has guessed a whole block's tokens check it.)

One event is one line of JSON: {"v": 1, "event": "StepScheduled", …}. Every event has the process it comes from and
the time on that process's monotonic clock, in seconds.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

from twostroke.batch import Commit, ScheduledBatch
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
    """Which model: a name and what identifies its weights."""
    machine: MachineLimits | None = None
    """What the costs of steps are held against."""
    speculation: dict[str, Any] | None = None
    """Fields of SpeculativeConfig; None where nobody drafts."""
    max_drafts: int | None = None
    """Most tokens in a row that who drafts can guess; None: any number."""
    step_times: StepTimeModel | None = None
    """By which steps are kept below a limit of time, where there is one."""
    weight_bytes: int | None = None
    """Of all weights, of all ranks together; of experts a step may read fewer. None: in logs of before."""


@dataclass(frozen=True, slots=True)
class MeasurementBegan:
    """A benchmark begins here; what came before warmed the engine up. Nothing is decided by it."""

    time_s: float
    process: str


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """A request entered the queue."""

    time_s: float
    process: str
    request_id: str
    arrival: Arrival
    seed: int | None = None
    """Of the noise its tokens are drawn with, given or assigned."""
    cache_salt: str | None = None
    submitted_time_s: float | None = None
    """When it was ready (tokenized, checked) and handed to the engine, which takes requests between two steps."""


@dataclass(frozen=True, slots=True)
class RequestFinishedByCaller:
    """A request was ended from outside: aborted, or its text holds a stop string. Of pools, the gateway says it, too:
    nobody else may know."""

    time_s: float
    process: str
    request_id: str
    reason: FinishReason
    num_output_tokens: int | None = None
    """Tokens that count as output where a stop string cut off others that were committed; None: all."""


@dataclass(frozen=True, slots=True)
class StepScheduled:
    """A step was decided at `time_s`, which is what the scheduler was told."""

    time_s: float
    process: str
    batch: ScheduledBatch
    """The whole outcome, block ids included."""
    cost: StepCost | None = None
    """What the step asks of the machine, and whether compute or memory binds; None when nobody measured the machine."""


@dataclass(frozen=True, slots=True)
class StepCommitted:
    """The result of a step was taken in."""

    time_s: float
    process: str
    step: int
    commits: tuple[Commit, ...]
    operator_time_s: float = 0.0
    """Of the step, in the model's operators."""
    accounted_time_s: float | None = None
    """When the engine was done with it; `time_s` is when the result was there, which is its tokens' time."""
    draft_time_s: float = 0.0
    """Of the step, in guessing drafts."""


@dataclass(frozen=True, slots=True)
class PrefixCacheReset:
    """Every cached prefix was forgotten, by an administrator."""

    time_s: float
    process: str


@dataclass(frozen=True, slots=True)
class KVBlockChecked:
    """A cached block was computed again, for the step that was just decided. An input: `quarantined` changes the pool,
    and `suspects` is what came of it."""

    time_s: float
    """When the verdict was there."""
    process: str
    begin_s: float
    """From here on everybody who runs waited for it."""
    request_id: str
    """Whose cached prefix it is a part of."""
    entry: int
    """Which block of that prefix: the one that was checked, or, where something is quarantined, the first bad one."""
    verdict: Verdict
    num_differences: int = 0
    """Numbers that are not as they were computed again."""
    first_layer: int | None = None
    """The first layer with one."""
    largest_difference: float | None = 0.0
    """As in KVDifference; None is one that is not finite."""
    quarantined: tuple[int | None, ...] = ()
    """Per KV group the block that was taken out of use, None for none; empty unless the verdict is corruption."""
    suspects: Suspects = NO_SUSPECTS


@dataclass(frozen=True, slots=True)
class RequestRouted:
    """A gateway has decided which of its workers run a request. No engine writes this."""

    time_s: float
    process: str
    request_id: str
    """As the workers know it."""
    decode: str
    prefill: str | None
    """Who computes its prompt and hands the KV over; None: who decodes does it all."""
    reason: str
    """In words."""


@dataclass(frozen=True, slots=True)
class PoolScaled:
    """A gateway has given one of its pools another size. No engine writes this."""

    time_s: float
    process: str
    pool: str
    num_workers: int
    """That stayed so far."""
    num_wanted: int
    reason: str
    """In words."""


@dataclass(frozen=True, slots=True)
class KVImportBegan:
    """Blocks were taken for a prefix that is fetched from another process; an input, and what came of it."""

    time_s: float
    process: str
    import_id: int
    request_id: str
    """Of the request whose prefix it is, which arrives when all is here."""
    block_hashes: tuple[bytes, ...]
    num_tokens: int
    """Of the prefix; whole blocks."""
    rows: tuple[tuple[int, ...], ...]
    """Per KV group the blocks that it is to lie in."""


@dataclass(frozen=True, slots=True)
class KVImportEnded:
    """The fetching of a prefix is over."""

    time_s: float
    process: str
    import_id: int
    request_id: str
    problem: str = ""
    """Why not all of it has come; empty: it has, and requests find it from now on."""
    num_bytes: int = 0
    """That were fetched."""
    begin_s: float = 0.0
    """When it was asked for."""
    first_byte_s: float = 0.0
    """When the first of it came; 0: none has."""
    busy_s: float = 0.0
    """While bytes came: without the time in which they were still to be computed."""
    drift: str = ""
    """How the numerics of who computed it differ, where that was allowed."""
    last_byte_s: float = 0.0
    """Time at which all of it had arrived and the lender had confirmed it, or fetching had failed; 0: not known. The
    engine notes it between two steps, at `time_s`."""

    @property
    def done_s(self) -> float:
        """Time at which it ended, whether or not the engine had noted it."""
        return self.last_byte_s or self.time_s


@dataclass(frozen=True, slots=True)
class KVHoldEnded:
    """Blocks on loan are fetched, or nobody came for them; or an import has no request any more."""

    time_s: float
    process: str
    hold_id: int


@dataclass(frozen=True, slots=True)
class EngineLost:
    """The engine died with everything it ran. Whoever had started it writes this; no engine does."""

    time_s: float
    process: str
    cause: str


@dataclass(frozen=True, slots=True)
class MemorySampled:
    """How much memory the engine's process takes, every now and then while it works."""

    time_s: float
    process: str
    anonymous_bytes: int
    """Resident, without what maps files or is shared."""


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
    """Here a history has a gap: whoever kept it had room for what follows only. No engine writes this."""

    time_s: float
    """Of the event behind the gap."""
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
    | TokensDelivered
    | EventsDropped
)


THESE_EVENTS = "these events"
"""Value of a refusal of events that a program holds. Commands put the file or the server in its place."""


def event_log_with_a_gap(gap: EventsDropped) -> InvalidParameter:
    """The refusal of those who need every event from the beginning."""
    return InvalidParameter(
        "event_log",
        THESE_EVENTS,
        f"must hold every event from the engine's start; it lacks {gap.num_events} before {gap.time_s:.3f} s",
        "Give a file that --event-log wrote.",
    )


class EventLog(Protocol):
    """Takes events, in their order."""

    def append(self, event: Event, /) -> None:
        """Keeps one event."""
        ...


class EventRing(deque[Event]):
    """Keeps the last `capacity` events in memory."""

    def __init__(self, capacity: int) -> None:
        super().__init__(maxlen=capacity)
