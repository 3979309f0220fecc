"""Request schema of POST /v1/chat/completions.

A chat's messages are passed to the model's template as sent, and the template may read unpublished fields. The schema
of messages therefore refuses no key. A key that is neither published nor known to the template is reported as unknown
(ServerContext.unknown_fields).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, cast

import msgspec
from pydantic import Field

from twostroke.api.protocol.fields import (
    MAX_OBJECTS,
    MAX_TOOLS,
    STRICT,
    AtMost,
    Count,
    FunctionKind,
    PositiveCount,
    Texts,
    WireObject,
    acts,
    bookkeeping,
    refused,
)
from twostroke.api.protocol.sampling import ReasoningEffort, SamplingFields
from twostroke.api.protocol.shapes import AnyObject, HasShape
from twostroke.tokenizer.messages import REASONING_FIELDS, is_media_type

MESSAGES = "messages."
"""Prefix of the paths of unknown fields in messages."""


class _Part(msgspec.Struct, gc=False):
    type: str | None = None
    text: str | None = None
    refusal: str | None = None

    def __post_init__(self) -> None:
        if self.type is self.text is self.refusal is None:
            raise ValueError("A part of a message needs a type and a text")


class _Function(msgspec.Struct, gc=False):
    name: str
    arguments: str | AnyObject | None = None


class _Call(msgspec.Struct, gc=False):
    id: str | None = None
    function: _Function | None = None
    name: str | None = None
    arguments: str | AnyObject | None = None

    type: str | None = None

    def __post_init__(self) -> None:
        if self.function is self.name is None and self.type != "custom":  # custom calls are refused by name later
            raise ValueError("A call needs a function")


class MessageShape(msgspec.Struct, gc=False):
    """Shape of a message that every template needs, for the check of large bodies; see shapes.py."""

    role: str
    content: str | list[str | _Part] | None = None
    name: str | None = None
    tool_calls: list[_Call] | None = None
    function_call: _Function | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    thinking: str | None = None
    reasoning: str | None = None


Messages = list[Annotated[dict[str, Any], HasShape(MessageShape)]]
Conversation = Annotated[Messages, AtMost(MAX_OBJECTS, at_least=1)]

# Includes fields of answers that OpenAI's clients send back, and Anthropic's cache_control.
_MESSAGE = {
    "role",
    "content",
    "name",
    "tool_calls",
    "function_call",
    "tool_call_id",
    *REASONING_FIELDS,
    "refusal",
    "annotations",
}
_PART = {"type", "text", "refusal", "cache_control"}
_CALL = {"id", "type", "function", "index"}
_FUNCTION = {"name", "arguments"}


def content_of(texts: Sequence[str]) -> str | list[dict[str, str]]:
    """Return the content of a message with these texts; the chat template decides how several are joined.

    >>> content_of(["a"]), content_of(["a", "b"])
    ('a', [{'type': 'text', 'text': 'a'}, {'type': 'text', 'text': 'b'}])
    """
    if len(texts) < 2:
        return texts[0] if texts else ""
    return [{"type": "text", "text": text} for text in texts]


def function_call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    """Return a function call in the form of an assistant's message."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def offered_function(name: str, description: str | None, parameters: dict[str, Any] | None) -> dict[str, Any]:
    """Return a function that the model may call, in the form of a chat's tools."""
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def unknown_in_messages(messages: Messages) -> Iterator[str]:
    """Yield the paths of unpublished keys, each once; a key with null has no effect and is skipped."""
    told: set[str] = set()
    for message in messages:
        for path in _unknown_in_message(message):
            if path not in told:
                told.add(path)
                yield path


def _unknown_in_message(message: Mapping[str, Any]) -> Iterator[str]:
    yield from _unknown_keys(_MESSAGE, message, MESSAGES)
    for part in _objects(message.get("content")):
        if not is_media_type(part.get("type")):  # media are refused by name later
            yield from _unknown_keys(_PART, part, f"{MESSAGES}content.")
    for call in _objects(message.get("tool_calls")):
        yield from _unknown_keys(_CALL, call, f"{MESSAGES}tool_calls.")
        function = call.get("function")
        if isinstance(function, dict):
            yield from _unknown_keys(_FUNCTION, cast(dict[str, Any], function), f"{MESSAGES}tool_calls.function.")


