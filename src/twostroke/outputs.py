"""What a caller gets back, in vLLM's names and shapes; and what is measured of it.

RequestTimes is the one definition of each duration, DraftOutcomes of each count of drafts."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from twostroke.request import FinishReason


@dataclass(slots=True)
class RequestTimes:
    """Points in time on one clock, in seconds; collected by whoever reads an engine's updates or its event log.

        arrival   scheduled   token 1   token 2, 3    token 4 = end
           |----------|----------|----------|-------------|
            queue_time             itl[0]      itl[2]              itl[1] = 0: tokens 2 and 3 left one step together
           |------- ttft --------|
           |------------------------ e2e -----------------|        tpot = (e2e - ttft) / 3

    A token's time is when the step that made it gave its result to the engine, before the text is made and sent.
    Durations need a token: a request that never got one has none.
    """

    arrival_s: float
    scheduled_s: float | None = None
    """When it ran for the first time."""
    token_times_s: list[float] = field(default_factory=list[float])
    finish_s: float | None = None
    """When it ended, if that was not with its last token (abort)."""
    num_preemptions: int = 0
    drafts: DraftTally | None = None
    """What became of its drafts; None where none was verified."""

    @property
    def queue_time_s(self) -> float:
        """Arrival until first scheduled."""
        assert self.scheduled_s is not None, f"never ran: {self}"
        return self.scheduled_s - self.arrival_s

    @property
    def ttft_s(self) -> float:
        """Arrival until the first token was there."""
        return self.token_times_s[0] - self.arrival_s

    @property
    def e2e_s(self) -> float:
        """Arrival until the end."""
        return (self.token_times_s[-1] if self.finish_s is None else self.finish_s) - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """(e2e - ttft) / (tokens - 1); None for a single token."""
        num_gaps = len(self.token_times_s) - 1
        return (self.e2e_s - self.ttft_s) / num_gaps if num_gaps else None

    @property
    def itl_s(self) -> tuple[float, ...]:
        """Gaps between consecutive tokens."""
        return tuple(later - earlier for earlier, later in itertools.pairwise(self.token_times_s))


# ---------------------------------------------------------------------- drafts
#
#     pass      fed      drafts        taken         counts
#     1         t0       d1 d2 d3      d1 d2 t3      3 tokens: 3 drafts verified, 2 stood (positions 0 and 1)
#     2         t3                     t4            1 token:  no drafts
#                                                    2 passes, 4 tokens: 2 a pass
#
# A pass gives one token whatever becomes of its drafts, and one more for each that stood: tokens = passes + accepted.
# Where a sequence ends within a pass, what is behind its end is no token of its, and no draft that stood.


def num_accepted(num_tokens: int, num_draft_tokens: int) -> int:
    """Drafts of a pass that stood.

    Args:
        num_tokens: that the pass gave, after everything that cuts them short.
        num_draft_tokens: that it verified.

    >>> num_accepted(3, 3), num_accepted(1, 3), num_accepted(1, 0), num_accepted(0, 3)
    (2, 0, 0, 0)
    """
    return max(0, min(num_tokens - 1, num_draft_tokens))


@dataclass(frozen=True, slots=True)
class DraftOutcomes:
    """What became of all drafts, over the passes that gave tokens; the one that read the prompt's end is among them."""

    num_passes: int
    """Of the target model, each for one sequence."""
    num_tokens: int
    """That they gave."""
    num_verifying_passes: int
    """Those with drafts."""
    num_draft_tokens: int
    """Verified."""
    num_accepted_tokens: int
    """Drafts that stood: num_tokens - num_passes."""
    num_accepted_tokens_per_pos: tuple[int, ...]
    """The same by their position among the drafts of their pass, from 0, up to the last where one was verified."""
    tokens_per_pass: float
    """num_tokens / num_passes."""


