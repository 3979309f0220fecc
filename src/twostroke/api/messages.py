"""Anthropic's Messages API: conversion of its requests to chats, and its answers. This module has no HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from twostroke.api.answering import named_event
from twostroke.api.conversation import ParameterNames
from twostroke.api.http_errors import anthropic_error, error_body
from twostroke.api.protocol.chat import ChatRequest, content_of, function_call, offered_function
from twostroke.api.protocol.messages import (
    ContentBlock,
    CountTokensRequest,
    Message,
    MessagesRequest,
    MessagesToolChoice,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from twostroke.api.reply import (
    Block,
    BlockBegun,
    BlockEnded,
    BlockEvent,
    BlockGrown,
    BlockKind,
    BlockReply,
    arguments_of,
)
from twostroke.errors import InvalidParameter
from twostroke.request import FinishReason

Object = dict[str, Any]


def chat_from_messages(request: CountTokensRequest) -> ChatRequest:
    """Return the equivalent chat request.

    Raises:
        InvalidParameter: an unsupported field, or a tool choice without the tool's name.
    """
    request.check_refused()
    fields = request.as_chat_fields()
    fields["messages"] = messages = list(_messages(request))
    last = messages[-1]
    fields["continue_final_message"] = continues = last["role"] == "assistant" and "tool_calls" not in last
    if continues and not isinstance(last["content"], str):  # the model continues one text
        last["content"] = "".join(part["text"] for part in last["content"])
    if request.tools:
        fields["tools"] = [offered_function(tool.name, tool.description, tool.input_schema) for tool in request.tools]
    if request.tool_choice is not None:
        fields["tool_choice"] = _tool_choice(request.tool_choice, has_tools=bool(request.tools))
        fields["parallel_tool_calls"] = not request.tool_choice.disable_parallel_tool_use
    if request.thinking is not None:
        fields["include_reasoning"] = request.thinking.display != "omitted"
        if request.thinking.type != "adaptive":
            variables: Object = fields.setdefault("chat_template_kwargs", {})
            variables.setdefault("enable_thinking", request.thinking.type == "enabled")
    if request.output_config is not None:
        fields["reasoning_effort"] = request.output_config.effort
        if request.output_config.format is not None:
            schema = request.output_config.format.schema_
            fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "format", "schema": schema}}
    if isinstance(request, MessagesRequest):
        fields["max_tokens"] = request.max_tokens
        fields["stop"] = request.stop_sequences
    return ChatRequest.model_validate(fields)


def _tool_choice(choice: MessagesToolChoice, *, has_tools: bool) -> str | Object:
    if choice.type == "any" and not has_tools:
        raise InvalidParameter("tool_choice", choice.type, "needs at least one of tools")
    if choice.type != "tool":
        return {"auto": "auto", "any": "required", "none": "none"}[choice.type]
    if choice.name is None:
        raise InvalidParameter("tool_choice.name", None, "type tool needs a name", "Name one of tools.")
    return {"type": "function", "function": {"name": choice.name}}


def _messages(request: CountTokensRequest) -> Iterator[Object]:
    if request.system:
        yield {"role": "system", "content": _content(request.system)}
    for index, message in enumerate(request.messages):
        yield from _turn(message, f"messages.{index}")


_BLOCKS_BY_ROLE: dict[str, tuple[type[ContentBlock], ...]] = {
    "user": (TextBlock, ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, RedactedThinkingBlock, ToolUseBlock),
    "system": (TextBlock,),
}
"""Types of blocks that each role may have."""
_ROLE_OF_BLOCK = {
    "tool_result": "user",
    "thinking": "assistant",
    "redacted_thinking": "assistant",
    "tool_use": "assistant",
}
"""Role of the blocks that not every role may have."""


def _turn(message: Message, where: str) -> Iterator[Object]:
    """Yield the messages of one turn: each tool result becomes a message of role tool."""
    role = message.role
    blocks = [TextBlock(type="text", text=message.content)] if isinstance(message.content, str) else message.content
    for block in blocks:
        if not isinstance(block, _BLOCKS_BY_ROLE[role]):
            limit = f"the role {role!r} cannot have a block of this type"
            raise InvalidParameter(f"{where}.content", block.type, limit, f"Use {_ROLE_OF_BLOCK[block.type]!r}.")
    results = [block for block in blocks if isinstance(block, ToolResultBlock)]
    for block in results:
        yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _content(block.content or "")}
    if len(results) < len(blocks) or not blocks:
        yield _without_results(role, blocks)


def _without_results(role: str, blocks: Sequence[ContentBlock]) -> Object:
    """Return the message of a turn without its tool results. A call without text gets "", which templates expect."""
    texts = [block for block in blocks if isinstance(block, TextBlock)]
    turn: Object = {"role": role, "content": _content(texts)}
    if reasoning := [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]:
        turn["reasoning_content"] = "\n".join(reasoning)
    calls = [block for block in blocks if isinstance(block, ToolUseBlock)]
    if calls:
        turn["tool_calls"] = [
            function_call(call.id, call.name, json.dumps(call.input, ensure_ascii=False)) for call in calls
        ]
    return turn


def _content(given: str | Sequence[TextBlock]) -> str | list[dict[str, str]]:
    return given if isinstance(given, str) else content_of([block.text for block in given])


_TIERS = {"default": "standard", "priority": "priority", "flex": "batch"}
"""Anthropic's names of the service tiers in answers."""


