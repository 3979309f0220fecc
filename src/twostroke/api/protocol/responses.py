"""Request schema of POST /v1/responses. The API is stateless: each request has the whole conversation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from twostroke.api.protocol.fields import (
    MAX_OBJECTS,
    MAX_TOOLS,
    STRICT,
    AllowsText,
    AtMost,
    FunctionKind,
    PositiveCount,
    Texts,
    WireObject,
    acts,
    bookkeeping,
    refused,
)
from twostroke.api.protocol.sampling import ConversationFields, ReasoningEffort


class InputText(WireObject):
    """Text of a message; the part may also have the type that chats use."""

    type: Literal["input_text", "text"]
    text: str


class OutputText(WireObject):
    """Text of an earlier answer."""

    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[dict[str, Any]], AtMost(MAX_OBJECTS)] | None = bookkeeping("Of an earlier answer.")
    logprobs: Annotated[list[dict[str, Any]], AtMost(MAX_OBJECTS)] | None = bookkeeping("Of an earlier answer.")


class RefusalPart(WireObject):
    """Refusal in an earlier answer."""

    type: Literal["refusal"]
    refusal: str


class InputMessage(WireObject):
    """One turn of a conversation."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: (
        str
        | Annotated[
            list[
                Annotated[InputText | OutputText | RefusalPart, Field(discriminator="type"), AllowsText("input_text")]
            ],
            AtMost(MAX_OBJECTS),
        ]
    )
    id: str | None = bookkeeping("Of an earlier answer.")
    status: str | None = bookkeeping("Of an earlier answer.")
    phase: str | None = bookkeeping("Of an earlier answer.")


class FunctionCall(WireObject):
    """A call that the model made in an earlier turn."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str | dict[str, Any] | None = acts("JSON text, or the object itself.")
    id: str | None = bookkeeping("Of an earlier answer.")
    status: str | None = bookkeeping("Of an earlier answer.")


class FunctionCallOutput(WireObject):
    """Result of a tool call."""

    type: Literal["function_call_output"]
    call_id: str
    output: (
        str
        | Annotated[
            list[Annotated[InputText | OutputText, Field(discriminator="type"), AllowsText("input_text")]],
            AtMost(MAX_OBJECTS),
        ]
        | None
    ) = None
    id: str | None = bookkeeping("The client's.")
    status: str | None = bookkeeping("The client's.")


class ReasoningText(WireObject):
    """Piece of reasoning."""

    type: Literal["reasoning_text", "text"]
    text: str


class ReasoningItem(WireObject):
    """Reasoning of an earlier turn, for chat templates that show it to the model."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], AtMost(MAX_OBJECTS)] | None = None
    id: str | None = bookkeeping("Of an earlier answer.")
    summary: Annotated[list[dict[str, Any]], AtMost(MAX_OBJECTS)] | None = bookkeeping(
        "The reasoning itself is what the model reads."
    )
    status: str | None = bookkeeping("Of an earlier answer.")
    encrypted_content: str | None = refused("reasoning of this server is never encrypted")


def _kind(item: Any) -> str:
    """Return the type of an item; messages may omit it."""
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return kind or "message"


InputItem = InputMessage | FunctionCall | FunctionCallOutput | ReasoningItem
"""Item of the input. Images, files, stored items and items of OpenAI's own tools are refused by type."""
_TaggedItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
]


class FunctionTool(WireObject):
    """Function that the model may call; OpenAI's own tools are refused by the name of their type."""

    type: FunctionKind
    name: str = Field(min_length=1, max_length=256)
    parameters: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = bookkeeping(STRICT)
    output_schema: dict[str, Any] | None = bookkeeping("Schema of the client's results.")
    defer_loading: bool | None = refused("there is no search for tools", False)
    allowed_callers: Texts | None = refused("the model is the only caller", ["direct"])


class ResponsesNamedFunction(WireObject):
    """Choice of the one function to call."""

    type: FunctionKind
    name: str


class TextFormat(WireObject):
    """Format of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    schema_: dict[str, Any] | None = acts("With type json_schema.", alias="schema")
    name: str | None = bookkeeping("For people.")
    description: str | None = bookkeeping("For people.")
    strict: bool | None = bookkeeping("The answer always matches the schema.")


class TextConfig(WireObject):
    """Settings of the answer's text."""

    format: TextFormat | None = acts("Text, any JSON, or JSON that matches a schema.")
    verbosity: str | None = refused("no supported model has it", "medium")


class Reasoning(WireObject):
    """Settings of the model's reasoning."""

    effort: ReasoningEffort | None = acts("Passed to the chat template.")
    summary: str | None = bookkeeping("The reasoning itself is in the answer.")
    generate_summary: str | None = bookkeeping("The reasoning itself is in the answer.")
    context: str | None = refused("the chat template decides which turns it renders", "auto")
    mode: str | None = refused("there is only one mode", "standard")


class ResponsesStreamOptions(WireObject):
    """Options of a stream."""

    include_obfuscation: bool | None = bookkeeping("Padding against eavesdroppers; never sent.")


class ResponsesRequest(ConversationFields):
    """OpenAI's request for a response, with extensions."""

    input: str | Annotated[list[_TaggedItem], AtMost(MAX_OBJECTS, at_least=1)] = Field(
        description="A text, or the items of the conversation."
    )
    instructions: str | None = acts("System message before the input.")
    max_output_tokens: PositiveCount | None = acts(
        "Maximum tokens to generate; default: --default-max-tokens, or the rest of the context."
    )
    tools: Annotated[list[FunctionTool], AtMost(MAX_TOOLS)] | None = acts("Functions that the model may call.")
    tool_choice: Literal["none", "auto", "required"] | ResponsesNamedFunction | None = acts(
        "Whether the model must call a tool, and which."
    )
    parallel_tool_calls: bool | None = acts("False: at most one call.")
    text: TextConfig | None = acts("The format of the answer.")
    reasoning: Reasoning | None = acts("How the model reasons.")
    stream_options: ResponsesStreamOptions | None = bookkeeping("Streams have one format.")
    include: Annotated[list[Literal["reasoning.encrypted_content"]], AtMost(MAX_OBJECTS)] | None = bookkeeping(
        "Reasoning is in the answer in plain text; other values are refused."
    )
    metadata: dict[str, Any] | None = bookkeeping("The client's notes; returned in the answer.")
    store: bool | None = bookkeeping("Nothing is stored.")
    user: str | None = bookkeeping("The end user's name.")
    safety_identifier: str | None = bookkeeping("The end user's name.")
    max_tool_calls: int | None = bookkeeping("Limits tools that the server runs; it runs none.")
    prompt_cache_key: str | None = bookkeeping("Cached prefixes are found by their content.")
    prompt_cache_retention: str | None = bookkeeping("Prefixes are cached while there is room.")
    prompt_cache_options: dict[str, Any] | None = bookkeeping("Cached prefixes are found by their content.")
    previous_response_id: str | None = refused("nothing is stored; send the items of the conversation")
    conversation: Any = refused("nothing is stored; send the items of the conversation")
    prompt: Any = refused("no prompts are stored; send instructions and input")
    background: bool | None = refused("answers are sent only to waiting clients", False)
    background_options: Any = refused("answers are sent only to waiting clients")
    truncation: str | None = refused("the conversation is used unchanged", "disabled")
    context_management: Any = refused("the conversation is used unchanged", [])
    top_logprobs: int | None = refused("/v1/chat/completions has log-probabilities", 0)
    moderation: Any = refused("there is no moderation")
    image: Any = refused("there is no image output")
    access_programs: Any = refused("there are no access programs")
