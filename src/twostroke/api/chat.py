"""A chat completion: from the request's fields to the engine and back, whole or as a stream. No HTTP in here."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from twostroke.api.generation import Caller, Generation, prepared
from twostroke.api.logprobs import chat_logprobs, prompt_logprobs
from twostroke.api.protocol.chat import ChatRequest
from twostroke.api.sse import DONE, event
from twostroke.api.translate import chat_params, check_stream_options
from twostroke.api.usage import UsageCount
from twostroke.engine.client import EngineClient
from twostroke.engine.input_processor import PromptInput
from twostroke.engine.output_processor import OutputKind
from twostroke.outputs import CompletionOutput, RequestOutput

Object = dict[str, Any]


class Chat:
    """One call of /v1/chat/completions; the arguments are those of Completion."""

    def __init__(self, engine: EngineClient, request: ChatRequest, *, answer_id: str, model: str, created: int) -> None:
        self._engine = engine
        self._request = request
        self._id = answer_id
        self._head: Object = {"id": answer_id, "created": created, "model": model}
        self._usage = UsageCount()
        self._generation: Generation | None = None
        self._begun: set[int] = set()

    async def open(self, caller: Caller) -> None:
        """Checks everything and queues the conversation; raises what Completion.open raises."""
        request = self._request
        request.check_refused()
        check_stream_options(request)
        params = chat_params(request)
        template_kwargs = dict(request.chat_template_kwargs or {})
        if request.reasoning_effort is not None:
            template_kwargs.setdefault("reasoning_effort", request.reasoning_effort)
        continues = bool(request.continue_final_message)
        opens_turn = request.add_generation_prompt if request.add_generation_prompt is not None else not continues
        tools = None
        if request.tools and request.tool_choice != "none":
            tools = [tool.model_dump(exclude_none=True) for tool in request.tools]

        def prepare() -> list[PromptInput]:
            return [
                self._engine.inputs.process_chat(
                    request.messages,
                    params,
                    tools=tools,
                    documents=request.documents,
                    add_generation_prompt=opens_turn,
                    continue_final_message=continues,
                    chat_template_kwargs=template_kwargs,
                    add_special_tokens=bool(request.add_special_tokens),
                    truncate_prompt_tokens=request.truncate_prompt_tokens,
                )
            ]

        prompts = await prepared(prepare, sum(len(str(message.get("content"))) for message in request.messages))
        self._generation = Generation(
            self._engine,
            prompts,
            self._id,
            caller,
            priority=request.priority or 0,
            cache_salt=request.cache_salt,
            kind=OutputKind.DELTA if request.stream else OutputKind.FINAL,
        )

    def close(self) -> None:
        """The caller has left, or has its answer."""
        if self._generation is not None:
            self._generation.close()

    async def answer(self) -> Object:
        """The whole answer; raises what Generation.whole raises."""
        assert self._generation is not None, "open() comes first"
        (output,) = await self._generation.whole()
        self._usage.add(0, output)
        answer: Object = {
            **self._head,
            "object": "chat.completion",
            "choices": [
                {
                    "index": part.index,
                    "message": {"role": "assistant", "content": self._echoed() + part.text, "refusal": None},
                    **self._end(part),
                }
                for part in output.outputs
            ],
            "usage": self._usage.as_json(),
        }
        self._add_prompt(answer, output)
        return answer

    async def chunks(self) -> AsyncIterator[bytes]:
        """The answer as events; raises what Generation.take raises."""
        assert self._generation is not None, "open() comes first"
        options = self._request.stream_options
        wants_usage = options is not None and bool(options.include_usage)
        continuous = options is not None and bool(options.continuous_usage_stats)
        head = {**self._head, "object": "chat.completion.chunk"}
        while outputs := await self._generation.take():
            events: list[bytes] = []
            for number, output in outputs:
                self._usage.add(number, output)
                for part in output.outputs:
                    for choice in self._pieces(part):
                        chunk: Object = {**head, "choices": [choice]}
                        if wants_usage or continuous:
                            chunk["usage"] = self._usage.as_json() if continuous else None
                        if not self._begun:
                            self._add_prompt(chunk, output)
                        self._begun.add(part.index)
                        events.append(event(chunk))
            yield b"".join(events)
        if wants_usage:
            yield event({**head, "choices": [], "usage": self._usage.as_json()})
        yield DONE

    def _pieces(self, part: CompletionOutput) -> list[Object]:
        """The choices of the chunks that say what is new."""
        delta: Object = {"content": part.text}
        if part.index not in self._begun:
            delta = {"role": "assistant", "content": self._echoed() + part.text}
        return [{"index": part.index, "delta": delta, **self._end(part)}]

    def _end(self, part: CompletionOutput) -> Object:
        """What a choice says beside its text."""
        request = self._request
        logprobs = None
        if request.logprobs:
            logprobs = chat_logprobs(
                part.token_ids,
                part.logprobs or [],
                request.top_logprobs or 0,
                self._engine.tokenizer,
                as_token_ids=bool(request.return_tokens_as_token_ids),
            )
        end: Object = {"logprobs": logprobs, "finish_reason": part.finish_reason, "stop_reason": part.stop_reason}
        if request.return_token_ids:
            end["token_ids"] = part.token_ids
        return end

    def _add_prompt(self, answer: Object, output: RequestOutput) -> None:
        if self._request.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        if self._request.return_token_ids:
            answer["prompt_token_ids"] = output.prompt_token_ids

    def _echoed(self) -> str:
        """The message that the answer goes on in, where it is to stand before it."""
        if not (self._request.echo and self._request.continue_final_message):
            return ""
        content = self._request.messages[-1].get("content")
        return content if isinstance(content, str) else ""
