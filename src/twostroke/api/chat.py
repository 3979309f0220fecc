"""Chat completions in OpenAI's format, whole or streamed. This module has no HTTP."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from twostroke.api.answering import DONE, DeferredEvents, EventTemplate, event
from twostroke.api.conversation import ChoiceReader, Conversation
from twostroke.api.dialect import Dialect
from twostroke.api.generation import AnswerHead
from twostroke.api.logprobs import as_written, chat_logprobs, prompt_logprobs, takes_long
from twostroke.api.parsers.json_text import is_complete_value
from twostroke.api.parsers.output import (
    ContentDelta,
    Delta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallBegin,
    append_joined,
    join_deltas,
)
from twostroke.api.parsers.tool_choice import NamedTool
from twostroke.api.protocol.chat import ChatRequest, function_call
from twostroke.client.engine_client import EngineClient
from twostroke.outputs import CompletionOutput, RequestOutput
from twostroke.request import FinishReason

Object = dict[str, Any]


class ChatChoice:
    """Writer of one choice, whole or in deltas.

    Args:
        text: reader of the choice.
        prefix: text before the content (the continued message, if it is to be echoed).
        shows_reasoning: whether the client wants the reasoning.
        names_tool: whether the client named the tool to call; the finish reason is then not "tool_calls".
    """

    def __init__(self, text: ChoiceReader, *, prefix: str, shows_reasoning: bool, names_tool: bool) -> None:
        self._text = text
        self._prefix = prefix
        self._shows_reasoning = shows_reasoning
        self._names_tool = names_tool
        self._has_begun = False
        self._has_calls = False

    @property
    def num_reasoning_tokens(self) -> int:
        """Reasoning tokens read so far."""
        return self._text.num_reasoning_tokens

    def message(self, part: CompletionOutput) -> Object:
        """Return the whole message."""
        is_cut = part.finish_reason is not FinishReason.STOP
        parsed = join_deltas(self._text.read(part))
        self._has_calls = bool(parsed.tool_calls)
        # an incomplete call is reported only with finish reason "length"
        calls = [call for call in parsed.tool_calls if is_cut or is_complete_value(call.arguments)]
        content = self._prefix + parsed.content
        message: Object = {
            "role": "assistant",
            "content": None if calls and not content else content,
            "refusal": None,
        }
        if parsed.reasoning and self._shows_reasoning:
            message |= {"reasoning": parsed.reasoning, "reasoning_content": parsed.reasoning}
        if calls:
            message["tool_calls"] = [function_call(_call_id(), call.name, call.arguments) for call in calls]
        return message

    def deltas(self, part: CompletionOutput) -> list[Object]:
        """Return the new deltas; empty while the meaning of the text is not certain."""
        found: Sequence[Delta] = self._text.read(part)
        found = found if len(found) < 2 else _joined(found)
        deltas = [written for delta in found if (written := self._written(delta)) is not None]
        if not self._has_begun:
            self._has_begun = True
            opening: Object = {"role": "assistant", "content": self._prefix}
            if deltas and "content" in deltas[0]:
                opening["content"] += deltas.pop(0)["content"]
            deltas.insert(0, opening)
        return deltas

    def finish_reason(self, part: CompletionOutput) -> str | None:
        """Return the finish reason; None before the end."""
        has_called = self._has_calls and not self._text.has_incomplete_call
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
                return {"tool_calls": [{"index": index, **function_call(_call_id(), name, "")}]}
            case ToolCallArguments(index, text):
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _joined(deltas: Sequence[Delta]) -> Sequence[Delta]:
    """Return the deltas with adjacent ones of one kind joined."""
    joined: list[Delta] = []
    for delta in deltas:
        append_joined(joined, delta)
    return joined


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


class Chat(Conversation):
    """One call of /v1/chat/completions.

    Args:
        engine: engine that runs it.
        request: request that matches the schema.
        dialect: syntax of the model's reasoning and tool calls.
        head: head of the answer.
    """

    def __init__(self, engine: EngineClient, request: ChatRequest, dialect: Dialect, head: AnswerHead) -> None:
        super().__init__(engine, request, dialect, head)
        self._head: Object = {"id": head.id, "created": head.created, "model": head.model, **self.tier}
        self._chunk_head: Object = {**self._head, "object": "chat.completion.chunk"}
        options = request.stream_options
        self._wants_usage = options is not None and bool(options.include_usage)
        self._has_usage_in_chunks = options is not None and options.has_usage_in_chunks
        says_more = self._has_usage_in_chunks or request.logprobs or request.return_token_ids
        self._is_regular = not says_more
        """Whether chunks differ by their deltas alone."""
        self._has_logprobs = bool(request.logprobs) or request.prompt_logprobs is not None
        self._repeated: dict[int, EventTemplate] = {}
        self._has_begun = False
        self._prompt_logprobs: list[msgspec.Raw | None] | None = None
        """Log-probabilities of the prompt. A stream sends them with its first chunk, even if that has no text."""
        self._choices: dict[int, ChatChoice] = {}

    async def answer(self) -> Object:
        """Return the whole answer; raise what Generation.whole raises."""
        output = await self.whole()
        if takes_long(output):
            return await asyncio.to_thread(self._whole, output)
        return self._whole(output)

    def _whole(self, output: RequestOutput) -> Object:
        self._store_prompt_logprobs(output)
        choices: list[Object] = []
        for part in output.outputs:
            choice = self._choice(part.index)
            message = choice.message(part)
            end = self._end(choice, part)
            end["logprobs"] = as_written(end["logprobs"], len(part.token_ids))
            choices.append({"index": part.index, "message": message, "token_ids": None, **end})
        answer: Object = {
            **self._head,
            "object": "chat.completion",
            "choices": choices,
            "usage": self._usage_now(),
        }
        answer["prompt_logprobs"] = None
        self._add_prompt(answer, output)
        return answer

    def events(self, number: int, output: RequestOutput) -> bytes | DeferredEvents:
        if self._has_logprobs and takes_long(output):
            return partial(self._events_now, number, output)
        return self._events_now(number, output)

    def _events_now(self, number: int, output: RequestOutput) -> bytes:
        if self._wants_usage:  # otherwise usage is not reported
            self.usage.add(number, output)
        self._store_prompt_logprobs(output)
        events = b""
        for part in output.outputs:
            events += self._events_of(part, output)
        return events

    def _events_of(self, part: CompletionOutput, output: RequestOutput) -> bytes:
        """Return the events of one choice."""
        deltas = self._choice(part.index).deltas(part)
        if self._is_regular and self._has_begun and part.finish_reason is None and _is_content(deltas):
            repeated = self._repeated.get(part.index)
            if repeated is None:
                repeated = self._repeated[part.index] = self._content_event(part)
            return repeated.filled(deltas[0]["content"])
        return b"".join([self._event(piece, output) for piece in self._pieces(deltas, part)])

    def _event(self, piece: Object, output: RequestOutput) -> bytes:
        chunk: Object = {**self._chunk_head, "choices": [piece]}
        if self._wants_usage:
            chunk["usage"] = self._usage_now() if self._has_usage_in_chunks else None
        if not self._has_begun:
            self._has_begun = True
            self._add_prompt(chunk, output)
        return event(chunk)

    def _content_event(self, part: CompletionOutput) -> EventTemplate:
        """Return the template of the most frequent event: more content and nothing else."""
        usage = {"usage": None} if self._wants_usage else {}

        def body(content: str) -> Object:
            (piece,) = self._pieces([{"content": content}], part)
            return {**self._chunk_head, "choices": [piece], **usage}

        return EventTemplate(body)

    def last_events(self) -> bytes:
        if not self._wants_usage:
            return DONE
        return event({**self._chunk_head, "choices": [], "usage": self._usage_now()}) + DONE

    def _pieces(self, deltas: list[Object], part: CompletionOutput) -> list[Object]:
        """Return the chunks' choices for these deltas; the last one has the fields of a choice's end."""
        end = self._end(self._choice(part.index), part)
        if not deltas and (part.finish_reason is not None or end["logprobs"] or "token_ids" in end):
            deltas = [{}]
        pieces: list[Object] = [
            {"index": part.index, "delta": delta, "logprobs": None, "finish_reason": None, "stop_reason": None}
            for delta in deltas
        ]
        if pieces:
            pieces[-1] |= end
        return pieces

    def _choice(self, index: int) -> ChatChoice:
        if index not in self._choices:
            self._choices[index] = ChatChoice(
                self.choice_reader(),
                prefix=self.said if self.request.echo else "",  # the message that is continued
                shows_reasoning=self.request.include_reasoning is not False,
                names_tool=isinstance(self.tools.choice, NamedTool),
            )
        return self._choices[index]

    def _usage_now(self) -> Object:
        self.usage.num_reasoning_tokens = sum(choice.num_reasoning_tokens for choice in self._choices.values())
        return self.usage.as_json()

    def _end(self, choice: ChatChoice, part: CompletionOutput) -> Object:
        """Return the fields of a choice beside its message."""
        end: Object = {
            "logprobs": self._logprobs(part) if self.request.logprobs else None,
            "finish_reason": choice.finish_reason(part),
            "stop_reason": part.stop_reason,
        }
        if self.request.return_token_ids:
            end["token_ids"] = part.token_ids
        return end

    def _logprobs(self, part: CompletionOutput) -> Object:
        return chat_logprobs(
            part.token_ids,
            part.logprobs or [],
            self.request.top_logprobs or 0,
            self.engine.tokenizer,
            as_token_ids=bool(self.request.return_tokens_as_token_ids),
        )

    def _store_prompt_logprobs(self, output: RequestOutput) -> None:
        if output.prompt_logprobs is not None and self.request.prompt_logprobs is not None:
            self._prompt_logprobs = prompt_logprobs(output.prompt_logprobs)

    def _add_prompt(self, answer: Object, output: RequestOutput) -> None:
        if self.request.prompt_logprobs is not None:
            answer["prompt_logprobs"] = self._prompt_logprobs
        answer["prompt_token_ids"] = output.prompt_token_ids if self.request.return_token_ids else None


def _is_content(deltas: list[Object]) -> bool:
    return len(deltas) == 1 and deltas[0].keys() == {"content"}
