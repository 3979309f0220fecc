"""What a step made for one sequence: the engine's word to those who make text of it."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.batch import TokenLogprobs
from twostroke.request import FinishReason


@dataclass(frozen=True, slots=True)
class TokenUpdate:
    """New tokens of one sequence, and its end if it came."""

    request_id: str
    """Of the sequence."""
    time_s: float
    """When the step's result was there, on the engine's clock."""
    token_ids: tuple[int, ...] = ()
    """Cut behind an end-of-text or stop token and at the limit."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per token, when asked for."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """When asked for; a chunk of tokens c, c+1, … predicts c+1, c+2, …"""
    prompt_logprobs_start: int = 1
    """Position in the prompt of the first of them."""
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    """Which of the request's own stop tokens ended it."""
    error: str | None = None
    scheduled_time_s: float | None = None
    """When the sequence was first scheduled."""
    num_cached_tokens: int = 0
    num_preemptions: int = 0
