"""Data classes of an explanation: a request's time cut into labelled segments without gaps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from twostroke.batch import DraftReason
from twostroke.outputs import DraftOutcomes
from twostroke.request import FinishReason


class Label(StrEnum):
    """Cause of a segment's time; each millisecond has exactly one label."""

    PREPARE = "prepare"  # template, tokenizer, checks
    WAIT_STEP = "waited for a step"  # requests are taken in and admitted between steps
    WAIT_SLOTS = "waited for slots"  # max_num_seqs requests were running
    WAIT_TOKENS = "waited for tokens"  # other requests used up max_num_batched_tokens
    WAIT_KV = "waited for kv"  # no blocks for its prompt
    WAIT_PRIORITY = "waited for priority"  # more urgent requests that arrived later went first
    PREFILL = "prefill"  # a chunk of its prompt
    RECOMPUTE = "recompute"  # tokens that had been computed before, here or elsewhere
    DECODE = "decode"  # steps that gave it tokens
    STALLED = "stalled"  # such steps, or steps without it, lengthened by prefills of other requests
    KV_CHECK = "kv check"  # a cached block was computed again, before the step that would read it
    PREEMPTED = "preempted"  # its blocks were given to a more urgent request
    TRANSFER = "transfer"  # KV and notices on the network; a receiver's step counts as a wait
    RESUME = "resumed elsewhere"  # from the loss of the process that ran it until another has taken it in
    END = "end"  # between its last step and its end


@dataclass(frozen=True, slots=True)
class Culprit:
    """A request whose tokens delayed another one."""

    request_id: str
    num_tokens: int
    """Tokens computed for it meanwhile; in waits for KV, tokens that it held in memory."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A labelled span of a request's time, in seconds on the engine's clock."""

    label: Label
    start_s: float
    end_s: float
    reason: str
    """Cause in words."""
    num_steps: int = 0
    """Number of engine steps that it covers; steps that only began in it count as waits."""
    num_tokens: int = 0
    """Tokens of the request: computed in a prefill, generated in decodes."""
    because_of: tuple[Culprit, ...] = ()
    """Responsible requests, by falling tokens; the first few of `num_culprits`."""
    num_culprits: int = 0
    process: str = ""
    """Process that ran it; empty: none, or not known."""

    @property
    def duration_s(self) -> float:
        """Duration in seconds."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Lane:
    """Timeline of one sequence, one of the `n` outputs of a request.

    Segments follow each other without a gap: the first begins at `begin_s`, the last ends at `end_s`.
    """

    sequence_id: str
    begin_s: float
    """Arrival, or the time at which the history begins to know it."""
    end_s: float
    """Time of its last token or abort; of a live sequence, the latest time in the history."""
    segments: tuple[Segment, ...]
    finish_reason: FinishReason | None
    """None while it is live."""
    num_prompt_tokens: int | None
    num_cached_tokens: int | None
    num_output_tokens: int
    num_preemptions: int
    first_token_s: float | None
    drafts: DraftOutcomes | None = None
    """Outcomes of its drafts over its output tokens; None: none was verified."""
    draft_decisions: Mapping[DraftReason, int] = field(default_factory=dict[DraftReason, int])
    """Number of steps that gave it tokens, by the gate's decision about drafts; empty without a gate."""
    notes: tuple[str, ...] = ()
    """Limits of the history, and other remarks."""
    has_arrival: bool = True
    """Whether the history knows its arrival."""

    @property
    def is_complete(self) -> bool:
        """Whether the history knows its beginning and its end."""
        return self.has_arrival and self.finish_reason is not None

    @property
    def processes(self) -> tuple[str, ...]:
        """Processes that ran it, in order."""
        return tuple(dict.fromkeys(segment.process for segment in self.segments if segment.process))

    @property
    def duration_s(self) -> float:
        """End-to-end seconds, when it is complete."""
        return self.end_s - self.begin_s

    @property
    def ttft_s(self) -> float | None:
        """Seconds from arrival to the first token; None without either."""
        return None if self.first_token_s is None or not self.has_arrival else self.first_token_s - self.begin_s


@dataclass(frozen=True, slots=True)
class Timeline:
    """Explanation of a request: one lane per sequence."""

    request_id: str
    lanes: tuple[Lane, ...]

    @property
    def is_complete(self) -> bool:
        """Whether every lane is complete."""
        return all(lane.is_complete for lane in self.lanes)

    @property
    def begin_s(self) -> float:
        """Begin of its first lane."""
        return min(lane.begin_s for lane in self.lanes)

    @property
    def end_s(self) -> float:
        """End of its last lane."""
        return max(lane.end_s for lane in self.lanes)

    def to_dict(self) -> dict[str, Any]:
        """Return a dict for JSON: times in milliseconds since the request's begin, in whole nanoseconds.

        Times are rounded first, and durations are differences of rounded times. As decimal numbers, which JSON
        writes, the segments of a lane therefore add up exactly to its whole.
        """
        return {
            "request_id": self.request_id,
            "is_complete": self.is_complete,
            "begin_s": self.begin_s,
            "e2e_ms": _ms_between(self.begin_s, self.end_s),
            "lanes": [_lane_fields(lane, self.begin_s) for lane in self.lanes],
        }


def _lane_fields(lane: Lane, origin_s: float) -> dict[str, Any]:
    first_token_s = lane.first_token_s if lane.has_arrival else None
    return {
        "sequence_id": lane.sequence_id,
        "is_complete": lane.is_complete,
        "finish_reason": None if lane.finish_reason is None else str(lane.finish_reason),
        "e2e_ms": _ms_between(lane.begin_s, lane.end_s),
        "ttft_ms": None if first_token_s is None else _ms_between(lane.begin_s, first_token_s),
        "ttft_parts_ms": None if first_token_s is None else _parts(lane.segments, first_token_s),
        "num_prompt_tokens": lane.num_prompt_tokens,
        "num_cached_tokens": lane.num_cached_tokens,
        "num_output_tokens": lane.num_output_tokens,
        "num_preemptions": lane.num_preemptions,
        "drafts": None if lane.drafts is None else asdict(lane.drafts),
        "draft_decisions": {str(reason): num_steps for reason, num_steps in lane.draft_decisions.items()},
        "notes": list(lane.notes),
        "segments": [
            {
                "label": str(segment.label),
                "start_ms": _ms_between(origin_s, segment.start_s),
                "duration_ms": _ms_between(segment.start_s, segment.end_s),
                "reason": segment.reason,
                "num_steps": segment.num_steps,
                "num_tokens": segment.num_tokens,
                "because_of": [
                    {"request_id": culprit.request_id, "num_tokens": culprit.num_tokens}
                    for culprit in segment.because_of
                ],
                "num_culprits": segment.num_culprits,
                "process": segment.process,
            }
            for segment in lane.segments
        ],
    }


def _parts(segments: Sequence[Segment], until_s: float) -> dict[str, float]:
    """Return the milliseconds before a time by label, in order of first occurrence; they cover all of that time."""
    parts_ns: dict[str, int] = {}
    for segment in segments:
        if segment.start_s < until_s:
            took_ns = _ns(min(segment.end_s, until_s)) - _ns(segment.start_s)
            parts_ns[str(segment.label)] = parts_ns.get(str(segment.label), 0) + took_ns
    return {label: took_ns / 1e6 for label, took_ns in parts_ns.items()}


def _ns(moment_s: float) -> int:
    return round(moment_s * 1e9)


def _ms_between(start_s: float, end_s: float) -> float:
    return (_ns(end_s) - _ns(start_s)) / 1e6
