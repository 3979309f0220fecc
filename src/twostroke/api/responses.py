"""OpenAI's Responses API: conversion of its requests to chats, and its answers. This module has no HTTP."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from twostroke.api.answering import named_event
from twostroke.api.conversation import ParameterNames
from twostroke.api.dialect import Dialect
from twostroke.api.generation import AnswerHead
from twostroke.api.http_errors import error_body
from twostroke.api.protocol.chat import ChatRequest, content_of, function_call, offered_function
from twostroke.api.protocol.responses import (
    FunctionCall,
    FunctionCallOutput,
    InputItem,
    InputMessage,
    InputText,
    OutputText,
    ReasoningItem,
    RefusalPart,
    ResponsesNamedFunction,
    ResponsesRequest,
    TextFormat,
)
from twostroke.api.reply import Block, BlockBegun, BlockEnded, BlockEvent, BlockGrown, BlockKind, BlockReply
from twostroke.client.engine_client import EngineClient
from twostroke.request import FinishReason

Object = dict[str, Any]


def chat_from_response(request: ResponsesRequest) -> ChatRequest:
    """Return the equivalent chat request.

    Raises:
        InvalidParameter: a field that is not supported.
    """
    request.check_refused()
    fields = request.as_chat_fields()
    fields["messages"] = list(_messages(request))
    fields["max_tokens"] = request.max_output_tokens
    if request.tools:
        fields["tools"] = [offered_function(tool.name, tool.description, tool.parameters) for tool in request.tools]
    choice = request.tool_choice
    if choice is not None:
        named = isinstance(choice, ResponsesNamedFunction)
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
    """Yield the items as messages; consecutive reasoning, text and calls of the assistant become one message."""
    turn: Object = {}
    for item in items:
        said = _assistant_fields(item)
        if said is None or not _can_join(turn, said):
            if turn:
                yield {"role": "assistant", "content": "", **turn}
            turn = {}
        if said is not None:
            calls = turn.get("tool_calls")
            if calls is None or "tool_calls" not in said:
                turn = {**turn, **said}
            else:  # extend in place: a copy for each of thousands of calls would be slow
                calls += said["tool_calls"]
        elif isinstance(item, FunctionCallOutput):
            yield {"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output or "")}
        elif isinstance(item, InputMessage):
            yield {"role": item.role, "content": _content(item.content)}
    if turn:
        yield {"role": "assistant", "content": "", **turn}


def _assistant_fields(item: InputItem) -> Object | None:
    """Return the fields that an item adds to an assistant's message; None if it is not the assistant's."""
    match item:
        case ReasoningItem():
            return {"reasoning_content": "\n".join(part.text for part in item.content or ())}
        case FunctionCall():
            return {"tool_calls": [function_call(item.call_id, item.name, item.arguments)]}
        case InputMessage(role="assistant"):
            return {"content": _content(item.content)}
        case _:
            return None


_ORDER = ("reasoning_content", "content", "tool_calls")
"""Order of the fields within one assistant's message; only calls may repeat."""


def _can_join(turn: Object, said: Object) -> bool:
    (place,) = (_ORDER.index(name) for name in said)
    return place == len(_ORDER) - 1 or not any(name in turn for name in _ORDER[place:])


def _content(given: str | Sequence[InputText | OutputText | RefusalPart]) -> str | list[dict[str, str]]:
    if isinstance(given, str):
        return given
    return content_of([part.refusal if isinstance(part, RefusalPart) else part.text for part in given])


_ITEM_PREFIX = {BlockKind.REASONING: "rs", BlockKind.TEXT: "msg", BlockKind.CALL: "fc"}
_DELTA = {
    BlockKind.REASONING: "response.reasoning_text",
    BlockKind.TEXT: "response.output_text",
    BlockKind.CALL: "response.function_call_arguments",
}


