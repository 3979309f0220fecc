"""Completions, from the request's fields to the engine and back, whole or streamed. This module has no HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from twostroke.api.answering import DONE, DeferredEvents, EventTemplate, event
from twostroke.api.dialect import structured_outputs
from twostroke.api.generation import (
    AnswerHead,
    Caller,
    GenerationCall,
    UsageCount,
    check_stream_options,
    input_size,
    prompts_of,
    run_in_thread_if_long,
    shared_params,
)
from twostroke.api.logprobs import CompletionLogprobs, as_written, prompt_logprobs, takes_long
from twostroke.api.protocol.fields import tier_of
from twostroke.api.protocol.sampling import CompletionRequest
from twostroke.client.engine_client import EngineClient
from twostroke.client.input_processor import PromptInput
from twostroke.errors import InvalidParameter
from twostroke.outputs import CompletionOutput, LogprobsAtPosition, RequestOutput
from twostroke.request import FinishReason
from twostroke.sampling_params import SamplingParams, StructuredOutputs

Object = dict[str, Any]


class Completion(GenerationCall):
    """One call of /v1/completions.

    Args:
        engine: engine that runs it.
        request: request that matches the schema.
        head: head of the answer.
    """

    def __init__(self, engine: EngineClient, request: CompletionRequest, head: AnswerHead) -> None:
        super().__init__(engine, head)
        self._request = request
        tier = tier_of(request.service_tier, uses_priority=engine.facts.uses_priority)
        named: Object = {"id": head.id, "object": "text_completion", "created": head.created, "model": head.model}
        self._head: Object = {**named, **tier}
        self._usage = UsageCount()
        self._n = request.n or 1
        self._prompt_logprobs: dict[int, Sequence[LogprobsAtPosition | None]] = {}
        """Log-probabilities by prompt. The first output of a stream has them, and every choice needs them."""
        self._scores: dict[int, _Scores] = {}
        self._writers: dict[tuple[int, int], _ChoiceWriter] = {}
        self._has_logprobs = request.logprobs is not None or request.prompt_logprobs is not None
        self._leaves_out_tokens = request.max_tokens == 0
        options = request.stream_options
        self._has_usage_in_chunks = options is not None and options.has_usage_in_chunks
        self._no_usage: Object = {"usage": None} if options is not None and options.include_usage else {}
        """Usage fields of every event but the last."""

    async def open(self, caller: Caller) -> None:
        """Check everything and queue the prompts.

        Raises:
            ClientError: a field cannot be used.
            EngineUnavailable: no engine accepts requests now.
        """
        request = self._request
        request.check_refused()
        check_stream_options(request)
        form = request.structured_outputs
        params = completion_params(request, None if form is None else structured_outputs(form))
        given = prompts_of(request.prompt, "prompt")

        def prepare() -> list[PromptInput]:
            return [self.engine.inputs.process(prompt, params, request) for prompt in given]

        prompts = await run_in_thread_if_long(
            prepare, input_size(given, request.bad_words), compiles=params.structured_outputs is not None
        )
        self._begin(request, prompts, caller, streams=bool(request.stream))

    async def answer(self) -> Object:
        """Return the whole answer; raise what AnswerGeneration.whole raises."""
        outputs = await self.generation.whole()
        if any(map(takes_long, outputs)):
            return await asyncio.to_thread(self._whole, outputs)
        return self._whole(outputs)

    def _whole(self, outputs: Sequence[RequestOutput]) -> Object:
        choices: list[Object] = []
        for number, output in enumerate(outputs):
            if self._leaves_out_tokens:
                _leave_out_tokens(output)
            self._usage.add(number, output)
            best = self._best(output.outputs)
            choices += [
                {**self._writer(number, part.index).choice(output, part), "index": number * self._n + rank}
                for rank, part in enumerate(best)
            ]
        return {**self._head, "choices": choices, "usage": self._usage.as_json()}

    def events(self, number: int, output: RequestOutput) -> bytes | DeferredEvents:
        if self._has_logprobs:
            if output.prompt_logprobs is not None:
                self._prompt_logprobs[number] = output.prompt_logprobs
            elif any(self._writer(number, part.index).is_first for part in output.outputs):
                output.prompt_logprobs = self._prompt_logprobs.get(number)
            if takes_long(output):
                return partial(self._events_now, number, output)
        return self._events_now(number, output)

    def _events_now(self, number: int, output: RequestOutput) -> bytes:
        if self._leaves_out_tokens:
            _leave_out_tokens(output)
        if self._no_usage:  # otherwise usage is not reported
            self._usage.add(number, output)
        usage = {"usage": self._usage.as_json()} if self._has_usage_in_chunks else self._no_usage
        events = b""
        for part in output.outputs:
            events += self._writer(number, part.index).event(output, part, usage)
        return events

    def last_events(self) -> bytes:
        return event({**self._head, "choices": [], "usage": self._usage.as_json()}) + DONE if self._no_usage else DONE

    def _best(self, parts: Sequence[CompletionOutput]) -> Sequence[CompletionOutput]:
        """Return the n choices with the highest mean log-probability, best first; unchanged if there are only n."""
        if len(parts) == self._n:
            return parts
        return sorted(parts, key=_mean_logprob, reverse=True)[: self._n]

    def _writer(self, number: int, index: int) -> _ChoiceWriter:
        writer = self._writers.get((number, index))
        if writer is None:
            place = number * self._n + index
            scores = self._scores.setdefault(number, _Scores())
            writer = self._writers[number, index] = _ChoiceWriter(self._request, self.engine, place, self._head, scores)
        return writer


class _Scores:
    """Log-probabilities of one prompt, encoded once for all of its choices."""

    def __init__(self) -> None:
        self._entries: Sequence[LogprobsAtPosition | None] | None = None
        self._written: list[msgspec.Raw | None] | None = None

    def written(self, output: RequestOutput) -> list[msgspec.Raw | None] | None:
        if self._written is None or self._entries is not output.prompt_logprobs:
            self._entries, self._written = output.prompt_logprobs, prompt_logprobs(output.prompt_logprobs)
        return self._written


class _ChoiceWriter:
    """Writer of one choice, whole or in chunks; the first chunk has the fields about the prompt."""

    def __init__(
        self,
        request: CompletionRequest,
        engine: EngineClient,
        index: int,
        head: Object,
        scores: _Scores,
    ) -> None:
        self._request = request
        self._scores = scores
        self._index = index
        self._head = head
        self._tokenizer = engine.tokenizer
        as_token_ids = bool(request.return_tokens_as_token_ids)
        self._logprobs = CompletionLogprobs(engine.tokenizer, as_token_ids=as_token_ids)
        self.is_first = True
        """Whether nothing of the choice has been written."""
        options = request.stream_options
        self._is_regular = request.logprobs is None and not (options is not None and options.has_usage_in_chunks)
        """Whether chunks differ by their texts and token ids alone."""
        self._has_token_ids = bool(request.return_token_ids)
        self._repeated: EventTemplate | None = None

    def event(self, output: RequestOutput, part: CompletionOutput, usage: Object) -> bytes:
        """Return a chunk of a stream."""
        if self._repeated is not None and part.finish_reason is None:
            values = (part.text, part.token_ids) if self._has_token_ids else (part.text,)
            return self._repeated.filled(*values)
        is_first, head = self.is_first, self._head
        choice = self.choice(output, part)
        if self._is_regular and not is_first and part.finish_reason is None:

            def body(text: str, *token_ids: Any) -> Object:
                ids = {"token_ids": token_ids[0]} if token_ids else {}
                return {**head, "choices": [{**choice, "text": text, **ids}], **usage}

            self._repeated = EventTemplate(body, 2 if self._has_token_ids else 1)
        return event({**head, "choices": [choice], **usage})

    def choice(self, output: RequestOutput, part: CompletionOutput) -> Object:
        request = self._request
        is_first, self.is_first = self.is_first, False
        echoes = is_first and bool(request.echo)
        choice: Object = {
            "index": self._index,
            "text": self._prompt_text(output) + part.text if echoes else part.text,
            "logprobs": None if request.logprobs is None else self._logprobs_of(output, part, echoes),
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
        }
        choice["token_ids"] = part.token_ids if self._has_token_ids else None
        choice["prompt_token_ids"] = output.prompt_token_ids if self._has_token_ids and is_first else None
        if is_first and (request.prompt_logprobs is not None or not request.stream):
            choice["prompt_logprobs"] = None if request.prompt_logprobs is None else self._scores.written(output)
        return choice

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None and self._request.truncate_prompt_tokens is None:
            return output.prompt
        return self._tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)

    def _logprobs_of(self, output: RequestOutput, part: CompletionOutput, echoes: bool) -> Any:
        token_ids: Sequence[int] = part.token_ids
        entries: Sequence[LogprobsAtPosition | None] = part.logprobs or []
        if echoes:
            # only the first of n choices computes the prompt's log-probabilities; all choices share them
            token_ids = (*output.prompt_token_ids, *token_ids)
            entries = [*(output.prompt_logprobs or ()), *entries]
        return as_written(self._logprobs.of(token_ids, entries, self._request.logprobs or 0), len(token_ids))


def _leave_out_tokens(output: RequestOutput) -> None:
    """Remove the token of a request with max_tokens 0, which is generated because a step must run."""
    for part in output.outputs:
        part.text, part.token_ids = "", ()
        part.logprobs = None if part.logprobs is None else []
        part.stop_reason = None
        if part.finish_reason is FinishReason.STOP:
            part.finish_reason = FinishReason.LENGTH


def _mean_logprob(part: CompletionOutput) -> float:
    return (part.cumulative_logprob or 0.0) / max(1, len(part.token_ids))


def completion_params(request: CompletionRequest, form: StructuredOutputs | None) -> SamplingParams:
    """Return the sampling parameters of a completion whose output must have `form`.

    Raises:
        InvalidParameter: fields contradict each other, or a value cannot be used.
    """
    given = shared_params(request, form)
    if request.max_tokens is not None:
        given["max_tokens"] = request.max_tokens or _one_step(request)
    if request.logprobs is not None:
        given["logprobs"] = request.logprobs
        if request.echo:
            given["prompt_logprobs"] = max(request.logprobs, request.prompt_logprobs or 0)
    if request.best_of is not None:
        _check_best_of(request, request.best_of)
        given["n"] = request.best_of
        given.setdefault("logprobs", 0)  # choices are ranked by log-probability
    return SamplingParams(**given)


def _one_step(request: CompletionRequest) -> int:
    """Return 1 for max_tokens 0: log-probabilities of the prompt need one step."""
    if not request.echo:
        raise InvalidParameter("max_tokens", 0, "must be at least 1 unless echo is set")
    if request.min_tokens:
        raise InvalidParameter("min_tokens", request.min_tokens, "must be at most max_tokens, which is 0")
    return 1


def _check_best_of(request: CompletionRequest, best_of: int) -> None:
    n = request.n or 1
    if best_of < n:
        raise InvalidParameter("best_of", best_of, f"must be at least n, which is {n}")
    if request.stream and best_of != n:
        raise InvalidParameter("best_of", best_of, f"must equal n, which is {n}, in a stream")
