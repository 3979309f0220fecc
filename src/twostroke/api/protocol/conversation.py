"""Fields that the Messages and the Responses API share, with the extensions of ours that both take."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from twostroke.api.protocol.fields import SERVICE_TIER, ServiceTier, WireObject


class ConversationFields(WireObject):
    """How a reply is sampled, and what the engine has to know."""

    model: str | None = Field(default=None, description="The served model's name; may be left out, there is one.")
    temperature: Annotated[float, Field(ge=0, le=100)] | None = Field(
        default=None, description="0 is greedy; default 1."
    )
    top_p: Annotated[float, Field(gt=0, le=1)] | None = Field(default=None, description="Nucleus sampling; default 1.")
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = Field(
        default=None, description="Keep the k most likely tokens; 0 or -1 keeps all."
    )
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = Field(
        default=None, description="The same seed gives the same tokens."
    )
    ignore_eos: bool | None = Field(default=None, description="Go on behind the model's end-of-text tokens.")
    stream: bool | None = Field(default=None, description="Send what is new as server-sent events.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="Further variables for the chat template."
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

    def as_chat_fields(self) -> dict[str, Any]:
        """Those that a chat request calls the same."""
        return {name: value for name in ConversationFields.model_fields if (value := getattr(self, name)) is not None}
