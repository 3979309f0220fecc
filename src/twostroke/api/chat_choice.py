"""One choice of a chat: its text, taken apart into reasoning, content and tool calls, as OpenAI writes them."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from twostroke.api.parsers.chat_parser import ChatParser
from twostroke.api.parsers.deltas import ContentDelta, Delta, ReasoningDelta, ToolCallArguments, ToolCallBegin
from twostroke.api.parsers.json_text import is_whole_value
from twostroke.outputs import CompletionOutput
from twostroke.request import FinishReason
from twostroke.tokenizer.detokenizer import TokenTexts

Object = dict[str, Any]


class ChatChoice:
    """Writes one choice, whole or piece by piece.

    Args:
        parser: of the model's dialect; for this choice alone.
        token_texts: what each new token adds to the text, for this choice alone.
        prefix: text that stands before the content (the message that is continued, where it is to be echoed).
        shows_reasoning: whether the client wants the reasoning.
        names_tool: whether the client named the one tool to call: then a call is no reason to stop for.
    """

    def __init__(
        self, parser: ChatParser, token_texts: TokenTexts, *, prefix: str, shows_reasoning: bool, names_tool: bool
    ) -> None:
        self._parser = parser
        self._token_texts = token_texts
        self._prefix = prefix
        self._shows_reasoning = shows_reasoning
        self._names_tool = names_tool
        self._has_begun = False
        self._has_calls = False

    @property
    def num_reasoning_tokens(self) -> int:
        """Of what was read so far."""
        return self._parser.num_reasoning_tokens

    def message(self, part: CompletionOutput) -> Object:
        """The whole message."""
        is_cut = part.finish_reason is not FinishReason.STOP
        parsed = self._parser.parse(part.text, self._token_texts.of(part.token_ids), is_cut=is_cut)
        self._has_calls = bool(parsed.tool_calls)
        # that a call is half is told by finish reason "length" and by nothing else
        calls = [call for call in parsed.tool_calls if is_cut or is_whole_value(call.arguments)]
        content = self._prefix + parsed.content
        message: Object = {
            "role": "assistant",
            "content": None if calls and not content else content,
            "refusal": None,
        }
        if parsed.reasoning and self._shows_reasoning:
            message |= {"reasoning": parsed.reasoning, "reasoning_content": parsed.reasoning}
        if calls:
            message["tool_calls"] = [
                {"id": _call_id(), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in calls
            ]
        return message

    def deltas(self, part: CompletionOutput) -> list[Object]:
        """What is new, as the deltas of chunks; empty when nothing is certain yet."""
        found = self._parser.push(part.text, self._token_texts.of(part.token_ids))
        if part.finish_reason is not None:
            found += self._parser.finish(is_cut=part.finish_reason is not FinishReason.STOP)
        deltas = [written for delta in _joined(found) if (written := self._written(delta)) is not None]
        if not self._has_begun:
            self._has_begun = True
            opening: Object = {"role": "assistant", "content": self._prefix}
            if deltas and "content" in deltas[0]:
                opening["content"] += deltas.pop(0)["content"]
            deltas.insert(0, opening)
        return deltas

    def finish_reason(self, part: CompletionOutput) -> str | None:
        """Why it ended, once it has."""
        has_called = self._has_calls and not self._parser.has_half_call
        if part.finish_reason is FinishReason.STOP and has_called and not self._names_tool:
            return "tool_calls"
        return part.finish_reason

    def _written(self, delta: Delta) -> Object | None:
        match delta:
            case ContentDelta(text):
                return {"content": text}
            case ReasoningDelta(text):
                return {"reasoning": text, "reasoning_content": text} if self._shows_reasoning else None
            case ToolCallBegin(index, name):
                self._has_calls = True
                function = {"name": name, "arguments": ""}
                return {"tool_calls": [{"index": index, "id": _call_id(), "type": "function", "function": function}]}
            case ToolCallArguments(index, text):
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _joined(deltas: Sequence[Delta]) -> Sequence[Delta]:
    """Neighbours of one kind as one."""
    if len(deltas) == 1:
        return deltas
    joined: list[Delta] = []
    for delta in deltas:
        last = joined[-1] if joined else None
        if isinstance(delta, ContentDelta) and isinstance(last, ContentDelta):
            joined[-1] = ContentDelta(last.text + delta.text)
        elif isinstance(delta, ReasoningDelta) and isinstance(last, ReasoningDelta):
            joined[-1] = ReasoningDelta(last.text + delta.text)
        elif isinstance(delta, ToolCallArguments) and isinstance(last, ToolCallArguments) and last.index == delta.index:
            joined[-1] = ToolCallArguments(last.index, last.text + delta.text)
        else:
            joined.append(delta)
    return joined


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
