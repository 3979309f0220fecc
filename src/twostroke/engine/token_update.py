"""Messages from an engine to the output processor: the new tokens of one sequence, and what else is new of it."""

from __future__ import annotations

import msgspec

from twostroke.batch import TokenLogprobs
from twostroke.request import FinishReason


class SequenceNews(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The seldom part of an update: with a sequence's first tokens, with its end, and with scores of its prompt.

    Nine of ten updates need none of it, and each goes through two processes.
    """

    scheduled_time_s: float | None = None
    """When the sequence was scheduled for the first time."""
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error: str | None = None
    hidden_state: bytes | None = None
    """Hidden state of the prompt's last token, for requests that ask for one."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs_start: int = 1
    """Position in the prompt of the first of them. A chunk of tokens c, c+1, … predicts c+1, c+2, …"""


class TokenUpdate(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """New tokens of one sequence, made by one step."""

    request_id: str
    """Id of the sequence, as `OutputProcessor.add` returned it."""
    time_s: float
    """Time of the step's result, in seconds of the engine's clock."""
    token_ids: tuple[int, ...] = ()
    """Cut behind an end-of-text or stop token and at the limit, see `generation.find_token_stop`."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    news: SequenceNews | None = None
    num_draft_tokens: int = 0
    """Drafts that the step verified for it."""
    start: int = 0
    """Output tokens before these, those included that other attempts have made."""

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the engine ended the sequence behind these tokens; None when it did not."""
        return None if self.news is None else self.news.finish_reason
