"""POST /v1/messages and /v1/messages/count_tokens: what clients of Anthropic's API send."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from twostroke.api.protocol.fields import (
    MAX_OBJECTS,
    MAX_TOOLS,
    STRICT,
    AtMost,
    OrText,
    PositiveCount,
    Texts,
    ToolKind,
    WireObject,
    acts,
    bookkeeping,
    refused,
)
from twostroke.api.protocol.sampling import ConversationFields

_CACHE_CONTROL = "Prefixes are found by their content."


class TextBlock(WireObject):
    """Text."""

    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = bookkeeping(_CACHE_CONTROL)
    citations: Any = bookkeeping("Of an answer given elsewhere.")


class ThinkingBlock(WireObject):
    """Reasoning of an earlier turn, for chat templates that show it to the model."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = bookkeeping("Reasoning is not signed here.")


class RedactedThinkingBlock(WireObject):
    """Reasoning of an earlier turn that nobody can read here; it is taken, and shown to no template."""

    type: Literal["redacted_thinking"]
    data: str | None = bookkeeping("Encrypted for who wrote it.")


class ToolUseBlock(WireObject):
    """A call that the model made in an earlier turn."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: dict[str, Any] | None = bookkeeping(_CACHE_CONTROL)
    caller: dict[str, Any] | None = bookkeeping("Who called: the model.")


class ToolResultBlock(WireObject):
    """What a call gave."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[Annotated[TextBlock, OrText("text")]], AtMost(MAX_OBJECTS)] | None = None
    is_error: bool | None = bookkeeping("Chat templates know none; the text says it.")
    cache_control: dict[str, Any] | None = bookkeeping(_CACHE_CONTROL)


ContentBlock = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock
"""Images, documents and the blocks of tools that Anthropic runs are refused by the name of their type."""


class Message(WireObject):
    """One turn."""

    role: Literal["user", "assistant", "system"]
    content: (
        str | Annotated[list[Annotated[ContentBlock, Field(discriminator="type"), OrText("text")]], AtMost(MAX_OBJECTS)]
    )


class MessagesTool(WireObject):
    """A function that the model may call; those that Anthropic runs are refused by the name of their type."""

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
        "chat templates know none", []
    )


class MessagesToolChoice(WireObject):
    """Whether the model has to call a tool, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = acts("With type tool.")
    disable_parallel_tool_use: bool | None = acts("True: one call at most.")


class Thinking(WireObject):
    """Whether the model reasons before it answers: `enable_thinking` of the chat template."""

    type: Literal["enabled", "disabled", "adaptive"] = Field(description="Adaptive: as the template has it.")
    budget_tokens: int | None = bookkeeping("Reasoning is bounded by max_tokens.")
    display: Literal["summarized", "omitted"] | None = acts("Omitted: not in the answer.")


class OutputFormat(WireObject):
    """A schema that the answer has to fit."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(WireObject):
    """How the answer has to be."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = acts(
        "Handed to the chat template as reasoning_effort."
    )
    format: OutputFormat | None = acts("JSON of a schema.")


class CountTokensRequest(ConversationFields):
    """A conversation to count."""

    messages: Annotated[list[Message], AtMost(MAX_OBJECTS, at_least=1)] = Field(description="The conversation.")
    system: str | Annotated[list[Annotated[TextBlock, OrText("text")]], AtMost(MAX_OBJECTS)] | None = acts(
        "Stands before the messages."
    )
    tools: Annotated[list[MessagesTool], AtMost(MAX_TOOLS)] | None = acts("Functions that the model may call.")
    tool_choice: MessagesToolChoice | None = acts("Whether the model has to call one, and which.")
    thinking: Thinking | None = acts("Whether the model reasons first.")
    output_config: OutputConfig | None = acts("Effort, and JSON of a schema.")
    cache_control: dict[str, Any] | None = bookkeeping(_CACHE_CONTROL)
    speed: str | None = bookkeeping("There is one.")
    metadata: dict[str, Any] | None = bookkeeping("The client's notes.")
    inference_geo: str | None = bookkeeping("This server is in one place.")
    container: Any = refused("no code is run here")
    context_management: Any = refused("the conversation is taken as it is")
    mcp_servers: Any = refused("no tools are run here", [])
    diagnostics: Any = refused("the cache is not explained here")


class MessagesRequest(CountTokensRequest):
    """Anthropic's request for a message, with extensions of ours."""

    max_tokens: PositiveCount = Field(description="Most tokens to generate.")
    stop_sequences: Texts | None = acts("Texts that end the generation.")
