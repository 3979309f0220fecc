"""Ollama's API: conversion of its requests; answers, whole or one JSON object a line. This module has no HTTP."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar

import msgspec
import numpy as np

from twostroke.api.conversation import ParameterNames, with_client_names
from twostroke.api.embeddings import unit_vector
from twostroke.api.generation import (
    AnswerHead,
    Caller,
    GenerationCall,
    UsageCount,
    input_size,
    prompts_of,
    run_in_thread_if_long,
    shared_params,
)
from twostroke.api.http_errors import error_body, ollama_error
from twostroke.api.protocol.chat import ChatRequest, function_call, offered_function
from twostroke.api.protocol.ollama import (
    OllamaAnswerRequest,
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaMessage,
)
from twostroke.api.protocol.sampling import CompletionRequest, EmbeddingRequest
from twostroke.api.reply import Block, BlockEnded, BlockEvent, BlockGrown, BlockKind, BlockReply, arguments_of
from twostroke.client.engine_client import EngineClient
from twostroke.client.input_processor import PromptInput
from twostroke.errors import InvalidParameter
from twostroke.outputs import RequestOutput, RequestTimes
from twostroke.request import FinishReason
from twostroke.sampling_params import SamplingParams, StructuredOutputs

Object = dict[str, Any]
_SAME_OPTIONS = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")
WORDS: ParameterNames = {
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "response_format": "format",
    "chat_template_kwargs": "think",
    **{name: f"options.{name}" for name in _SAME_OPTIONS},
}
"""Map from a chat's parameter names to Ollama's."""
LATEST = ":latest"
"""Tag that clients add to a model's name."""


def sampling_fields(request: OllamaAnswerRequest, max_model_len: int) -> Object:
    """Return the request's options as fields of OpenAI's API.

    Args:
        request: the request as sent.
        max_model_len: the server's context in tokens.

    Raises:
        InvalidParameter: an unsupported field, or a context larger than the server's.
    """
    request.check_refused()
    fields: Object = {"model": request.model, "stream": request.stream is not False}
    options = request.options
    if options is None:
        return fields
    if options.num_ctx is not None and options.num_ctx > max_model_len:
        limit = f"must be at most {max_model_len}, the context that the server was started with"
        raise InvalidParameter("options.num_ctx", options.num_ctx, limit, "Start it with a larger --max-model-len.")
    fields |= {name: value for name in _SAME_OPTIONS if (value := getattr(options, name)) is not None}
    if options.repeat_penalty is not None:
        fields["repetition_penalty"] = options.repeat_penalty
    if options.num_predict is not None and options.num_predict > 0:
        fields["max_tokens"] = options.num_predict
    return fields


def chat_from_ollama(request: OllamaChatRequest | OllamaGenerateRequest, max_model_len: int) -> ChatRequest:
    """Return the equivalent chat request; raise what `sampling_fields` raises."""
    fields = sampling_fields(request, max_model_len)
    if isinstance(request, OllamaChatRequest):
        fields["messages"] = [_message(message) for message in request.messages or ()]
        if request.tools:
            offered = [tool.function for tool in request.tools]
            fields["tools"] = [offered_function(tool.name, tool.description, tool.parameters) for tool in offered]
    else:
        turns = [("system", request.system), ("user", request.prompt)]
        fields["messages"] = [{"role": role, "content": content} for role, content in turns if content]
    if isinstance(request.think, bool):
        fields["chat_template_kwargs"] = {"enable_thinking": request.think}
    elif request.think is not None:
        fields["reasoning_effort"] = request.think
    if request.format == "json":
        fields["response_format"] = {"type": "json_object"}
    elif request.format:
        schema = {"name": "format", "schema": request.format}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return ChatRequest.model_validate(fields)


def _message(message: OllamaMessage) -> Object:
    told: Object = {"role": message.role, "content": message.content or ""}
    if message.thinking:
        told["reasoning_content"] = message.thinking
    if message.tool_calls:
        told["tool_calls"] = [
            function_call(
                call.id or f"call_{number}",
                call.function.name,
                json.dumps(call.function.arguments or {}, ensure_ascii=False),
            )
            for number, call in enumerate(message.tool_calls)
        ]
    if message.tool_name is not None:
        told["name"] = message.tool_name
    if message.tool_call_id is not None:
        told["tool_call_id"] = message.tool_call_id
    return told


def loaded(request: OllamaAnswerRequest, model: str) -> Object:
    """Return the answer to a request without a prompt, with which clients load a model."""
    is_chat = isinstance(request, OllamaChatRequest)
    said: Object = {"message": {"role": "assistant", "content": ""}} if is_chat else {"response": ""}
    return {"model": model, "created_at": _now(), **said, "done": True, "done_reason": "load"}


