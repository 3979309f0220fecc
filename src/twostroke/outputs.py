"""What a caller gets back; vLLM's names and shapes."""

from __future__ import annotations

from dataclasses import dataclass, field

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


@dataclass(slots=True)
class CompletionOutput:
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
    """Where the time of a request went, in seconds; of the sequence that took longest when there are several."""

    arrival_time_s: float
    queue_time_s: float
    """Arrival until first scheduled."""
    ttft_s: float
    """Arrival until the first token was there."""
    tpot_s: float | None
    """(e2e - ttft) / (tokens - 1); None for a single token."""
    itl_s: tuple[float, ...]
    """Gaps between consecutive tokens."""
    e2e_s: float
    num_preemptions: int

    @classmethod
    def of(cls, times: RequestTimes) -> RequestMetrics:
        """Of a sequence that got a token at least."""
        return cls(
            arrival_time_s=times.arrival_s,
            queue_time_s=times.queue_time_s,
            ttft_s=times.ttft_s,
            tpot_s=times.tpot_s,
            itl_s=times.itl_s,
            e2e_s=times.e2e_s,
            num_preemptions=times.num_preemptions,
        )


@dataclass(slots=True)
class RequestOutput:
    """The answer to one prompt; while streaming, what is there so far."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: list[LogprobsAtPosition | None] | None
    outputs: list[CompletionOutput] = field(default_factory=list[CompletionOutput])
    finished: bool = False
    num_cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache."""
    metrics: RequestMetrics | None = None
    error: str | None = None
    """Why it ended with finish_reason "error"."""
