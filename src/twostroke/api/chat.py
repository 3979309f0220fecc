"""A chat completion: from the request's fields to the engine and back, whole or as a stream. No HTTP in here."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from twostroke.api.chat_choice import ChatChoice
from twostroke.api.dialect import PROMPT_TAIL_TOKENS, ChatTools, Dialect, structured_outputs
from twostroke.api.generation import Caller, Generation, prepared
from twostroke.api.logprobs import chat_logprobs, prompt_logprobs
from twostroke.api.parsers.chat_parser import ChatParser
from twostroke.api.protocol.chat import ChatRequest
from twostroke.api.sse import DONE, event
from twostroke.api.translate import chat_params, check_stream_options
from twostroke.api.usage import UsageCount
from twostroke.engine.client import EngineClient
from twostroke.engine.input_processor import PromptInput
from twostroke.engine.output_processor import OutputKind
from twostroke.outputs import CompletionOutput, RequestOutput
from twostroke.sampling_params import SamplingParams

Object = dict[str, Any]


class Chat:
    """One call of /v1/chat/completions.

    Args:
        engine: that answers.
        request: checked against the schema.
        dialect: how the model writes reasoning and tool calls.
        answer_id: of the answer.
        model: the name that the answer gives the model.
        created: when, in whole seconds since 1970.
    """

    def __init__(
        self,
        engine: EngineClient,
        request: ChatRequest,
        dialect: Dialect,
        *,
        answer_id: str,
        model: str,
        created: int,
    ) -> None:
        self._engine = engine
        self._request = request
        self._dialect = dialect
        self._id = answer_id
        self._head: Object = {"id": answer_id, "created": created, "model": model}
        self._usage = UsageCount()
        self._tools = ChatTools((), "none", parallel=True)
        self._is_constrained = False
        self._prompt_tail = ""
        self._choices: dict[int, ChatChoice] = {}
        self._generation: Generation | None = None

    async def open(self, caller: Caller) -> None:
        """Checks everything and queues the conversation; raises what Completion.open raises."""
        request = self._request
        request.check_refused()
        check_stream_options(request)
        self._tools = self._dialect.tools_of(request)
        form = structured_outputs(request.structured_outputs, request.response_format, self._tools)
        self._is_constrained = form is not None
        params = chat_params(request, form)
        num_chars = sum(len(str(message.get("content"))) for message in request.messages)
        (prompt,) = await prepared(lambda: [self._prompt(params)], num_chars)
        tail = prompt.prompt_token_ids[-PROMPT_TAIL_TOKENS:]
        self._prompt_tail = self._engine.tokenizer.decode(tail, skip_special_tokens=False)
        self._generation = Generation(
            self._engine,
            [prompt],
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
        choices: list[Object] = []
        for part in output.outputs:
            choice = self._choice(part.index)
            message = choice.message(part, self._engine.tokenizer)
            choices.append({"index": part.index, "message": message, **self._end(choice, part)})
        answer: Object = {
            **self._head,
            "object": "chat.completion",
            "choices": choices,
            "usage": self._usage_now(),
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
        is_first = True
        while outputs := await self._generation.take():
            events: list[bytes] = []
            for number, output in outputs:
                self._usage.add(number, output)
                for piece in [piece for part in output.outputs for piece in self._pieces(part)]:
                    chunk: Object = {**head, "choices": [piece]}
                    if wants_usage or continuous:
                        chunk["usage"] = self._usage_now() if continuous else None
                    if is_first:
                        self._add_prompt(chunk, output)
                        is_first = False
                    events.append(event(chunk))
            if events:
                yield b"".join(events)
        if wants_usage:
            yield event({**head, "choices": [], "usage": self._usage_now()})
        yield DONE

    def _prompt(self, params: SamplingParams) -> PromptInput:
        """The conversation in tokens, checked."""
        request = self._request
        template_kwargs = dict(request.chat_template_kwargs or {})
        if request.reasoning_effort is not None:
            template_kwargs.setdefault("reasoning_effort", request.reasoning_effort)
        continues = bool(request.continue_final_message)
        tools = [tool.model_dump(exclude_none=True) for tool in request.tools or ()]
        return self._engine.inputs.process_chat(
            request.messages,
            params,
            tools=tools if self._tools.choice != "none" else None,
            documents=request.documents,
            add_generation_prompt=not continues
            if request.add_generation_prompt is None
            else request.add_generation_prompt,
            continue_final_message=continues,
            chat_template_kwargs=template_kwargs,
            add_special_tokens=bool(request.add_special_tokens),
            truncate_prompt_tokens=request.truncate_prompt_tokens,
            shown_tokens=self._parser().markup,
        )

    def _pieces(self, part: CompletionOutput) -> list[Object]:
        """The choices of the chunks that say what is new; what ends with them is in the last one."""
        choice = self._choice(part.index)
        deltas = choice.deltas(part)
        end = self._end(choice, part)
        if not deltas and (part.finish_reason is not None or end["logprobs"] or "token_ids" in end):
            deltas.append({})
        pieces: list[Object] = [
            {"index": part.index, "delta": delta, "logprobs": None, "finish_reason": None, "stop_reason": None}
            for delta in deltas
        ]
        if pieces:
            pieces[-1] |= end
        return pieces

    def _parser(self) -> ChatParser:
        return self._dialect.parser(self._tools, self._prompt_tail, is_constrained=self._is_constrained)

    def _choice(self, index: int) -> ChatChoice:
        if index not in self._choices:
            self._choices[index] = ChatChoice(
                self._parser(),
                prefix=self._echoed(),
                shows_reasoning=self._request.include_reasoning is not False,
                names_tool=self._tools.names_one,
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
                self._engine.tokenizer,
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