def _now() -> str:
    return datetime.fromtimestamp(time.time(), UTC).isoformat().replace("+00:00", "Z")


def line(body: Mapping[str, Any]) -> bytes:
    """Return one JSON object as a line."""
    return msgspec.json.encode(body) + b"\n"


def failure(error: Exception) -> bytes:
    """Return the last line of a stream that fails."""
    return line(ollama_error(error_body(error)).body)


class Lines:
    """Writer of an answer's objects, each a piece of it; the last one has counts and durations.

    Args:
        head: head of the answer.
        is_chat: whether pieces are messages, or texts in the field `response`.
    """

    def __init__(self, head: AnswerHead, *, is_chat: bool) -> None:
        self._head = head
        self._is_chat = is_chat

    def piece(self, text: str = "", thinking: str = "", calls: Sequence[Block] = ()) -> Object:
        """Return a piece of the answer."""
        said: Object = {"thinking": thinking} if thinking else {}
        if calls:
            said["tool_calls"] = [
                {"id": call.id, "function": {"index": number, "name": call.name, "arguments": arguments_of(call.text)}}
                for number, call in enumerate(calls)
            ]
        piece: Object = {"model": self._head.model, "created_at": _now(), "done": False}
        if self._is_chat:
            return {**piece, "message": {"role": "assistant", "content": text, **said}}
        return {**piece, "response": text, **said}

    def ended(
        self, piece: Object, reason: FinishReason | None, usage: UsageCount, times: RequestTimes | None
    ) -> Object:
        """Return the last piece: reason, counts of tokens, and durations in nanoseconds."""
        ended = {**piece, "done": True, "done_reason": "length" if reason is FinishReason.LENGTH else "stop"}
        counts = {"prompt_eval_count": usage.num_prompt_tokens, "eval_count": usage.num_output_tokens}
        if times is None or not times.token_times_s:
            return {**ended, **counts}
        durations = {
            "total_duration": times.e2e_s,
            "load_duration": 0.0,
            "prompt_eval_duration": times.ttft_s - times.queue_time_s,
            "eval_duration": times.e2e_s - times.ttft_s,
        }
        return {**ended, **counts, **{name: round(seconds * 1e9) for name, seconds in durations.items()}}


class OllamaChat(BlockReply):
    """One call of /api/chat, or of /api/generate with the model's chat template."""

    words: ClassVar[ParameterNames] = WORDS
    is_message = True
    """Whether the answer is a message, as in /api/chat."""
    times: RequestTimes | None = None

    @property
    def lines(self) -> Lines:
        """Writer of the answer's objects."""
        return Lines(self.head, is_chat=self.is_message)

    async def answer(self) -> Object:
        """Return the whole answer; raise what Generation.whole raises."""
        await self.read()
        texts = {kind: "".join(block.text for block in self.blocks.all if block.kind is kind) for kind in BlockKind}
        calls = [block for block in self.whole_blocks if block.kind is BlockKind.CALL]
        piece = self.lines.piece(texts[BlockKind.TEXT], texts[BlockKind.REASONING], calls)
        return self.lines.ended(piece, self.finish_reason, self.usage, self.times)

    def last_events(self) -> bytes:
        return line(self.lines.ended(self.lines.piece(), self.finish_reason, self.usage, self.times))

    def _first_events(self) -> bytes:
        return b""

    def _written(self, event: BlockEvent) -> bytes:
        match event:
            case BlockGrown(block, text) if block.kind is not BlockKind.CALL:
                is_text = block.kind is BlockKind.TEXT
                return line(self.lines.piece(text if is_text else "", "" if is_text else text))
            case BlockEnded(block) if block.kind is BlockKind.CALL and not block.is_incomplete_call:
                return line(self.lines.piece(calls=[block]))
            case _:
                return b""

    def _take(self, output: RequestOutput) -> list[BlockEvent]:
        if output.times:
            self.times = output.times[0]
        return super()._take(output)


class OllamaTemplatedGenerate(OllamaChat):
    """One call of /api/generate with the model's chat template."""

    is_message = False


