"""Messages from an engine to the output processor: new tokens of one sequence, and changes of its state."""

from __future__ import annotations

import msgspec

from twostroke.batch import TokenLogprobs
from twostroke.request import FinishReason


class SequenceStatus(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The rarely needed part of an update: sent with a sequence's first tokens, its end, and its prompt's scores.

    Nine of ten updates omit it, and each update passes through two processes.
    """

    scheduled_time_s: float | None = None
    """Time at which the sequence was first scheduled."""
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error: str | None = None
    hidden_state: bytes | None = None
    """Hidden state of the prompt's last token, for requests that ask for one."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs_start: int = 1
    """Position in the prompt of the first of `prompt_logprobs`. A chunk of tokens c, c+1, … predicts c+1, c+2, …"""


class TokenUpdate(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """New tokens of one sequence from one step."""

    request_id: str
    """Id of the sequence, as `OutputProcessor.add` returned it."""
    time_s: float
    """Time of the step's result, in seconds of the engine's clock."""
    token_ids: tuple[int, ...] = ()
    """Token ids up to the end-of-text token, stop token or limit, see `generation.find_token_stop`."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    status: SequenceStatus | None = None
    num_draft_tokens: int = 0
    """Drafts that the step verified for the sequence."""
    start: int = 0
    """Number of output tokens before these, including those of earlier attempts."""

    @property
    def finish_reason(self) -> FinishReason | None:
        """Finish reason, if the engine ended the sequence after these tokens; else None."""
        return None if self.status is None else self.status.finish_reason
