"""Engine requests of one answer, one per prompt: prepared, submitted, read, counted and closed together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Protocol, TypeVar, cast

from pydantic import BaseModel

from twostroke.api.admission import QueueAdmission
from twostroke.api.protocol.fields import FLEX, HasPriority, priority_of
from twostroke.api.protocol.sampling import SamplingFields
from twostroke.client.engine_client import EngineClient, OutputStream
from twostroke.client.input_processor import Prompt, PromptInput
from twostroke.client.output_processor import OutputKind
from twostroke.client.submission import Submission
from twostroke.engine.garbage import trim_heap
from twostroke.errors import EngineError, InvalidParameter, InvalidPrompt
from twostroke.outputs import NumericDrift, RequestOutput, merged_drift
from twostroke.request import FinishReason
from twostroke.sampling_params import MAX_SEED, SamplingParams, StructuredOutputs

Result = TypeVar("Result")
INLINE_LENGTH = 4096
"""Characters or token ids up to which a prompt is prepared on the event loop; longer ones are prepared in a thread, so
that tokens of other requests are still sent."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Client of a request, as far as the engine needs to know."""

    arrival_time_s: float
    """Time at which the request was fully read, on the engine's clock."""
    admission: QueueAdmission
    """Admission checks of the server."""
    tenant: str = ""
    """Tenant of the key; empty if no keys are set."""
    announce: Callable[[str, PromptInput], object] | None = None
    """Function called with the id and prompt of each queued engine request; for traces and --live-text."""
    first_token_timeout_s: float | None = None
    """Seconds after arrival within which a first token is of use; None for the server's limit."""


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """Head of an answer: id, model and creation time."""

    id: str
    """Id of the answer, and prefix of the engine's request ids."""
    model: str
    """Name of the model in the answer."""
    created: int
    """Creation time in whole seconds since 1970."""


LARGE_INPUT = 1 << 16
"""Values in a request, counted by input_size. Checking so many takes about 10 ms."""
HUGE_LENGTH = 1 << 18
"""Length of a prompt whose preparation takes seconds, and memory that is worth returning to the system."""
_HUGE_TEXT_THREAD = ThreadPoolExecutor(1, thread_name_prefix="twostroke-long-text")
"""Single thread for huge texts. With some tokenizers each takes 200 bytes of memory a character, and the threads of
other work are few."""
_GRAMMAR_THREADS = ThreadPoolExecutor(2, thread_name_prefix="twostroke-grammar")
"""Threads that wait for trial compilations of grammars; they limit the number of child processes."""


_TEMPLATE_THREADS = ThreadPoolExecutor(8, thread_name_prefix="twostroke-chat")
"""Threads that wait for chat templates; a slow template does not occupy the threads of other work."""


async def run_in_thread_if_long(
    work: Callable[[], Result], length: int, *, renders: bool = False, compiles: bool = False
) -> Result:
    """Return the result of `work`. Short texts are processed on the event loop, long ones in a thread.

    Args:
        work: the function to run.
        length: characters and token ids; see input_size for values that are not text.
        renders: whether a chat template runs, in a process that takes up to a second for a hostile template.
        compiles: whether a grammar is compiled, which takes a child process and up to half a second.
    """
    if length <= INLINE_LENGTH and not renders and not compiles:
        return work()
    loop = asyncio.get_running_loop()
    if compiles or length <= HUGE_LENGTH:
        return await loop.run_in_executor(
            _GRAMMAR_THREADS if compiles else _TEMPLATE_THREADS if renders else None, work
        )
    try:
        return await loop.run_in_executor(_HUGE_TEXT_THREAD, work)
    finally:
        await loop.run_in_executor(_HUGE_TEXT_THREAD, trim_heap)


async def run_in_thread_if_large(work: Callable[[], Result], amount: int) -> Result:
    """Return the result of `work`. Small requests are processed on the event loop, large ones in a thread."""
    return work() if amount <= LARGE_INPUT else await asyncio.to_thread(work)


NumberedOutputHandler = Callable[[int, RequestOutput], bool]
"""Function like Taker that also gets the number of the prompt."""


_MADE_HERE = {"seed", "structured_outputs"}
SAME_NAMES = tuple(f.name for f in fields(SamplingParams) if f.name in SamplingFields.model_fields.keys() - _MADE_HERE)
"""Request fields that mean the same as the sampling parameter of that name; a missing or null field has its default."""


def shared_params(request: SamplingFields, form: StructuredOutputs | None) -> dict[str, Any]:
    """Return the request fields that are sampling parameters under the same name, and the form of the output."""
    given = {name: value for name in SAME_NAMES if (value := getattr(request, name)) is not None}
    if form is not None:
        given["structured_outputs"] = form
    if request.seed is not None:
        given["seed"] = request.seed & MAX_SEED  # clients may send negative seeds
    return given


