"""POST /v1/chat/completions: what clients send."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from twostroke.api.protocol.fields import WireObject, bookkeeping, refused
from twostroke.api.protocol.lists import MAX_OBJECTS, MAX_TOOLS, AtMost, Texts
from twostroke.api.protocol.message_fields import Conversation, unknown_in_messages
from twostroke.api.protocol.sampling import ReasoningEffort, SamplingFields
from twostroke.api.protocol.tool_kinds import STRICT, FunctionKind


class JsonSchemaFormat(WireObject):
    """A schema that the answer has to fit."""

    name: str
    description: str | None = bookkeeping("For people.")
    schema_: dict[str, Any] | None = Field(default=None, alias="schema", description="A JSON schema.")
    strict: bool | None = bookkeeping("The answer always fits the schema here.")


class ResponseFormat(WireObject):
    """What kind of text the answer is."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class FunctionDefinition(WireObject):
    """A function that the model may call."""

    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = bookkeeping(STRICT)


class Tool(WireObject):
    """A tool; functions are the only kind."""

    type: FunctionKind
    function: FunctionDefinition


class NamedFunction(WireObject):
    """A function by its name."""

    name: str


class NamedTool(WireObject):
    """The one tool to call."""

    type: FunctionKind
    function: NamedFunction


class ChatRequest(SamplingFields):
    """OpenAI's chat completion request with vLLM's extensions."""

    messages: Conversation = Field(description="The conversation.")
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = Field(
        default=None, description="Most tokens to generate; default: --default-max-tokens, or what the context leaves."
    )
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = Field(
        default=None, description="The newer name of max_tokens; wins."
    )
    logprobs: bool | None = Field(default=None, description="Log-probabilities of each token.")
    top_logprobs: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = Field(
        default=None, description="With this many of the most likely; needs logprobs."
    )
    response_format: ResponseFormat | None = Field(default=None, description="Text, any JSON, or JSON of a schema.")
    tools: Annotated[list[Tool], AtMost(MAX_TOOLS)] | None = Field(
        default=None, description="Functions that the model may call."
    )
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = Field(
        default=None, description="Whether the model has to call one, and which."
    )
    parallel_tool_calls: bool | None = Field(default=None, description="False: one call at most.")
    reasoning_effort: ReasoningEffort | None = Field(default=None, description="Handed to the chat template.")
    include_reasoning: bool | None = Field(default=None, description="False leaves the reasoning out of the answer.")
    echo: bool | None = Field(default=None, description="Put the last message before the answer, when continuing it.")
    add_generation_prompt: bool | None = Field(default=None, description="Open the assistant's turn; default true.")
    continue_final_message: bool | None = Field(default=None, description="Go on within the last message.")
    chat_template: str | None = refused("templates come with the model or with --chat-template, never with a request")
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="Further variables for the chat template."
    )
    documents: Annotated[list[dict[str, Any]], AtMost(MAX_OBJECTS)] | None = Field(
        default=None, description="For templates that know retrieval."
    )
    metadata: dict[str, Any] | None = bookkeeping("The client's notes.")
    store: bool | None = bookkeeping("Nothing is stored.")
    safety_identifier: str | None = bookkeeping("The end user's name.")
    prompt_cache_key: str | None = bookkeeping("Prefixes are found by their content.")
    prompt_cache_retention: str | None = bookkeeping("Prefixes stay while there is room.")
    prompt_cache_options: dict[str, Any] | None = bookkeeping("Prefixes are found by their content.")
    verbosity: str | None = refused("no model here knows it", "medium")
    prediction: dict[str, Any] | None = bookkeeping("A hint that changes no token.")
    audio: Any = refused("there is no audio output")
    modalities: Texts | None = refused("text is the only one", ["text"])
    web_search_options: Any = refused("there is no web search")
    moderation: Any = refused("there is no moderation")
    best_of: Any = refused("a chat has the choices of n", 1)
    functions: Any = refused("use tools, which replaced it", [])
    function_call: Any = refused("use tool_choice, which replaced it", "none")

    def _unknown(self) -> Iterator[str]:
        return itertools.chain(super()._unknown(), unknown_in_messages(self.messages))