def _unknown_keys(known: set[str], given: Mapping[str, Any], path: str) -> Iterator[str]:
    if given.keys() <= known:  # fast path for almost all messages
        return iter(())
    return (path + key for key, value in given.items() if key not in known and value is not None)


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    items = cast(list[Any], value) if isinstance(value, list) else ()
    return (cast(dict[str, Any], item) for item in items if isinstance(item, dict))


class JsonSchemaFormat(WireObject):
    """Schema that the answer must match."""

    name: str
    description: str | None = bookkeeping("For people.")
    schema_: dict[str, Any] | None = acts("A JSON schema.", alias="schema")
    strict: bool | None = bookkeeping("The answer always matches the schema.")


class ResponseFormat(WireObject):
    """Format of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class FunctionDefinition(WireObject):
    """A function that the model may call."""

    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = bookkeeping(STRICT)


class ChatTool(WireObject):
    """A tool; functions are the only kind."""

    type: FunctionKind
    function: FunctionDefinition


class ChatNamedFunction(WireObject):
    """Function given by its name."""

    name: str


class ChatNamedTool(WireObject):
    """Choice of the one tool to call."""

    type: FunctionKind
    function: ChatNamedFunction


class ChatRequest(SamplingFields):
    """OpenAI's chat completion request with vLLM's extensions."""

    messages: Conversation = Field(description="The conversation.")
    max_tokens: PositiveCount | None = acts(
        "Maximum tokens to generate; default: --default-max-tokens, or the rest of the context."
    )
    max_completion_tokens: PositiveCount | None = acts("The newer name of max_tokens; takes precedence.")
    logprobs: bool | None = acts("Return the log-probability of each token.")
    top_logprobs: Count | None = acts("Also return this many of the most likely tokens; needs logprobs.")
    response_format: ResponseFormat | None = acts("Text, any JSON, or JSON that matches a schema.")
    tools: Annotated[list[ChatTool], AtMost(MAX_TOOLS)] | None = acts("Functions that the model may call.")
    tool_choice: Literal["none", "auto", "required"] | ChatNamedTool | None = acts(
        "Whether the model must call a tool, and which."
    )
    parallel_tool_calls: bool | None = acts("False: at most one call.")
    reasoning_effort: ReasoningEffort | None = acts("Passed to the chat template.")
    include_reasoning: bool | None = acts("False leaves the reasoning out of the answer.")
    echo: bool | None = acts("Put the last message before the answer, if it is continued.")
    add_generation_prompt: bool | None = acts("Open the assistant's turn; default true.")
    continue_final_message: bool | None = acts("Continue the last message.")
    chat_template: str | None = refused("templates come with the model or with --chat-template, never with a request")
    chat_template_kwargs: dict[str, Any] | None = acts("Further variables for the chat template.")
    documents: Annotated[list[dict[str, Any]], AtMost(MAX_OBJECTS)] | None = acts("For templates with retrieval.")
    metadata: dict[str, Any] | None = bookkeeping("The client's notes.")
    store: bool | None = bookkeeping("Nothing is stored.")
    safety_identifier: str | None = bookkeeping("The end user's name.")
    prompt_cache_key: str | None = bookkeeping("Cached prefixes are found by their content.")
    prompt_cache_retention: str | None = bookkeeping("Prefixes are cached while there is room.")
    prompt_cache_options: dict[str, Any] | None = bookkeeping("Cached prefixes are found by their content.")
    verbosity: str | None = refused("no supported model has it", "medium")
    prediction: dict[str, Any] | None = bookkeeping("A hint that changes no token.")
    audio: Any = refused("there is no audio output")
    modalities: Texts | None = refused("text is the only output", ["text"])
    web_search_options: Any = refused("there is no web search")
    moderation: Any = refused("there is no moderation")
    best_of: Any = refused("use n", 1)
    functions: Any = refused("replaced by tools", [])
    function_call: Any = refused("replaced by tool_choice", "none")

    def _unknown(self) -> Iterator[str]:
        return itertools.chain(super()._unknown(), unknown_in_messages(self.messages))
