"""What steps made, put together per prompt: RequestOutputs for the caller, and which sequences a stop string ended.

The engine says what each step made for each sequence (`TokenUpdate`) and has committed it by then; the answer says how
much of it belongs to the output and whether a stop string ended the sequence (`Accepted`), and brings the outputs to
hand out. Tokens behind a stop string are cut from the output only. Nothing is called back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from twostroke.batch import TokenLogprobs
from twostroke.engine.completion_stream import Accepted, CompletionStream, decode_logprobs
from twostroke.engine.input_processor import PromptInput
from twostroke.outputs import LogprobsAtPosition, RequestMetrics, RequestOutput
from twostroke.request import FinishReason
from twostroke.request_times import RequestTimes
from twostroke.tokenizer.tokenizer import Tokenizer


class OutputKind(StrEnum):
    """What a caller wants to see while a request runs."""

    DELTA = "delta"  # what is new
    CUMULATIVE = "cumulative"  # everything so far
    FINAL = "final"  # everything, once, at the end


class TokenUpdate(NamedTuple):
    """What a step made for one sequence, as the engine hands it over."""

    request_id: str
    """Of the sequence, as `OutputProcessor.add` named it."""
    time_s: float
    """When the step's result was there, on the engine's clock."""
    token_ids: tuple[int, ...] = ()
    """Cut behind an end-of-text or stop token and at the limit, see `stop_checker.find_token_stop`."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs_start: int = 1
    """Position in the prompt of the first of them. A chunk of tokens c, c+1, … predicts c+1, c+2, …"""
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error: str | None = None
    scheduled_time_s: float | None = None
    """When the request was scheduled for the first time."""
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    hidden_state: bytes | None = None
    """Of the prompt's last token, where that is what was asked for."""


class ProcessedUpdates(NamedTuple):
    """What became of a step's updates."""

    accepted: tuple[Accepted, ...]
    """One per update that was taken, in their order."""
    outputs: tuple[RequestOutput, ...]
    """For the callers; one per prompt at most."""


