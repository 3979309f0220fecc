"""What a caller gets back; vLLM's names and shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from twostroke.draft_outcomes import DraftOutcomes, DraftTally
from twostroke.request import FinishReason
from twostroke.request_times import RequestTimes


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
    def of(cls, sequences: Sequence[RequestTimes], tallies: Sequence[DraftTally] = ()) -> RequestMetrics | None:
        """Of the sequences of one request; None when no token was ever made.

        Args:
            sequences: when each got its tokens.
            tallies: what became of each one's drafts.
        """
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
            drafts=DraftTally.total(tallies),
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
    metrics: RequestMetrics | None = None
    error: str | None = None
    """Why it ended with finish_reason "error"."""
    numeric_drift: NumericDrift = {}
    """Differences between the processes that ran it, where drift is allowed. One process alone may have answered with
    other tokens."""
    hidden_state: bytes | None = None
    """Of the prompt's last token behind the final norm, where that was asked for: float32 [hidden_size]."""


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
