"""Request schemas of POST /v1/messages and /v1/messages/count_tokens, in Anthropic's API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from twostroke.api.protocol.fields import (
    MAX_OBJECTS,
    MAX_TOOLS,
    STRICT,
    AllowsText,
    AtMost,
    PositiveCount,
    Texts,
    ToolKind,
    WireObject,
    acts,
    bookkeeping,
    refused,
)
from twostroke.api.protocol.sampling import ConversationFields

_CACHE_CONTROL = "Cached prefixes are found by their content."


class TextBlock(WireObject):
    """Block of text."""

    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = bookkeeping(_CACHE_CONTROL)
    citations: Any = bookkeeping("Part of an earlier answer.")


class ThinkingBlock(WireObject):
    """Reasoning of an earlier turn, for chat templates that show it to the model."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = bookkeeping("Reasoning is not signed here.")


class RedactedThinkingBlock(WireObject):
    """Encrypted reasoning of an earlier turn; accepted, and not rendered by any template."""

    type: Literal["redacted_thinking"]
    data: str | None = bookkeeping("Encrypted; readable only by its author.")


class ToolUseBlock(WireObject):
    """A call that the model made in an earlier turn."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: dict[str, Any] | None = bookkeeping(_CACHE_CONTROL)
    caller: dict[str, Any] | None = bookkeeping("The caller is always the model.")


class ToolResultBlock(WireObject):
    """Result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[Annotated[TextBlock, AllowsText("text")]], AtMost(MAX_OBJECTS)] | None = None
    is_error: bool | None = bookkeeping("Chat templates do not render it; the text must say it.")
    cache_control: dict[str, Any] | None = bookkeeping(_CACHE_CONTROL)


ContentBlock = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock
"""Block of a message. Images, documents and blocks of Anthropic's own tools are refused by the name of their type."""


class Message(WireObject):
    """One turn of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: (
        str
        | Annotated[list[Annotated[ContentBlock, Field(discriminator="type"), AllowsText("text")]], AtMost(MAX_OBJECTS)]
    )


class MessagesTool(WireObject):
    """Function that the model may call; Anthropic's own tools are refused by the name of their type."""

    type: ToolKind | None = None
    name: str = Field(min_length=1, max_length=256)
    input_schema: dict[str, Any]
    description: str | None = None
    cache_control: dict[str, Any] | None = bookkeeping(_CACHE_CONTROL)
    strict: bool | None = bookkeeping(STRICT)
    eager_input_streaming: bool | None = bookkeeping("Arguments are streamed as they come.")
    defer_loading: bool | None = refused("there is no search for tools", False)
    allowed_callers: Texts | None = refused("the model is the only caller", ["direct"])
    input_examples: Annotated[list[dict[str, Any]], AtMost(MAX_OBJECTS)] | None = refused(
        "chat templates do not render them", []
    )


class MessagesToolChoice(WireObject):
    """Choice of whether the model must call a tool, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = acts("With type tool.")
    disable_parallel_tool_use: bool | None = acts("True: at most one call.")


class Thinking(WireObject):
    """Switch for reasoning before the answer: `enable_thinking` of the chat template."""

    type: Literal["enabled", "disabled", "adaptive"] = Field(description="Adaptive: the template's default.")
    budget_tokens: int | None = bookkeeping("Reasoning is limited by max_tokens.")
    display: Literal["summarized", "omitted"] | None = acts("Omitted: leave the reasoning out of the answer.")


class OutputFormat(WireObject):
    """Schema that the answer must match."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(WireObject):
    """Settings of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = acts(
        "Passed to the chat template as reasoning_effort."
    )
    format: OutputFormat | None = acts("JSON that matches a schema.")


class CountTokensRequest(ConversationFields):
    """Request to count the tokens of a conversation."""

    messages: Annotated[list[Message], AtMost(MAX_OBJECTS, at_least=1)] = Field(description="The conversation.")
    system: str | Annotated[list[Annotated[TextBlock, AllowsText("text")]], AtMost(MAX_OBJECTS)] | None = acts(
        "System prompt before the messages."
    )
    tools: Annotated[list[MessagesTool], AtMost(MAX_TOOLS)] | None = acts("Functions that the model may call.")
    tool_choice: MessagesToolChoice | None = acts("Whether the model must call a tool, and which.")
    thinking: Thinking | None = acts("Whether the model reasons first.")
    output_config: OutputConfig | None = acts("Effort, and JSON that matches a schema.")
    cache_control: dict[str, Any] | None = bookkeeping(_CACHE_CONTROL)
    speed: str | None = bookkeeping("There is only one speed.")
    metadata: dict[str, Any] | None = bookkeeping("The client's notes.")
    inference_geo: str | None = bookkeeping("The server has only one location.")
    container: Any = refused("the server runs no code")
    context_management: Any = refused("the conversation is used unchanged")
    mcp_servers: Any = refused("the server runs no tools", [])
    diagnostics: Any = refused("there are no cache diagnostics")


class MessagesRequest(CountTokensRequest):
    """Anthropic's request for a message, with extensions."""

    max_tokens: PositiveCount = Field(description="Maximum tokens to generate.")
    stop_sequences: Texts | None = acts("Texts that end the generation.")
