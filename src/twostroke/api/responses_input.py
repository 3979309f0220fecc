"""A conversation in the words of the Responses API, put into those of chats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from twostroke.api.protocol.chat import ChatRequest
from twostroke.api.protocol.message_fields import content_of
from twostroke.api.protocol.responses import (
    FunctionCall,
    FunctionCallOutput,
    InputItem,
    InputMessage,
    InputText,
    NamedFunction,
    OutputText,
    ReasoningItem,
    Refusal,
    ResponsesRequest,
    TextFormat,
)

Object = dict[str, Any]
RESPONSES_WORDS = {"response_format": "text.format", "max_tokens": "max_output_tokens"}
"""What the Responses API calls parameters of chats."""


def chat_of_response(request: ResponsesRequest) -> ChatRequest:
    """The chat that asks for the same.

    Raises:
        InvalidParameter: a field that is not supported.
    """
    request.check_refused()
    fields = request.as_chat_fields()
    fields["messages"] = list(_messages(request))
    fields["max_tokens"] = request.max_output_tokens
    if request.tools:
        fields["tools"] = [
            {
                "type": "function",
                "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
            }
            for tool in request.tools
        ]
    choice = request.tool_choice
    if choice is not None:
        named = isinstance(choice, NamedFunction)
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}} if named else choice
    fields["parallel_tool_calls"] = request.parallel_tool_calls
    if request.reasoning is not None:
        fields["reasoning_effort"] = request.reasoning.effort
    if request.text is not None and request.text.format is not None:
        fields["response_format"] = _format(request.text.format)
    return ChatRequest.model_validate(fields)


def _format(wanted: TextFormat) -> Object:
    if wanted.type != "json_schema":
        return {"type": wanted.type}
    return {"type": "json_schema", "json_schema": {"name": wanted.name or "format", "schema": wanted.schema_}}


def _messages(request: ResponsesRequest) -> Iterator[Object]:
    if request.instructions:
        yield {"role": "system", "content": request.instructions}
    if isinstance(request.input, str):
        yield {"role": "user", "content": request.input}
    else:
        yield from _turns(request.input)


def _turns(items: Sequence[InputItem]) -> Iterator[Object]:
    """Items as messages: reasoning, text and calls of the assistant that follow each other are one."""
    turn: Object = {}
    for item in items:
        said = _said_by_assistant(item)
        if said is None or not _can_join(turn, said):
            if turn:
                yield {"role": "assistant", "content": "", **turn}
            turn = {}
        if said is not None:
            calls = turn.get("tool_calls")
            if calls is None or "tool_calls" not in said:
                turn = {**turn, **said}
            else:  # one list grows: a copy for each of thousands of calls would take long
                calls += said["tool_calls"]
        elif isinstance(item, FunctionCallOutput):
            yield {"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output or "")}
        elif isinstance(item, InputMessage):
            yield {"role": item.role, "content": _content(item.content)}
    if turn:
        yield {"role": "assistant", "content": "", **turn}


def _said_by_assistant(item: InputItem) -> Object | None:
    """Return what the item adds to a turn of the assistant; None if it is none of its."""
    match item:
        case ReasoningItem():
            return {"reasoning_content": "\n".join(part.text for part in item.content or ())}
        case FunctionCall():
            function = {"name": item.name, "arguments": item.arguments}
            return {"tool_calls": [{"id": item.call_id, "type": "function", "function": function}]}
        case InputMessage(role="assistant"):
            return {"content": _content(item.content)}
        case _:
            return None


_ORDER = ("reasoning_content", "content", "tool_calls")
"""The order of what an assistant says in one turn; only calls may be several."""


def _can_join(turn: Object, said: Object) -> bool:
    (place,) = (_ORDER.index(name) for name in said)
    return place == len(_ORDER) - 1 or not any(name in turn for name in _ORDER[place:])


def _content(given: str | Sequence[InputText | OutputText | Refusal]) -> str | list[dict[str, str]]:
    if isinstance(given, str):
        return given
    return content_of([part.refusal if isinstance(part, Refusal) else part.text for part in given])
