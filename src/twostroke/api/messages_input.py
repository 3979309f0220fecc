"""A conversation in Anthropic's words, put into those of chats."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from twostroke.api.protocol.chat import ChatRequest
from twostroke.api.protocol.message_fields import content_of
from twostroke.api.protocol.messages import (
    ContentBlock,
    CountTokensRequest,
    Message,
    MessagesRequest,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
)
from twostroke.errors import InvalidParameter

Object = dict[str, Any]
MESSAGES_WORDS = {"response_format": "output_config.format", "stop": "stop_sequences"}
"""What Anthropic's API calls parameters of chats."""


def chat_of_messages(request: CountTokensRequest) -> ChatRequest:
    """The chat that asks for the same.

    Raises:
        InvalidParameter: a field that is not supported, or a choice of tool without its name.
    """
    request.check_refused()
    fields = request.as_chat_fields()
    fields["messages"] = messages = list(_messages(request))
    last = messages[-1]
    fields["continue_final_message"] = continues = last["role"] == "assistant" and "tool_calls" not in last
    if continues and not isinstance(last["content"], str):  # one text, in which the model goes on
        last["content"] = "".join(part["text"] for part in last["content"])
    if request.tools:
        fields["tools"] = [
            {
                "type": "function",
                "function": {"name": tool.name, "description": tool.description, "parameters": tool.input_schema},
            }
            for tool in request.tools
        ]
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


def _tool_choice(choice: ToolChoice, *, has_tools: bool) -> str | Object:
    if choice.type == "any" and not has_tools:
        raise InvalidParameter("tool_choice", choice.type, "needs at least one of tools")
    if choice.type != "tool":
        return {"auto": "auto", "any": "required", "none": "none"}[choice.type]
    if choice.name is None:
        raise InvalidParameter("tool_choice.name", None, "type tool needs one", "Name one of tools.")
    return {"type": "function", "function": {"name": choice.name}}


def _messages(request: CountTokensRequest) -> Iterator[Object]:
    if request.system:
        yield {"role": "system", "content": _content(request.system)}
    for index, message in enumerate(request.messages):
        yield from _turn(message, f"messages.{index}")


_OWN_BLOCKS: dict[str, tuple[type[ContentBlock], ...]] = {
    "user": (TextBlock, ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, RedactedThinkingBlock, ToolUseBlock),
    "system": (TextBlock,),
}
"""What each role may say."""
_WRITERS = {"tool_result": "user", "thinking": "assistant", "redacted_thinking": "assistant", "tool_use": "assistant"}
"""Who says blocks that not every role may say."""


def _turn(message: Message, where: str) -> Iterator[Object]:
    """One turn, which is several messages where it brings results of calls: each is a message of role tool."""
    role = message.role
    blocks = [TextBlock(type="text", text=message.content)] if isinstance(message.content, str) else message.content
    for block in blocks:
        if not isinstance(block, _OWN_BLOCKS[role]):
            limit = f"the role {role!r} cannot have a block of this type"
            raise InvalidParameter(f"{where}.content", block.type, limit, f"Use {_WRITERS[block.type]!r}.")
    results = [block for block in blocks if isinstance(block, ToolResultBlock)]
    for block in results:
        yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _content(block.content or "")}
    if len(results) < len(blocks) or not blocks:
        yield _own_words(role, blocks)


def _own_words(role: str, blocks: Sequence[ContentBlock]) -> Object:
    """What a turn says beside the results it brings. A call without words has an empty text: templates expect one."""
    texts = [block for block in blocks if isinstance(block, TextBlock)]
    turn: Object = {"role": role, "content": _content(texts)}
    if reasoning := [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]:
        turn["reasoning_content"] = "\n".join(reasoning)
    calls = [block for block in blocks if isinstance(block, ToolUseBlock)]
    if calls:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.input, ensure_ascii=False)},
            }
            for call in calls
        ]
    return turn


def _content(given: str | Sequence[TextBlock]) -> str | list[dict[str, str]]:
    return given if isinstance(given, str) else content_of([block.text for block in given])
