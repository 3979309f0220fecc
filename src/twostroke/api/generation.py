"""The engine requests behind one answer: prepared, opened, read, counted and closed together, one per prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Protocol, TypeVar, cast

from pydantic import BaseModel

from twostroke.api.admission import QueueAdmission
from twostroke.api.protocol.fields import FLEX, Prioritised, priority_of
from twostroke.api.protocol.sampling import SamplingFields
from twostroke.client.engine_client import EngineClient, OutputStream
from twostroke.client.input_processor import Prompt, PromptInput
from twostroke.client.output_processor import OutputKind
from twostroke.client.submission import Submission
from twostroke.engine.garbage import give_back_what_is_free
from twostroke.errors import EngineError, InvalidParameter, InvalidPrompt
from twostroke.outputs import NumericDrift, RequestOutput, merged_drift
from twostroke.request import FinishReason
from twostroke.sampling_params import MAX_SEED, SamplingParams, StructuredOutputs

Result = TypeVar("Result")
INLINE_LENGTH = 4096
"""Prompts of so many characters or token ids are prepared at once; longer ones in a thread, while the others' tokens
are sent."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, and what the engine has to know of that."""

    arrival_time_s: float
    """When the request was fully read, on the engine's clock."""
    admission: QueueAdmission
    """Says whether there is room for the request."""
    tenant: str = ""
    """Whose key it was; empty where no keys are set."""
    announce: Callable[[str, PromptInput], object] | None = None
    """Called with the name of each engine request that was queued, and its prompt; for traces and --live-text."""
    patience_s: float | None = None
    """How long after its arrival a first token is of use; None: as long as the server lets anybody wait."""


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What an answer says of itself."""

    id: str
    """The engine's requests are called by it, too."""
    model: str
    """The name that the answer gives the model."""
    created: int
    """When, in whole seconds since 1970."""


LARGE_AMOUNT = 1 << 16
"""Values in a request, counted by amount_of. Checking so many takes about 10 ms."""
HUGE_LENGTH = 1 << 18
"""Preparing so many takes seconds, and memory that is worth giving back."""
_PATIENT = ThreadPoolExecutor(1, thread_name_prefix="twostroke-long-text")
"""Huge texts are prepared one after the other: with some tokenizers each takes 200 bytes of memory a character, and the
threads that others wait for are few."""
_COMPILERS = ThreadPoolExecutor(2, thread_name_prefix="twostroke-grammar")
"""Grammars are tried by child processes, so many at once: not one for every stranger who sends a new one."""


_RENDERERS = ThreadPoolExecutor(8, thread_name_prefix="twostroke-chat")
"""Those who wait for a chat template that takes long do not take threads away from others."""


async def off_the_loop(
    work: Callable[[], Result], length: int, *, renders: bool = False, compiles: bool = False
) -> Result:
    """Return what `work` returns. Short texts are worked on at once, long ones in a thread.

    Args:
        work: makes it.
        length: characters and token ids; see amount_of for what is no text.
        renders: whether a chat template runs: in a process that is waited for, a hostile one for a second.
        compiles: whether a grammar is compiled, which takes a child process and up to half a second.
    """
    if length <= INLINE_LENGTH and not renders and not compiles:
        return work()
    loop = asyncio.get_running_loop()
    if compiles or length <= HUGE_LENGTH:
        return await loop.run_in_executor(_COMPILERS if compiles else _RENDERERS if renders else None, work)
    try:
        return await loop.run_in_executor(_PATIENT, work)
    finally:
        await loop.run_in_executor(_PATIENT, give_back_what_is_free)


async def beside_the_loop(work: Callable[[], Result], amount: int) -> Result:
    """Return what `work` returns. Small requests are worked on at once, large ones in a thread."""
    return work() if amount <= LARGE_AMOUNT else await asyncio.to_thread(work)


NumberedTaker = Callable[[int, RequestOutput], bool]
"""A Taker that is told the number of the prompt, too."""


_MADE_HERE = {"seed", "structured_outputs"}
SAME_NAMES = tuple(f.name for f in fields(SamplingParams) if f.name in SamplingFields.model_fields.keys() - _MADE_HERE)
"""Fields that mean what the parameter of the same name means; one that is left out, or null, has its default."""


def shared_params(request: SamplingFields, form: StructuredOutputs | None) -> dict[str, Any]:
    """Return the parameters that a request names as the engine does, and the form of the output."""
    given = {name: value for name in SAME_NAMES if (value := getattr(request, name)) is not None}
    if form is not None:
        given["structured_outputs"] = form
    if request.seed is not None:
        given["seed"] = request.seed & MAX_SEED  # clients may send negative ones; each is some seed
    return given


def check_stream_options(request: SamplingFields) -> None:
    """Refuses options of a stream that is none."""
    if request.stream_options is not None and not request.stream:
        raise InvalidParameter("stream_options", "{...}", "is for streams", "Leave it out, or set stream to true.")


