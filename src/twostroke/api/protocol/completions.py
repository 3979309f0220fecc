"""POST /v1/completions: what clients send."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from twostroke.api.protocol.fields import refused
from twostroke.api.protocol.lists import Prompts
from twostroke.api.protocol.sampling import SamplingFields


class CompletionRequest(SamplingFields):
    """OpenAI's completion request with vLLM's extensions."""

    prompt: Prompts = Field(description="A text, token ids, or a list of either.")
    max_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = Field(
        default=None, description="Most tokens to generate, default 16; 0 only with echo."
    )
    echo: bool | None = Field(default=None, description="Put the prompt before the text.")
    logprobs: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = Field(
        default=None, description="Log-probabilities of each token, with this many of the most likely."
    )
    best_of: Annotated[int, Field(ge=1, le=128)] | None = Field(
        default=None, description="Generate so many and answer with the n most likely; not in streams."
    )
    suffix: str | None = refused("filling in the middle needs a model trained for it", "")