class MessageCall(BlockReply):
    """One call of /v1/messages."""

    words: ClassVar[ParameterNames] = {"response_format": "output_config.format", "stop": "stop_sequences"}

    async def answer(self) -> Object:
        """Return the whole answer; raise what Generation.whole raises."""
        await self.read()
        content = [_whole(block) for block in self.whole_blocks]
        return {**self._beginning(), "content": content, **self._end(), "usage": self._usage()}

    def _first_events(self) -> bytes:
        """Return the opening events, made with the first output because it tells how much of the prompt was cached."""
        start = {**self._beginning(), "content": [], "stop_reason": None, "stop_sequence": None}
        usage = {**self._usage(), "output_tokens": 0}
        return _event({"type": "message_start", "message": {**start, "usage": usage}}) + _event({"type": "ping"})

    def _written(self, event: BlockEvent) -> bytes:
        return _event(_written(event))

    def last_events(self) -> bytes:
        end = {"type": "message_delta", "delta": self._end(), "usage": self._usage()}
        return _event(end) + _event({"type": "message_stop"})

    def failure(self, error: Exception) -> bytes:
        """Return the last event of a stream that fails."""
        return _event(anthropic_error(error_body(error)).body)

    def _beginning(self) -> Object:
        return {"id": self.head.id, "type": "message", "role": "assistant", "model": self.head.model}

    def _end(self) -> Object:
        stop_sequence = self.stop_reason if isinstance(self.stop_reason, str) else None
        if self.finish_reason is FinishReason.LENGTH:
            stop_reason = "max_tokens"
        elif self.blocks.has_calls and not self.has_incomplete_call:
            stop_reason = "tool_use"
        else:
            stop_reason = "end_turn" if stop_sequence is None else "stop_sequence"
        return {"stop_reason": stop_reason, "stop_sequence": stop_sequence}

    def _usage(self) -> Object:
        """Return Anthropic's usage object, which counts the cached prompt tokens separately."""
        counts = self.usage
        return {
            "input_tokens": counts.num_prompt_tokens - counts.num_cached_tokens,
            "cache_read_input_tokens": counts.num_cached_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": counts.num_output_tokens,
            **{name: _TIERS[served] for name, served in self.tier.items()},
            **counts.drift,
        }


def _written(event: BlockEvent) -> Object:
    match event:
        case BlockBegun(block):
            return {"type": "content_block_start", "index": block.index, "content_block": _empty(block)}
        case BlockGrown(block, text):
            delta: Object
            match block.kind:
                case BlockKind.REASONING:
                    delta = {"type": "thinking_delta", "thinking": text}
                case BlockKind.TEXT:
                    delta = {"type": "text_delta", "text": text}
                case BlockKind.CALL:
                    delta = {"type": "input_json_delta", "partial_json": text}
            return {"type": "content_block_delta", "index": block.index, "delta": delta}
        case BlockEnded(block):
            return {"type": "content_block_stop", "index": block.index}


def _empty(block: Block) -> Object:
    match block.kind:
        case BlockKind.REASONING:
            return {"type": "thinking", "thinking": "", "signature": ""}
        case BlockKind.TEXT:
            return {"type": "text", "text": ""}
        case BlockKind.CALL:
            return {"type": "tool_use", "id": f"toolu_{block.id}", "name": block.name, "input": {}}


def _whole(block: Block) -> Object:
    match block.kind:
        case BlockKind.REASONING:
            return {**_empty(block), "thinking": block.text}
        case BlockKind.TEXT:
            return {**_empty(block), "text": block.text}
        case BlockKind.CALL:
            return {**_empty(block), "input": arguments_of(block.text)}


def _event(body: Object) -> bytes:
    return named_event(body["type"], body)
