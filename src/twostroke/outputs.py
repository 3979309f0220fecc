"""Outputs for callers, in vLLM's names and shapes, with their measurements.

RequestTimes is the one definition of each duration, DraftOutcomes of each count of drafts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from twostroke.request import FinishReason


@dataclass(slots=True)
class RequestTimes:
    """Points in time of one request on one clock, in seconds, from an engine's updates or its event log.

        arrival   scheduled   token 1   token 2, 3    token 4 = end
           |----------|----------|----------|-------------|
            queue_time             itl[0]      itl[2]              itl[1] = 0: tokens 2 and 3 left one step together
           |------- ttft --------|
           |------------------------ e2e -----------------|        tpot = (e2e - ttft) / 3

    A token's time is when its step gave the result to the engine, before the text is made and sent.
    Durations need a token: a request that never got one has none.
    """

    arrival_s: float
    scheduled_s: float | None = None
    """Time of its first step."""
    token_times_s: list[float] = field(default_factory=list[float])
    finish_s: float | None = None
    """Time of its end, if that was not with its last token (abort)."""
    num_preemptions: int = 0
    drafts: DraftTally | None = None
    """Counts of its drafts; None if none was verified."""

    @property
    def queue_time_s(self) -> float:
        """Seconds from arrival until first scheduled."""
        assert self.scheduled_s is not None, f"never ran: {self}"
        return self.scheduled_s - self.arrival_s

    @property
    def ttft_s(self) -> float:
        """Seconds from arrival until the first token."""
        return self.token_times_s[0] - self.arrival_s

    @property
    def e2e_s(self) -> float:
        """Seconds from arrival until the end."""
        return (self.token_times_s[-1] if self.finish_s is None else self.finish_s) - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """(e2e - ttft) / (tokens - 1); None for a single token."""
        num_gaps = len(self.token_times_s) - 1
        return (self.e2e_s - self.ttft_s) / num_gaps if num_gaps else None

    @property
    def itl_s(self) -> tuple[float, ...]:
        """Gaps between consecutive tokens, in seconds."""
        return tuple(later - earlier for earlier, later in itertools.pairwise(self.token_times_s))


# ---------------------------------------------------------------------- drafts
#
#     pass      fed      drafts        taken         counts
#     1         t0       d1 d2 d3      d1 d2 t3      3 tokens: 3 drafts verified, 2 accepted (positions 0 and 1)
#     2         t3                     t4            1 token:  no drafts
#                                                    2 passes, 4 tokens: 2 a pass
#
# A pass gives one token, and one more for each accepted draft: tokens = passes + accepted.
# If a sequence ends within a pass, what follows its end counts neither as a token nor as an accepted draft.


def num_accepted(num_tokens: int, num_draft_tokens: int) -> int:
    """Return the accepted drafts of a pass.

    Args:
        num_tokens: tokens of the pass, after every cut.
        num_draft_tokens: drafts that it verified.

    >>> num_accepted(3, 3), num_accepted(1, 3), num_accepted(1, 0), num_accepted(0, 3)
    (2, 0, 0, 0)
    """
    return max(0, min(num_tokens - 1, num_draft_tokens))


@dataclass(frozen=True, slots=True)
class DraftOutcomes:
    """Outcomes of all drafts, over the passes that gave tokens, including the one that completed the prompt."""

    num_passes: int
    """Passes of the target model, counted per sequence."""
    num_tokens: int
    """Tokens that these passes gave."""
    num_verifying_passes: int
    """Passes with drafts."""
    num_draft_tokens: int
    """Verified drafts."""
    num_accepted_tokens: int
    """Accepted drafts: num_tokens - num_passes."""
    num_accepted_tokens_per_pos: tuple[int, ...]
    """Accepted drafts by position in their pass, from 0, up to the last position that was verified."""
    tokens_per_pass: float
    """Mean tokens per pass: num_tokens / num_passes."""


@dataclass(slots=True)
class DraftTally:
    """Counter of passes and their drafts.

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
    """Accepted drafts by position."""

    @classmethod
    def without_drafts(cls, num_tokens: int) -> DraftTally:
        """Return the tally of passes that had no drafts: each gave one token."""
        return cls(num_tokens, num_tokens)

    def passed(self, num_tokens: int, num_draft_tokens: int) -> None:
        """Count a pass; one without tokens (a chunk of a prompt) does not count."""
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
        """Return the outcomes of several sequences together; None if no draft was verified."""
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
    """Rank of the token; 1 is the most likely."""
    decoded_token: str


LogprobsAtPosition = dict[int, Logprob]
"""Log-probability by token id: the chosen token first, then the most likely ones."""


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


def drift_description(drift: NumericDrift) -> str:
    """Return the values under each name as readable text.

    >>> drift_description({"kv_cache_dtype": ["int8", "bf16"], "dtype": ["float32", "bfloat16"]})
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
    """Stop string or stop token id that ended it; None at an end-of-text token."""
    seed: int
    """Seed its tokens were sampled with, given or assigned: with it the request can be repeated exactly."""


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Durations of a request in seconds; with several sequences (`n`), as its caller observed them."""

    arrival_time_s: float
    queue_time_s: float
    """Seconds from arrival until the first of its sequences was scheduled."""
    ttft_s: float
    """Seconds from arrival until the first token of any sequence."""
    tpot_s: float | None
    """Mean gap between the tokens of the sequence that ended last; None for a single token."""
    itl_s: tuple[float, ...]
    """Gaps between consecutive tokens of the sequence that ended last."""
    e2e_s: float
    """Seconds from arrival until the last sequence ended."""
    num_preemptions: int
    """Preemptions of all sequences together."""
    drafts: DraftOutcomes | None = None
    """Draft outcomes of all sequences together; None if no draft was verified."""

    @classmethod
    def of(cls, sequences: Sequence[RequestTimes]) -> RequestMetrics | None:
        """Return the metrics of one request's sequences; None if no token was ever made."""
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
    """The answer to one prompt; while streaming, the part so far."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: Sequence[LogprobsAtPosition | None] | None
    """Entries by position; the first is None. Entries are made when they are read."""
    outputs: list[CompletionOutput] = []
    finished: bool = False
    num_cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache."""
    times: Sequence[RequestTimes] = ()
    """Times of each sequence, once all have ended; `metrics` is computed from them."""
    error: str | None = None
    """Reason for finish_reason "error"."""
    numeric_drift: NumericDrift = {}
    """Differences between the processes that ran it, if drift is allowed. One of these processes alone might have made
    other tokens."""
    hidden_state: bytes | None = None
    """Hidden state of the prompt's last token after the final norm, if requested: float32 [hidden_size]."""

    @property
    def metrics(self) -> RequestMetrics | None:
        """Durations of the request; None before its end, and if no token was ever made."""
        return RequestMetrics.of(self.times)


class JoinedDeltas:
    """The joined deltas of one request: equal to a single output at the end."""

    def __init__(self) -> None:
        self._last: RequestOutput | None = None
        self._prompt_logprobs: Sequence[LogprobsAtPosition | None] | None = None
        self._parts: dict[int, list[CompletionOutput]] = {}

    def add(self, delta: RequestOutput) -> None:
        """Add the next delta."""
        if self._last is None:
            self._prompt_logprobs = delta.prompt_logprobs
        self._last = delta
        for part in delta.outputs:
            self._parts.setdefault(part.index, []).append(part)

    def joined(self) -> RequestOutput:
        """Return all deltas as one output; there must be at least one."""
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