class ResponseCall(BlockReply):
    """One call of /v1/responses.

    Args:
        engine: engine that runs it.
        request: the equivalent chat.
        dialect: syntax of the model's reasoning and tool calls.
        head: head of the answer.
        asked: the request as sent.
    """

    words: ClassVar[ParameterNames] = {"response_format": "text.format", "max_tokens": "max_output_tokens"}

    def __init__(
        self, engine: EngineClient, request: ChatRequest, dialect: Dialect, head: AnswerHead, asked: ResponsesRequest
    ) -> None:
        super().__init__(engine, request, dialect, head)
        self._asked = asked
        self._num_events = 0

    async def answer(self) -> Object:
        """Return the whole answer; raise what Generation.whole raises."""
        await self.read()
        return self._response()

    def _first_events(self) -> bytes:
        """Return the opening events. They wait for the first output, so that an earlier failure gets its own status."""
        begun = {"response": self._response("in_progress")}
        return self._event("response.created", begun) + self._event("response.in_progress", begun)

    def last_events(self) -> bytes:
        response = self._response()
        return self._event(f"response.{response['status']}", {"response": response})

    def failure(self, error: Exception) -> bytes:
        """Return the last events of a stream that fails."""
        told = error_body(error).body["error"]
        reason = {"code": "server_error", "message": told["message"]}
        failed = {**self._response("failed"), "error": reason}
        about = {"code": told["code"] or told["type"], "message": told["message"], "param": told["param"]}
        return self._event("response.failed", {"response": failed}) + self._event("error", about)

    def _status(self) -> str:
        return "incomplete" if self.finish_reason is FinishReason.LENGTH else "completed"

    def _status_of(self, block: Block) -> str:
        """Return the status of an ended item: the last one may be cut off, and any call may be incomplete."""
        if block.kind is BlockKind.CALL:
            return "incomplete" if block.is_incomplete_call else "completed"
        is_last = self.finish_reason is not None and block is self.blocks.all[-1]
        return self._status() if is_last else "completed"

    def _response(self, status: str | None = None) -> Object:
        """Return the response object with this status; by default with its final status."""
        has_ended = status is None
        status = status or self._status()
        request, blocks = self._asked, self.blocks.all if has_ended else []
        return {
            "id": self.head.id,
            "object": "response",
            "created_at": self.head.created,
            "model": self.head.model,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": [_item(block, self._status_of(block), block.text) for block in blocks],
            "usage": self._usage() if has_ended else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": request.reasoning and request.reasoning.effort, "summary": None},
            "store": False,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "text": {"format": self._format()},
            "tool_choice": self._tool_choice(),
            "tools": [dict(tool) for tool in request.tools or ()],
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "truncation": "disabled",
            **self.tier,
        }

    def _format(self) -> Object:
        text = self._asked.text
        if text is None or text.format is None:
            return {"type": "text"}
        return {"schema" if name == "schema_" else name: item for name, item in text.format if item is not None}

    def _tool_choice(self) -> Any:
        choice = self._asked.tool_choice
        return choice if isinstance(choice, str) else "auto" if choice is None else choice.model_dump()

    def _usage(self) -> Object:
        counts = self.usage
        return {
            "input_tokens": counts.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": counts.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": counts.num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": counts.num_reasoning_tokens},
            "total_tokens": counts.num_prompt_tokens + counts.num_output_tokens,
            **counts.drift,
        }

    def _written(self, event: BlockEvent) -> bytes:
        block = event.block
        place: Object = {"item_id": _item_id(block), "output_index": block.index}
        part = {**place, "content_index": 0}
        has_parts = block.kind is not BlockKind.CALL
        match event:
            case BlockBegun():
                added = {"output_index": block.index, "item": _item(block, "in_progress", "", is_empty=True)}
                written = self._event("response.output_item.added", added)
                if has_parts:
                    written += self._event("response.content_part.added", {**part, "part": _part(block.kind, "")})
                return written
            case BlockGrown(_, text):
                more: Object = {**(part if has_parts else place), "delta": text}
                if block.kind is BlockKind.TEXT:
                    more["logprobs"] = []
                return self._event(f"{_DELTA[block.kind]}.delta", more)
            case BlockEnded():
                return self._ended(block, part if has_parts else place)

    def _ended(self, block: Block, place: Object) -> bytes:
        text = block.text
        match block.kind:
            case BlockKind.CALL:
                whole: Object = {"name": block.name, "arguments": text}
            case BlockKind.TEXT:
                whole = {"text": text, "logprobs": []}
            case BlockKind.REASONING:
                whole = {"text": text}
        written = self._event(f"{_DELTA[block.kind]}.done", {**place, **whole})
        if block.kind is not BlockKind.CALL:
            written += self._event("response.content_part.done", {**place, "part": _part(block.kind, text)})
        done = {"output_index": block.index, "item": _item(block, self._status_of(block), text)}
        return written + self._event("response.output_item.done", done)

    def _event(self, name: str, fields: Object) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        return named_event(name, {"type": name, "sequence_number": number, **fields})


def _item_id(block: Block) -> str:
    return f"{_ITEM_PREFIX[block.kind]}_{block.id}"


def _item(block: Block, status: str, text: str, *, is_empty: bool = False) -> Object:
    """Return an item of the output; if `is_empty`, without its parts, which follow later."""
    item: Object = {"id": _item_id(block), "status": status}
    parts = [] if is_empty else [_part(block.kind, text)]
    match block.kind:
        case BlockKind.REASONING:
            return {**item, "type": "reasoning", "summary": [], "content": parts}
        case BlockKind.TEXT:
            return {**item, "type": "message", "role": "assistant", "content": parts}
        case BlockKind.CALL:
            call = {"call_id": f"call_{block.id}", "name": block.name, "arguments": text}
            return {**item, "type": "function_call", **call}


def _part(kind: BlockKind, text: str) -> Object:
    if kind is BlockKind.REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