class Wanted(Prioritised, Protocol):
    """A request as far as it says how it is to be served."""

    @property
    def cache_salt(self) -> str | None:
        """For the prefix cache."""
        ...


class AnswerGeneration:
    """Prompts in the engine.

    Args:
        engine: that runs them.
        submissions: of one answer.
        caller: who asks.

    Raises:
        ClientError: one cannot be run; none runs then.
        EngineUnavailable: no engine takes requests now, or it has too much to do.
    """

    def __init__(self, engine: EngineClient, submissions: Sequence[Submission], caller: Caller) -> None:
        self._streams: list[OutputStream] = []
        self._num_unread = len(submissions)
        """Prompts whose last output was not taken."""
        self.is_over = not submissions
        """Whether everything was taken."""
        self._ready: list[int] = []
        """Prompts that have something to take, each once."""
        self._wake: Callable[[], object] = _nobody
        self._is_closed = False
        prompts = [submission.prompt for submission in submissions]
        background = any(submission.background for submission in submissions)
        caller.admission.admit(prompts, caller.tenant, caller.patience_s, background=background)
        try:
            for submission in submissions:
                self._streams.append(engine.generate(submission))
                if caller.announce is not None:  # no event of it can have come yet, and one that is refused has none
                    caller.announce(submission.request_id or "", submission.prompt)
        except BaseException:
            self.close()
            raise
        self.listen(_nobody)

    async def whole(self) -> list[RequestOutput]:
        """One output per prompt, in their order; for kind "final".

        Raises:
            EngineError: it died, or a request failed.
            Abandoned: it was closed meanwhile.
        """
        outputs: dict[int, RequestOutput] = {}
        while not self.is_over:
            outputs.update(await self.next())
        return [outputs[index] for index in range(len(self._streams))]

    async def next(self) -> list[tuple[int, RequestOutput]]:
        """Like `take`, and waits until there is something, unless it is over; raises what `whole` raises."""
        while not (found := self.take()) and not self.is_over:
            something = asyncio.get_running_loop().create_future()
            self._wake = lambda something=something: something.done() or something.set_result(None)
            await something
        return found

    def take(self) -> list[tuple[int, RequestOutput]]:
        """Outputs that are there, each with the number of its prompt; raises what `whole` raises."""
        if self._is_closed:
            raise Abandoned
        ready, self._ready = self._ready, []
        found: list[tuple[int, RequestOutput]] = []
        for index in ready:
            for output in self._streams[index].take():
                if output.finished:
                    self.has_ended(output)
                found.append((index, output))
        return found

    def listen(self, wake: Callable[[], object], taker: NumberedTaker | None = None) -> None:
        """From now on `wake`, and no other, is called whenever there is something to take; it raises nothing.

        With a `taker`, each output is offered to it first; it calls `has_ended` for the last one of a prompt.
        """
        self._wake = wake
        for index, stream in enumerate(self._streams):
            stream.listen(partial(self._hear, index), None if taker is None else partial(taker, index))

    def has_ended(self, output: RequestOutput) -> None:
        """Count the last output of a prompt, which was taken; raises what `whole` raises."""
        self._num_unread -= 1
        self.is_over = not self._num_unread
        _check(output)

    def close(self) -> None:
        """Nobody reads on; what still runs is aborted."""
        self._is_closed = True
        for stream in self._streams:
            stream.close()
        self._wake()

    def _hear(self, index: int) -> None:
        if index not in self._ready:
            self._ready.append(index)
        self._wake()


class Opened:
    """What is answered by an AnswerGeneration, once that was opened.

    Args:
        engine: that answers.
        head: of the answer.
    """

    def __init__(self, engine: EngineClient, head: AnswerHead) -> None:
        self.engine = engine
        self.head = head
        self._generation: AnswerGeneration | None = None

    @property
    def generation(self) -> AnswerGeneration:
        """What was opened."""
        assert self._generation is not None, "open() comes first"
        return self._generation

    def _begin(self, request: Wanted, prompts: Sequence[PromptInput], caller: Caller, *, streams: bool) -> None:
        """Queue prompts; the engine's requests are called by the answer's id, numbered when there are several.

        Args:
            request: as it was sent.
            prompts: checked.
            caller: who asks.
            streams: whether outputs are wanted as they come.

        Raises:
            ClientError: the request asks for what this engine does not have.
            EngineUnavailable: no engine takes requests now, or it has too much to do.
        """
        engine, answer_id = self.engine, self.head.id
        background, admission = request.service_tier == FLEX, caller.admission
        longest_wait_s = admission.longest_wait_s(caller.patience_s, background=background)
        submissions = [
            Submission(
                prompt=prompt,
                request_id=answer_id if len(prompts) == 1 else f"{answer_id}-{index}",
                arrival_time_s=caller.arrival_time_s,
                priority=priority_of(request, uses_priority=engine.facts.uses_priority),
                cache_salt=admission.cache_salt(caller.tenant, request.cache_salt),
                tenant=caller.tenant,
                background=background,
                start_by_s=None if longest_wait_s is None else caller.arrival_time_s + longest_wait_s,
                kind=OutputKind.DELTA if streams else OutputKind.FINAL,
            )
            for index, prompt in enumerate(prompts)
        ]
        self._generation = AnswerGeneration(engine, submissions, caller)

    def close(self) -> None:
        """The caller has left, or has its answer."""
        if self._generation is not None:
            self._generation.close()