class OutputProcessor:
    """Puts together the outputs of all live requests of one model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._answers: dict[str, _Answer] = {}
        self._owner: dict[str, tuple[_Answer, int]] = {}
        self._num_added = 0

    def add(
        self,
        request_id: str,
        prompt: PromptInput,
        *,
        seeds: Sequence[int],
        arrival_time_s: float,
        kind: OutputKind = OutputKind.FINAL,
    ) -> tuple[str, ...]:
        """Begins a request.

        Args:
            request_id: unique among live requests.
            prompt: checked.
            seeds: one per sequence.
            arrival_time_s: on the engine's clock.
            kind: what to hand out.

        Returns:
            The ids of its sequences, under which the engine runs them and which updates are to name. They begin with
            the caller's name, for people who read the event log, and end with a number that no other request ever has:
            whatever names callers make up, and however soon they use one again, no two sequences meet.
        """
        assert request_id not in self._answers, f"request {request_id} is live already"
        assert len(seeds) == prompt.params.n, f"{len(seeds)} seeds for n={prompt.params.n}"
        number, self._num_added = self._num_added, self._num_added + 1
        ids = tuple(f"{request_id}#{number}.{index}" for index in range(prompt.params.n))
        answer = _Answer(self._tokenizer, request_id, ids, prompt, seeds, arrival_time_s, kind)
        self._answers[request_id] = answer
        self._owner.update({sequence_id: (answer, index) for index, sequence_id in enumerate(ids)})
        return ids

    def discard(self, request_id: str) -> None:
        """Takes a request back that the engine has refused: no output of it is ever made."""
        self._forget(self._answers[request_id])

    def process(self, updates: Iterable[TokenUpdate]) -> ProcessedUpdates:
        """Takes what a step made, for any of the live sequences.

        Updates of sequences that have ended here, while an engine elsewhere had a step on its way, are left out.
        """
        accepted: list[Accepted] = []
        touched: dict[str, _Answer] = {}
        owners = self._owner
        for update in updates:
            owner = owners.get(update.request_id)
            if owner is None:
                continue
            answer, index = owner
            if answer.streams[index].finish_reason is None:
                accepted.append(answer.push(index, update))
                touched[answer.request_id] = answer
        outputs: list[RequestOutput] = []
        for answer in touched.values():
            output = answer.take()
            if output is not None:
                outputs.append(output)
            if not answer.num_running:
                self._forget(answer)
        return ProcessedUpdates(tuple(accepted), tuple(outputs))

    def abort(self, request_id: str, time_s: float, reason: FinishReason = FinishReason.ABORT) -> RequestOutput | None:
        """Ends what is still running of a request; None when it is not live (any more)."""
        answer = self._answers.get(request_id)
        if answer is None:
            return None
        answer.abort(time_s, reason)
        self._forget(answer)
        return answer.take()

    def is_live(self, request_id: str) -> bool:
        """Whether a request of this id has not ended."""
        return request_id in self._answers

    def live_sequence_ids(self, request_id: str) -> tuple[str, ...]:
        """Which sequences of a request still run; the engine ends them when the request is aborted."""
        answer = self._answers.get(request_id)
        if answer is None:
            return ()
        named = zip(answer.sequence_ids, answer.streams, strict=True)
        return tuple(sequence_id for sequence_id, stream in named if stream.finish_reason is None)

    @property
    def num_requests(self) -> int:
        """Live ones."""
        return len(self._answers)

    def _forget(self, answer: _Answer) -> None:
        del self._answers[answer.request_id]
        for sequence_id in answer.sequence_ids:
            del self._owner[sequence_id]


@dataclass(slots=True)
class _Answer:
    """The answer to one prompt, growing."""

    tokenizer: Tokenizer
    request_id: str
    sequence_ids: Sequence[str]
    prompt: PromptInput
    seeds: Sequence[int]
    arrival_time_s: float
    kind: OutputKind
    streams: list[CompletionStream] = field(init=False)
    num_running: int = field(init=False)
    """Sequences that have not ended."""
    _prompt_logprobs: list[LogprobsAtPosition | None] | None = field(init=False)
    _changed: list[int] = field(default_factory=list[int])
    """Sequences of which something is new."""
    _num_cached_tokens: int = 0
    _error: str | None = None
    _hidden_state: bytes | None = None
    _has_sent: bool = False

    def __post_init__(self) -> None:
        params = self.prompt.params
        self.streams = [
            CompletionStream(self.tokenizer, self.prompt, i, seed, RequestTimes(self.arrival_time_s))
            for i, seed in enumerate(self.seeds)
        ]
        self.num_running = len(self.streams)
        positions: list[LogprobsAtPosition | None] = [None] * len(self.prompt.prompt_token_ids)
        self._prompt_logprobs = None if params.prompt_logprobs is None else positions

    def push(self, index: int, update: TokenUpdate) -> Accepted:
        stream = self.streams[index]
        times = stream.times
        if times.scheduled_s is None:
            times.scheduled_s = update.scheduled_time_s
        if update.num_preemptions > times.num_preemptions:
            times.num_preemptions = update.num_preemptions
        if update.num_cached_tokens > self._num_cached_tokens:
            self._num_cached_tokens = update.num_cached_tokens
        self._error = self._error or update.error
        self._hidden_state = update.hidden_state
        if self._prompt_logprobs is not None:
            # Each chunk brings those of its own positions. None comes twice: what is computed again after a preemption
            # is not reported again.
            for position, entry in enumerate(update.prompt_logprobs, start=update.prompt_logprobs_start):
                self._prompt_logprobs[position] = decode_logprobs(entry, self.tokenizer)
        num_tokens, finish_reason = stream.push(
            update.token_ids, update.logprobs, update.time_s, update.finish_reason, update.stop_reason
        )
        if finish_reason is not None:
            self.num_running -= 1
        if (num_tokens or finish_reason is not None) and index not in self._changed:
            self._changed.append(index)
        return Accepted(update.request_id, num_tokens, finish_reason, stream.stop_reason, stream.num_tokens)

    def abort(self, time_s: float, reason: FinishReason) -> None:
        for index, stream in enumerate(self.streams):
            if stream.finish_reason is None:
                stream.finish(reason, time_s)
                self.num_running -= 1
                if index not in self._changed:
                    self._changed.append(index)

    def take(self) -> RequestOutput | None:
        """The output to hand out now, if any."""
        changed, self._changed = self._changed, []
        finished = self.num_running == 0
        if not changed or (self.kind is OutputKind.FINAL and not finished):
            return None
        if self.kind is OutputKind.DELTA:
            completions = [self.streams[index].take_delta() for index in sorted(changed)]
        else:
            completions = [stream.so_far() for stream in self.streams]
        # In deltas they are sent once: they are complete when the first token is there.
        prompt_logprobs = None if self.kind is OutputKind.DELTA and self._has_sent else self._prompt_logprobs
        self._has_sent = True
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt.prompt_text,
            prompt_token_ids=self.prompt.prompt_token_ids,
            prompt_logprobs=prompt_logprobs,
            outputs=completions,
            finished=finished,
            num_cached_tokens=self._num_cached_tokens,
            metrics=RequestMetrics.of([stream.times for stream in self.streams]) if finished else None,
            error=self._error,
            hidden_state=self._hidden_state,
        )
