"""POST /v1/responses: what clients send. Stateless: everything that the model is to know comes with the request."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from twostroke.api.protocol.fields import (
    MAX_OBJECTS,
    MAX_TOOLS,
    STRICT,
    AtMost,
    FunctionKind,
    OrText,
    PositiveCount,
    Texts,
    WireObject,
    acts,
    bookkeeping,
    refused,
)
from twostroke.api.protocol.sampling import ConversationFields, ReasoningEffort


class InputText(WireObject):
    """Text to read; a part may also have the type that chats call it by."""

    type: Literal["input_text", "text"]
    text: str


class OutputText(WireObject):
    """Text of an earlier answer."""

    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[dict[str, Any]], AtMost(MAX_OBJECTS)] | None = bookkeeping("Of an earlier answer.")
    logprobs: Annotated[list[dict[str, Any]], AtMost(MAX_OBJECTS)] | None = bookkeeping("Of an earlier answer.")


class RefusalPart(WireObject):
    """An earlier answer that refused."""

    type: Literal["refusal"]
    refusal: str


class InputMessage(WireObject):
    """One turn."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: (
        str
        | Annotated[
            list[Annotated[InputText | OutputText | RefusalPart, Field(discriminator="type"), OrText("input_text")]],
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
    """What a call gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: (
        str
        | Annotated[
            list[Annotated[InputText | OutputText, Field(discriminator="type"), OrText("input_text")]],
            AtMost(MAX_OBJECTS),
        ]
        | None
    ) = None
    id: str | None = bookkeeping("The client's.")
    status: str | None = bookkeeping("The client's.")


class ReasoningText(WireObject):
    """A piece of reasoning."""

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
    """Messages may leave their type out."""
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return kind or "message"


InputItem = InputMessage | FunctionCall | FunctionCallOutput | ReasoningItem
"""Images, files, stored items and what belongs to tools that OpenAI runs are refused by the name of their type."""
_TaggedItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
]


class FunctionTool(WireObject):
    """A function that the model may call; tools that OpenAI runs are refused by the name of their type."""

    type: FunctionKind
    name: str = Field(min_length=1, max_length=256)
    parameters: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = bookkeeping(STRICT)
    output_schema: dict[str, Any] | None = bookkeeping("Of what the client answers.")
    defer_loading: bool | None = refused("there is no search for tools", False)
    allowed_callers: Texts | None = refused("the model is the only caller", ["direct"])


class ResponsesNamedFunction(WireObject):
    """The one function to call."""

    type: FunctionKind
    name: str


class TextFormat(WireObject):
    """What kind of text the answer is."""

    type: Literal["text", "json_object", "json_schema"]
    schema_: dict[str, Any] | None = acts("With type json_schema.", alias="schema")
    name: str | None = bookkeeping("For people.")
    description: str | None = bookkeeping("For people.")
    strict: bool | None = bookkeeping("The answer always fits the schema here.")


class TextConfig(WireObject):
    """How the text has to be."""

    format: TextFormat | None = acts("Text, any JSON, or JSON of a schema.")
    verbosity: str | None = refused("no model here knows it", "medium")


class Reasoning(WireObject):
    """How the model reasons."""

    effort: ReasoningEffort | None = acts("Handed to the chat template.")
    summary: str | None = bookkeeping("The reasoning itself is in the answer.")
    generate_summary: str | None = bookkeeping("The reasoning itself is in the answer.")
    context: str | None = refused("which turns are shown is for the chat template", "auto")
    mode: str | None = refused("there is one", "standard")


class ResponsesStreamOptions(WireObject):
    """How a stream is written."""

    include_obfuscation: bool | None = bookkeeping("Padding against eavesdroppers; there is none here.")


class ResponsesRequest(ConversationFields):
    """OpenAI's request for a response, with extensions of ours."""

    input: str | Annotated[list[_TaggedItem], AtMost(MAX_OBJECTS, at_least=1)] = Field(
        description="A text, or the items of the conversation."
    )
    instructions: str | None = acts("Stands before the input, as of the system.")
    max_output_tokens: PositiveCount | None = acts(
        "Most tokens to generate; default: --default-max-tokens, or what the context leaves."
    )
    tools: Annotated[list[FunctionTool], AtMost(MAX_TOOLS)] | None = acts("Functions.")
    tool_choice: Literal["none", "auto", "required"] | ResponsesNamedFunction | None = acts(
        "Whether the model has to call one, and which."
    )
    parallel_tool_calls: bool | None = acts("False: one call at most.")
    text: TextConfig | None = acts("The form of the answer.")
    reasoning: Reasoning | None = acts("How the model reasons.")
    stream_options: ResponsesStreamOptions | None = bookkeeping("Streams are written one way.")
    include: Annotated[list[Literal["reasoning.encrypted_content"]], AtMost(MAX_OBJECTS)] | None = bookkeeping(
        "Reasoning is in the answer as it is; what else may be asked for is refused."
    )
    metadata: dict[str, Any] | None = bookkeeping("The client's notes; in the answer again.")
    store: bool | None = bookkeeping("Nothing is stored.")
    user: str | None = bookkeeping("The end user's name.")
    safety_identifier: str | None = bookkeeping("The end user's name.")
    max_tool_calls: int | None = bookkeeping("Of tools that a server runs; none are run here.")
    prompt_cache_key: str | None = bookkeeping("Prefixes are found by their content.")
    prompt_cache_retention: str | None = bookkeeping("Prefixes stay while there is room.")
    prompt_cache_options: dict[str, Any] | None = bookkeeping("Prefixes are found by their content.")
    previous_response_id: str | None = refused("nothing is stored; send the items of the conversation")
    conversation: Any = refused("nothing is stored; send the items of the conversation")
    prompt: Any = refused("no prompts are stored; send instructions and input")
    background: bool | None = refused("answers are for who waits for them", False)
    background_options: Any = refused("answers are for who waits for them")
    truncation: str | None = refused("the conversation is taken as it is", "disabled")
    context_management: Any = refused("the conversation is taken as it is", [])
    top_logprobs: int | None = refused("/v1/chat/completions has log-probabilities", 0)
    moderation: Any = refused("there is no moderation")
    image: Any = refused("there is no image output")
    access_programs: Any = refused("there are none")
