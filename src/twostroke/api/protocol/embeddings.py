"""POST /v1/embeddings: what clients send."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from twostroke.api.protocol.fields import SERVICE_TIER, ServiceTier, WireObject, bookkeeping
from twostroke.api.protocol.lists import Prompts
from twostroke.client.input_processor import TruncationSide


class EmbeddingRequest(WireObject):
    """OpenAI's request for embeddings, with vLLM's extensions."""

    input: Prompts = Field(description="A text, token ids, or a list of either.")
    model: str | None = Field(default=None, description="The served model's name; may be left out, there is one.")
    dimensions: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = Field(
        default=None, description="Keep the first so many, of length 1 again; default: all of the hidden state's."
    )
    encoding_format: Literal["float", "base64"] | None = Field(
        default=None, description="Numbers, or the float32s in little-endian bytes as base64; default float."
    )
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = Field(
        default=None,
        description="Keep only so many tokens of each input, by default the last; -1: as many as the context holds.",
    )
    truncation_side: TruncationSide | None = Field(
        default=None, description="With truncate_prompt_tokens: left (default) keeps the last tokens, right the first."
    )
    add_special_tokens: bool | None = Field(
        default=None, description="Frame texts as the tokenizer says; default true."
    )
    service_tier: ServiceTier | None = Field(default=None, description=SERVICE_TIER)
    priority: Annotated[int, Field(ge=-(2**31), le=2**31)] | None = Field(
        default=None, description="Lower is served earlier; needs --policy priority."
    )
    cache_salt: str | None = Field(
        default=None,
        min_length=1,
        max_length=1024,
        description="Share cached prefixes only with requests of this salt.",
    )
    user: str | None = bookkeeping("The end user's name.")