@dataclass(slots=True)
class DraftTally:
    """Counts passes as they come.

    >>> tally = DraftTally()
    >>> tally.passed(3, 3), tally.passed(1, 0)
    (None, None)
    >>> DraftTally.total([tally]).num_accepted_tokens_per_pos
    (1, 1, 0)
    """

    num_passes: int = 0
    num_tokens: int = 0
    num_verifying_passes: int = 0
    num_draft_tokens: int = 0
    accepted_at: list[int] = field(default_factory=list[int])
    """By position."""

    @classmethod
    def without_drafts(cls, num_tokens: int) -> DraftTally:
        """Return the tally of passes that had no drafts: each gave one token."""
        return cls(num_tokens, num_tokens)

    def passed(self, num_tokens: int, num_draft_tokens: int) -> None:
        """A pass gave so many tokens and verified so many drafts; one without tokens (a chunk of a prompt) is none."""
        if not num_tokens:
            return
        self.num_passes += 1
        self.num_tokens += num_tokens
        if num_draft_tokens:
            self.num_verifying_passes += 1
            self.num_draft_tokens += num_draft_tokens
            self.accepted_at += [0] * (num_draft_tokens - len(self.accepted_at))
            for position in range(num_accepted(num_tokens, num_draft_tokens)):
                self.accepted_at[position] += 1

    @staticmethod
    def total(tallies: Iterable[DraftTally]) -> DraftOutcomes | None:
        """Of several sequences together; None where no draft was verified."""
        those = list(tallies)
        if not any(tally.num_draft_tokens for tally in those):
            return None
        deepest = max(len(tally.accepted_at) for tally in those)
        per_pos = tuple(
            sum(tally.accepted_at[position] for tally in those if position < len(tally.accepted_at))
            for position in range(deepest)
        )
        num_passes, num_tokens = sum(t.num_passes for t in those), sum(t.num_tokens for t in those)
        return DraftOutcomes(
            num_passes=num_passes,
            num_tokens=num_tokens,
            num_verifying_passes=sum(t.num_verifying_passes for t in those),
            num_draft_tokens=sum(t.num_draft_tokens for t in those),
            num_accepted_tokens=sum(per_pos),
            num_accepted_tokens_per_pos=per_pos,
            tokens_per_pass=num_tokens / num_passes,
        )


