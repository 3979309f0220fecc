"""A chat completion, as OpenAI writes it: whole or as a stream. No HTTP in here."""

from __future__ import annotations

import asyncio
from functools import partial

import msgspec

from twostroke.api.chat_choice import ChatChoice, Object
from twostroke.api.conversation import Conversation
from twostroke.api.generation import Caller, Generation
from twostroke.api.logprobs import as_written, chat_logprobs, prompt_logprobs, takes_long
from twostroke.api.protocol.fields import tier_of
from twostroke.api.sse import DONE, Later, RepeatedEvent, event
from twostroke.outputs import CompletionOutput, RequestOutput


class Chat:
    """One call of /v1/chat/completions.

    Args:
        conversation: that is answered.
        answer_id: of the answer.
        model: the name that the answer gives the model.
        created: when, in whole seconds since 1970.
    """

    def __init__(self, conversation: Conversation, *, answer_id: str, model: str, created: int) -> None:
        self._conversation = conversation
        self._request = conversation.request
        self._tokenizer = conversation.engine.tokenizer
        self._usage = conversation.usage
        tier = tier_of(self._request.service_tier, uses_priority=conversation.engine.facts.uses_priority)
        self._head: Object = {"id": answer_id, "created": created, "model": model, **tier}
        self._chunk_head: Object = {**self._head, "object": "chat.completion.chunk"}
        options = self._request.stream_options
        self._wants_usage = options is not None and bool(options.include_usage)
        self._says_usage_along = options is not None and options.says_usage_along
        says_more = self._says_usage_along or self._request.logprobs or self._request.return_token_ids
        self._is_regular = not says_more
        """Whether one chunk differs from the next by its delta alone."""
        self._has_logprobs = bool(self._request.logprobs) or self._request.prompt_logprobs is not None
        self._repeated: dict[int, RepeatedEvent] = {}
        self._has_begun = False
        self._prompt_logprobs: list[msgspec.Raw | None] | None = None
        """Scores of the prompt. A stream brings them with its first output, even if that has no text."""
        self._choices: dict[int, ChatChoice] = {}

    @property
    def generation(self) -> Generation:
        """What was opened."""
        return self._conversation.generation

    async def open(self, caller: Caller) -> None:
        """Checks everything and queues the conversation; raises what Completion.open raises."""
        await self._conversation.open(caller)

    def close(self) -> None:
        """The caller has left, or has its answer."""
        self._conversation.close()

    async def answer(self) -> Object:
        """The whole answer; raises what Generation.whole raises."""
        output = await self._conversation.whole()
        if takes_long(output):
            return await asyncio.to_thread(self._whole, output)
        return self._whole(output)

    def _whole(self, output: RequestOutput) -> Object:
        self._hear_prompt(output)
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

    def events(self, number: int, output: RequestOutput) -> bytes | Later:
        """What is new of a streamed answer; nothing while it is not certain what the text means."""
        if self._has_logprobs and takes_long(output):
            return partial(self._events_now, number, output)
        return self._events_now(number, output)

    def _events_now(self, number: int, output: RequestOutput) -> bytes:
        if self._wants_usage:  # else nobody is told
            self._usage.add(number, output)
        self._hear_prompt(output)
        events = b""
        for part in output.outputs:
            events += self._events_of(part, output)
        return events

    def _events_of(self, part: CompletionOutput, output: RequestOutput) -> bytes:
        """One choice's."""
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
            chunk["usage"] = self._usage_now() if self._says_usage_along else None
        if not self._has_begun:
            self._has_begun = True
            self._add_prompt(chunk, output)
        return event(chunk)

    def _content_event(self, part: CompletionOutput) -> RepeatedEvent:
        """Most events of most answers: more of the content, and nothing else."""
        usage = {"usage": None} if self._wants_usage else {}

        def body(content: str) -> Object:
            (piece,) = self._pieces([{"content": content}], part)
            return {**self._chunk_head, "choices": [piece], **usage}

        return RepeatedEvent(body)

    def last_events(self) -> bytes:
        """What a streamed answer ends with."""
        if not self._wants_usage:
            return DONE
        return event({**self._chunk_head, "choices": [], "usage": self._usage_now()}) + DONE

    def _pieces(self, deltas: list[Object], part: CompletionOutput) -> list[Object]:
        """The choices of the chunks that say what is new; what ends with them is in the last one."""
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
                self._conversation.parser(),
                self._conversation.token_texts(),
                prefix=self._echoed(),
                shows_reasoning=self._request.include_reasoning is not False,
                names_tool=self._conversation.tools.names_one,
            )
        return self._choices[index]

    def _usage_now(self) -> Object:
        self._usage.num_reasoning_tokens = sum(choice.num_reasoning_tokens for choice in self._choices.values())
        return self._usage.as_json()

    def _end(self, choice: ChatChoice, part: CompletionOutput) -> Object:
        """What a choice says beside its message."""
        request = self._request
        logprobs = None
        if request.logprobs:
            logprobs = chat_logprobs(
                part.token_ids,
                part.logprobs or [],
                request.top_logprobs or 0,
                self._tokenizer,
                as_token_ids=bool(request.return_tokens_as_token_ids),
            )
        end: Object = {
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason(part),
            "stop_reason": part.stop_reason,
        }
        if request.return_token_ids:
            end["token_ids"] = part.token_ids
        return end

    def _hear_prompt(self, output: RequestOutput) -> None:
        if output.prompt_logprobs is not None and self._request.prompt_logprobs is not None:
            self._prompt_logprobs = prompt_logprobs(output.prompt_logprobs)

    def _add_prompt(self, answer: Object, output: RequestOutput) -> None:
        if self._request.prompt_logprobs is not None:
            answer["prompt_logprobs"] = self._prompt_logprobs
        answer["prompt_token_ids"] = output.prompt_token_ids if self._request.return_token_ids else None

    def _echoed(self) -> str:
        """The message that the answer goes on in, where it is to stand before it."""
        return self._conversation.said if self._request.echo else ""


def _is_content(deltas: list[Object]) -> bool:
    return len(deltas) == 1 and deltas[0].keys() == {"content"}