class Abandoned(Exception):
    """The caller has left; there is nobody to answer."""


def _check(output: RequestOutput) -> None:
    """Raises when this last output is that of a request that failed or was ended by somebody else."""
    if output.error is not None:
        raise EngineError(output.error)
    if any(part.finish_reason is FinishReason.ABORT for part in output.outputs):
        raise EngineError(
            "the request was aborted: somebody ended it (POST /v1/requests/ID/abort), or the server is shutting down."
        )


def _nobody() -> None:
    """Is woken while nobody else sleeps."""


class UsageCount:
    """Counts the tokens of one answer while its outputs come, as deltas or whole."""

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[int, int]] = {}
        self.num_output_tokens = 0
        self.num_reasoning_tokens = 0
        """Of the output; whoever parses it counts them."""
        self._numeric_drift: NumericDrift = {}

    @property
    def num_prompt_tokens(self) -> int:
        """Of all prompts."""
        return sum(num_tokens for num_tokens, _ in self._prompts.values())

    @property
    def num_cached_tokens(self) -> int:
        """Of the prompts'."""
        return sum(num_cached for _, num_cached in self._prompts.values())

    @property
    def drift(self) -> dict[str, NumericDrift]:
        """Return the `numeric_drift` field of `usage`; empty where the workers that made the answer do not differ."""
        return {"numeric_drift": self._numeric_drift} if self._numeric_drift else {}

    def add(self, prompt: int, output: RequestOutput) -> None:
        """Takes an output of the prompt-th prompt; each token must be in one output only."""
        if output.finished or prompt not in self._prompts:
            self._prompts[prompt] = (len(output.prompt_token_ids), output.num_cached_tokens)
        if output.numeric_drift:
            self._numeric_drift = merged_drift(self._numeric_drift, output.numeric_drift)
        for part in output.outputs:
            self.num_output_tokens += len(part.token_ids)

    def as_json(self) -> dict[str, Any]:
        """Return OpenAI's object; with `numeric_drift` where workers of different numerics made the answer."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_output_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.num_reasoning_tokens},
            **self.drift,
        }


def prompts_of(given: str | list[Any], field: str) -> list[Prompt]:
    """Each prompt by itself.

    Args:
        given: checked against the schema.
        field: what the request calls it.

    Raises:
        InvalidPrompt: there is none.
    """
    if isinstance(given, str):
        return [given]
    if not given:
        raise InvalidPrompt(f"{field} is an empty list; send at least one text, or one token id.")
    if isinstance(given[0], int):
        return [{"prompt_token_ids": given}]
    return [item if isinstance(item, str) else {"prompt_token_ids": cast(list[int], item)} for item in given]


MOST_COUNTED = 1 << 18
"""`amount_of` counts no further: it is long."""
_EACH = 16
"""What a value counts beside its characters: reading it takes as long as so many of them."""


def amount_of(*values: Any) -> int:
    """Return roughly how many characters of text these are, whatever they are made of; much is not read to its end.

    >>> amount_of("four", [1, 2, 3], {"role": "user", "content": ["a", "b"]})
    74
    """
    amount, waiting = 0, list(values)
    while waiting and amount <= MOST_COUNTED:
        value = waiting.pop()
        if isinstance(value, str):
            amount += len(value)
        elif isinstance(value, BaseModel):
            amount += _EACH
            waiting += [item for _, item in value]
        elif isinstance(value, dict):
            fields = cast(dict[str, Any], value)
            amount += _EACH + sum(map(len, fields))
            waiting += fields.values()
        elif isinstance(value, (list, tuple)):
            amount += _EACH + _amount_of_list(cast(Sequence[Any], value), waiting)
    return amount


def _amount_of_list(items: Sequence[Any], waiting: list[Any]) -> int:
    """Count a list by the kind of its first element; objects and lists are left to the caller."""
    first = items[0] if items else None
    if isinstance(first, str):
        return len(items) + sum(len(item) for item in items if isinstance(item, str))
    if isinstance(first, (list, dict, BaseModel)):
        waiting += items[:MOST_COUNTED]
        return 0
    return len(items)