# ---------------------------------------------------------------------- outputs


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log-probability at one position."""

    logprob: float
    rank: int
    """1 is the most likely token."""
    decoded_token: str


LogprobsAtPosition = dict[int, Logprob]
"""Token id to its log-probability: the chosen token first, then the most likely ones."""


NumericDrift = dict[str, list[str]]
"""Differing settings or facts of the workers that made an answer: by name, the values in order of first use, such as
`{"kv_cache_dtype": ["int8", "bf16"]}`. Empty: all workers compute with the same numerics."""


def merged_drift(one: NumericDrift, other: NumericDrift) -> NumericDrift:
    """Return the values of both under each name, without duplicates.

    >>> merged_drift({"dtype": ["float32"]}, {"dtype": ["bfloat16", "float32"], "kernels": ["amx"]})
    {'dtype': ['float32', 'bfloat16'], 'kernels': ['amx']}
    """
    names = dict.fromkeys([*one, *other])
    return {name: list(dict.fromkeys([*one.get(name, []), *other.get(name, [])])) for name in names}


def drift_words(drift: NumericDrift) -> str:
    """Return the values under each name as readable text.

    >>> drift_words({"kv_cache_dtype": ["int8", "bf16"], "dtype": ["float32", "bfloat16"]})
    'kv_cache_dtype int8 and bf16, dtype float32 and bfloat16'
    """
    return ", ".join(f"{name} {' and '.join(values)}" for name, values in drift.items())


class CompletionOutput(msgspec.Struct):
    """One generated sequence."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: list[LogprobsAtPosition] | None
    cumulative_logprob: float | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    """The stop string or stop token id that ended it; None at an end-of-text token."""
    seed: int
    """The seed its tokens were drawn with, given or assigned: with it the request can be repeated exactly."""


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Where the time of a request went, in seconds; with several sequences (`n`), as its caller lived through it."""

    arrival_time_s: float
    queue_time_s: float
    """Arrival until the first of its sequences was scheduled."""
    ttft_s: float
    """Arrival until the first token, of any sequence, was there."""
    tpot_s: float | None
    """Of the sequence that ended last: mean gap between its tokens; None for a single token."""
    itl_s: tuple[float, ...]
    """Of the sequence that ended last: gaps between consecutive tokens."""
    e2e_s: float
    """Arrival until the last sequence ended."""
    num_preemptions: int
    """Of all sequences together."""
    drafts: DraftOutcomes | None = None
    """Of all sequences together: what became of drafts; None where none was verified."""

    @classmethod
    def of(cls, sequences: Sequence[RequestTimes]) -> RequestMetrics | None:
        """Of the sequences of one request; None when no token was ever made."""
        served = [times for times in sequences if times.token_times_s]
        if not served:
            return None
        last = max(served, key=lambda times: times.e2e_s)
        return cls(
            arrival_time_s=last.arrival_s,
            queue_time_s=min(times.queue_time_s for times in served),
            ttft_s=min(times.ttft_s for times in served),
            tpot_s=last.tpot_s,
            itl_s=last.itl_s,
            e2e_s=last.e2e_s,
            num_preemptions=sum(times.num_preemptions for times in sequences),
            drafts=DraftTally.total(
                times.drafts or DraftTally.without_drafts(len(times.token_times_s)) for times in sequences
            ),
        )


class RequestOutput(msgspec.Struct):
    """The answer to one prompt; while streaming, what is there so far."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: Sequence[LogprobsAtPosition | None] | None
    """By position, the first of which has none. Entries are made when they are read."""
    outputs: list[CompletionOutput] = []
    finished: bool = False
    num_cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache."""
    times: Sequence[RequestTimes] = ()
    """Of each sequence, once all have ended; `metrics` is read off them."""
    error: str | None = None
    """Why it ended with finish_reason "error"."""
    numeric_drift: NumericDrift = {}
    """Differences between the processes that ran it, where drift is allowed. One process alone may have answered with
    other tokens."""
    hidden_state: bytes | None = None
    """Of the prompt's last token behind the final norm, where that was asked for: float32 [hidden_size]."""

    @property
    def metrics(self) -> RequestMetrics | None:
        """Where the time of the request went; None before its end, and where no token was ever made."""
        return RequestMetrics.of(self.times)


class JoinedDeltas:
    """The deltas of one request, joined: what a single output at the end would have been."""

    def __init__(self) -> None:
        self._last: RequestOutput | None = None
        self._prompt_logprobs: Sequence[LogprobsAtPosition | None] | None = None
        self._parts: dict[int, list[CompletionOutput]] = {}

    def add(self, delta: RequestOutput) -> None:
        """Takes the next one."""
        if self._last is None:
            self._prompt_logprobs = delta.prompt_logprobs
        self._last = delta
        for part in delta.outputs:
            self._parts.setdefault(part.index, []).append(part)

    def joined(self) -> RequestOutput:
        """All of them; there must be one at least."""
        assert self._last is not None, "nothing to join"
        outputs = [_joined(self._parts[index]) for index in sorted(self._parts)]
        return replace(self._last, outputs=outputs, prompt_logprobs=self._prompt_logprobs)


def _joined(parts: Sequence[CompletionOutput]) -> CompletionOutput:
    last = parts[-1]
    return replace(
        last,
        text="".join(part.text for part in parts),
        token_ids=tuple(token_id for part in parts for token_id in part.token_ids),
        logprobs=None if last.logprobs is None else [entry for part in parts for entry in part.logprobs or ()],
    )