def check_stream_options(request: SamplingFields) -> None:
    """Raise InvalidParameter if `stream_options` is set without `stream`."""
    if request.stream_options is not None and not request.stream:
        raise InvalidParameter("stream_options", "{...}", "needs stream", "Leave it out, or set stream to true.")


class SchedulingFields(HasPriority, Protocol):
    """Request fields about scheduling and caching."""

    @property
    def cache_salt(self) -> str | None:
        """Salt of the prefix cache."""
        ...


class AnswerGeneration:
    """Submitted prompts of one answer.

    Args:
        engine: engine that runs them.
        submissions: submissions of one answer.
        caller: client of the answer.

    Raises:
        ClientError: one prompt cannot be run, so none is.
        EngineUnavailable: no engine accepts requests now, or it is overloaded.
    """

    def __init__(self, engine: EngineClient, submissions: Sequence[Submission], caller: Caller) -> None:
        self._streams: list[OutputStream] = []
        self._num_unread = len(submissions)
        """Number of prompts whose last output has not been taken."""
        self.is_over = not submissions
        """Whether all outputs have been taken."""
        self._ready: list[int] = []
        """Numbers of the prompts that have outputs to take, each once."""
        self._wake: Callable[[], object] = _no_wake
        self._is_closed = False
        prompts = [submission.prompt for submission in submissions]
        background = any(submission.background for submission in submissions)
        caller.admission.admit(prompts, caller.tenant, caller.first_token_timeout_s, background=background)
        try:
            for submission in submissions:
                self._streams.append(engine.generate(submission))
                if caller.announce is not None:  # before its first event; a refused request is not announced
                    caller.announce(submission.request_id or "", submission.prompt)
        except BaseException:
            self.close()
            raise
        self.listen(_no_wake)

    async def whole(self) -> list[RequestOutput]:
        """Return one output per prompt, in order; only for output kind "final".

        Raises:
            EngineError: the engine died, or a request failed.
            ClientDisconnected: the generation was closed meanwhile.
        """
        outputs: dict[int, RequestOutput] = {}
        while not self.is_over:
            outputs.update(await self.next())
        return [outputs[index] for index in range(len(self._streams))]

    async def next(self) -> list[tuple[int, RequestOutput]]:
        """Wait until there is an output or the end, then return what `take` returns; raise what `whole` raises."""
        while not (found := self.take()) and not self.is_over:
            something = asyncio.get_running_loop().create_future()
            self._wake = lambda something=something: something.done() or something.set_result(None)
            await something
        return found

    def take(self) -> list[tuple[int, RequestOutput]]:
        """Return the available outputs, each with the number of its prompt; raise what `whole` raises."""
        if self._is_closed:
            raise ClientDisconnected
        ready, self._ready = self._ready, []
        found: list[tuple[int, RequestOutput]] = []
        for index in ready:
            for output in self._streams[index].take():
                if output.finished:
                    self.has_ended(output)
                found.append((index, output))
        return found

    def listen(self, wake: Callable[[], object], handler: NumberedOutputHandler | None = None) -> None:
        """Set the one function to call when there is something to take; it must not raise.

        If there is a `handler`, each output is offered to it first. It must call `has_ended` for the last one of a
        prompt.
        """
        self._wake = wake
        for index, stream in enumerate(self._streams):
            stream.listen(partial(self._hear, index), None if handler is None else partial(handler, index))

    def has_ended(self, output: RequestOutput) -> None:
        """Count the last output of a prompt after it was taken; raise what `whole` raises."""
        self._num_unread -= 1
        self.is_over = not self._num_unread
        _check(output)

    def close(self) -> None:
        """Stop reading, and abort the requests that still run."""
        self._is_closed = True
        for stream in self._streams:
            stream.close()
        self._wake()

    def _hear(self, index: int) -> None:
        if index not in self._ready:
            self._ready.append(index)
        self._wake()


class GenerationCall:
    """Base class of calls that run one AnswerGeneration.

    Args:
        engine: engine that runs it.
        head: head of the answer.
    """

    def __init__(self, engine: EngineClient, head: AnswerHead) -> None:
        self.engine = engine
        self.head = head
        self._generation: AnswerGeneration | None = None

    @property
    def generation(self) -> AnswerGeneration:
        """The submitted generation; only after `open`."""
        assert self._generation is not None, "open() comes first"
        return self._generation

    def _begin(
        self, request: SchedulingFields, prompts: Sequence[PromptInput], caller: Caller, *, streams: bool
    ) -> None:
        """Queue prompts. The engine's request ids are the answer's id, with a number added if there are several.

        Args:
            request: the request as sent.
            prompts: checked prompts.
            caller: client of the request.
            streams: whether outputs are wanted as they come.

        Raises:
            ClientError: the request asks for a feature that this engine does not have.
            EngineUnavailable: no engine accepts requests now, or it is overloaded.
        """
        engine, answer_id = self.engine, self.head.id
        background, admission = request.service_tier == FLEX, caller.admission
        max_wait_s = admission.max_wait_s(caller.first_token_timeout_s, background=background)
        submissions = [
            Submission(
                prompt=prompt,
                request_id=answer_id if len(prompts) == 1 else f"{answer_id}-{index}",
                arrival_time_s=caller.arrival_time_s,
                priority=priority_of(request, uses_priority=engine.facts.uses_priority),
                cache_salt=admission.cache_salt(caller.tenant, request.cache_salt),
                tenant=caller.tenant,
                background=background,
                start_by_s=None if max_wait_s is None else caller.arrival_time_s + max_wait_s,
                kind=OutputKind.DELTA if streams else OutputKind.FINAL,
            )
            for index, prompt in enumerate(prompts)
        ]
        self._generation = AnswerGeneration(engine, submissions, caller)

    def close(self) -> None:
        """Abort what still runs: the client has disconnected or has its answer."""
        if self._generation is not None:
            self._generation.close()