class OllamaRawGenerate(GenerationCall):
    """One call of /api/generate without a chat template.

    Args:
        engine: engine that runs it.
        request: request that matches the schema.
        head: head of the answer.
        default_max_tokens: output tokens of requests that set no limit; None: the rest of the context.
    """

    def __init__(
        self,
        engine: EngineClient,
        request: OllamaGenerateRequest,
        head: AnswerHead,
        default_max_tokens: int | None = None,
    ) -> None:
        super().__init__(engine, head)
        self._request = request
        self._default_max_tokens = default_max_tokens
        self._usage = UsageCount()
        self._lines = Lines(head, is_chat=False)
        self._last: RequestOutput | None = None

    async def open(self, caller: Caller) -> None:
        """Check everything and queue the prompt; raise what Completion.open raises."""
        request, max_model_len = self._request, self.engine.facts.max_model_len
        fields = sampling_fields(request, max_model_len)
        if request.system:
            remedy = "Put it into the prompt, or give the server a --chat-template."
            raise InvalidParameter("system", request.system, "needs a chat template", remedy)
        if request.think:
            raise InvalidParameter("think", request.think, "needs a chat template", "Leave it out.")
        completion = CompletionRequest.model_validate({**fields, "prompt": request.prompt or ""})
        given: Object = {
            **shared_params(completion, _form(request)),
            "max_tokens": completion.max_tokens or self._default_max_tokens,
        }
        with with_client_names(WORDS):
            params = SamplingParams(**given)
        prompt = await run_in_thread_if_long(
            lambda: self.engine.inputs.process(request.prompt or "", params),
            input_size(request.prompt),
            compiles=params.structured_outputs is not None,
        )
        self._begin(completion, [prompt], caller, streams=bool(completion.stream))

    async def answer(self) -> Object:
        """Return the whole answer; raise what AnswerGeneration.whole raises."""
        (output,) = await self.generation.whole()
        return self._ended(self._taken(output))

    def events(self, number: int, output: RequestOutput) -> bytes:
        """Return the line of an output."""
        piece = self._taken(output)
        return line(piece) if piece["response"] else b""

    def last_events(self) -> bytes:
        """Return the last line."""
        return line(self._ended(self._lines.piece()))

    def _taken(self, output: RequestOutput) -> Object:
        self._usage.add(0, output)
        self._last = output
        return self._lines.piece(output.outputs[0].text)

    def _ended(self, piece: Object) -> Object:
        output = self._last
        assert output is not None, "the answer has an output"
        times = output.times[0] if output.times else None
        return self._lines.ended(piece, output.outputs[0].finish_reason, self._usage, times)


def _form(request: OllamaAnswerRequest) -> StructuredOutputs | None:
    if not request.format:
        return None
    return StructuredOutputs(json_object=True) if request.format == "json" else StructuredOutputs(json=request.format)


class OllamaEmbeddings(GenerationCall):
    """One call of /api/embed or /api/embeddings.

    Args:
        engine: engine that runs it.
        request: request that matches the schema.
        head: head of the answer.
    """

    def __init__(
        self, engine: EngineClient, request: OllamaEmbedRequest | OllamaEmbeddingsRequest, head: AnswerHead
    ) -> None:
        super().__init__(engine, head)
        self._request = request

    async def open(self, caller: Caller) -> None:
        """Check everything and queue the texts; raise what Completion.open raises."""
        request, most = self._request, self.engine.facts.hidden_size
        request.check_refused()
        is_list = isinstance(request, OllamaEmbedRequest)
        if is_list and request.dimensions is not None and request.dimensions > most:
            limit = f"must be at most {most}, this model's hidden size"
            raise InvalidParameter("dimensions", request.dimensions, limit)
        given = prompts_of(request.input, "input") if is_list else [request.prompt]
        fields: Object = {"input": "", "model": request.model}
        if is_list and request.truncate is not False:
            fields |= {"truncate_prompt_tokens": -1, "truncation_side": "right"}
        framing = EmbeddingRequest.model_validate(fields)

        def prepare() -> list[PromptInput]:
            return [self.engine.inputs.process_embedding(prompt, framing) for prompt in given]

        self._begin(framing, await run_in_thread_if_long(prepare, input_size(given)), caller, streams=False)

    async def answer(self) -> Object:
        """Return the whole answer; raise what AnswerGeneration.whole raises."""
        outputs = await self.generation.whole()
        dimensions = self._request.dimensions if isinstance(self._request, OllamaEmbedRequest) else None
        vectors = [unit_vector(_state_of(output), dimensions).tolist() for output in outputs]
        if isinstance(self._request, OllamaEmbeddingsRequest):
            return {"embedding": vectors[0]}
        ends_s = [times.e2e_s for output in outputs for times in output.times if times.token_times_s]
        return {
            "model": self.head.model,
            "embeddings": vectors,
            "total_duration": round(max(ends_s, default=0.0) * 1e9),
            "load_duration": 0,
            "prompt_eval_count": sum(len(output.prompt_token_ids) for output in outputs),
        }


def _state_of(output: RequestOutput) -> Any:
    assert output.hidden_state is not None, f"{output.request_id} ended without a hidden state"
    return np.frombuffer(output.hidden_state, np.float32)


def model_name(given: str, known: Callable[[str], bool]) -> str:
    """Return the served model's name for what a client sent: Ollama's clients add `:latest`."""
    return given.removesuffix(LATEST) if not known(given) else given