class ClientDisconnected(Exception):
    """The client has disconnected, so no answer is needed."""


def _check(output: RequestOutput) -> None:
    """Raise EngineError if this last output belongs to a request that failed or was aborted."""
    if output.error is not None:
        raise EngineError(output.error)
    if any(part.finish_reason is FinishReason.ABORT for part in output.outputs):
        raise EngineError("the request was aborted by POST /v1/requests/ID/abort, or the server is shutting down.")


def _no_wake() -> None:
    """Do nothing: the wake function while nothing waits."""


class UsageCount:
    """Token counts of one answer, added up from deltas or whole outputs."""

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[int, int]] = {}
        self.num_output_tokens = 0
        self.num_reasoning_tokens = 0
        """Reasoning tokens of the output, set by the code that parses it."""
        self._numeric_drift: NumericDrift = {}

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(num_tokens for num_tokens, _ in self._prompts.values())

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache, over all prompts."""
        return sum(num_cached for _, num_cached in self._prompts.values())

    @property
    def drift(self) -> dict[str, NumericDrift]:
        """The `numeric_drift` field of `usage`; empty if the workers that made the answer have the same numerics."""
        return {"numeric_drift": self._numeric_drift} if self._numeric_drift else {}

    def add(self, prompt: int, output: RequestOutput) -> None:
        """Add an output of the prompt-th prompt; each token must be in one output only."""
        if output.finished or prompt not in self._prompts:
            self._prompts[prompt] = (len(output.prompt_token_ids), output.num_cached_tokens)
        if output.numeric_drift:
            self._numeric_drift = merged_drift(self._numeric_drift, output.numeric_drift)
        for part in output.outputs:
            self.num_output_tokens += len(part.token_ids)

    def as_json(self) -> dict[str, Any]:
        """Return OpenAI's usage object, with `numeric_drift` if workers of different numerics made the answer."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_output_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.num_reasoning_tokens},
            **self.drift,
        }


def prompts_of(given: str | list[Any], field: str) -> list[Prompt]:
    """Return the prompts of a request as a list.

    Args:
        given: value that matches the schema.
        field: name of the request field.

    Raises:
        InvalidPrompt: the list is empty.
    """
    if isinstance(given, str):
        return [given]
    if not given:
        raise InvalidPrompt(f"{field} is an empty list; send at least one text or one token id.")
    if isinstance(given[0], int):
        return [{"prompt_token_ids": given}]
    return [item if isinstance(item, str) else {"prompt_token_ids": cast(list[int], item)} for item in given]


MAX_INPUT_SIZE = 1 << 18
"""Amount at which `input_size` stops counting."""
_SIZE_PER_VALUE = 16
"""Amount counted for a value beside its characters: reading it takes as long as so many characters."""


def input_size(*values: Any) -> int:
    """Return the approximate number of characters in these values, of any type; counting stops early if it is large.

    >>> input_size("four", [1, 2, 3], {"role": "user", "content": ["a", "b"]})
    74
    """
    amount, waiting = 0, list(values)
    while waiting and amount <= MAX_INPUT_SIZE:
        value = waiting.pop()
        if isinstance(value, str):
            amount += len(value)
        elif isinstance(value, BaseModel):
            amount += _SIZE_PER_VALUE
            waiting += [item for _, item in value]
        elif isinstance(value, dict):
            fields = cast(dict[str, Any], value)
            amount += _SIZE_PER_VALUE + sum(map(len, fields))
            waiting += fields.values()
        elif isinstance(value, (list, tuple)):
            amount += _SIZE_PER_VALUE + _amount_of_list(cast(Sequence[Any], value), waiting)
    return amount


def _amount_of_list(items: Sequence[Any], waiting: list[Any]) -> int:
    """Return the amount of a list, by the type of its first element; nested values are appended to `waiting`."""
    first = items[0] if items else None
    if isinstance(first, str):
        return len(items) + sum(len(item) for item in items if isinstance(item, str))
    if isinstance(first, (list, dict, BaseModel)):
        waiting += items[:MAX_INPUT_SIZE]
        return 0
    return len(items)
