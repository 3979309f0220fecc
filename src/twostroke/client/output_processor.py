"""What steps made, put together per prompt: RequestOutputs for the caller, and which sequences a stop string ended.

The engine says what each step made for each sequence (`TokenUpdate`) and has committed it by then; the answer says
which sequences have ended, be it by a stop string, and how many tokens are their output (`EndedSequence`), and brings
the outputs to hand out. Tokens behind a stop string are cut from the output only. Nothing is called back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from twostroke.client.completion_stream import CompletionStream
from twostroke.client.input_processor import PromptInput
from twostroke.client.prompt_scores import PromptScores
from twostroke.engine.token_update import SequenceNews, TokenUpdate
from twostroke.outputs import CompletionOutput, RequestMetrics, RequestOutput, RequestTimes
from twostroke.request import FinishReason
from twostroke.tokenizer.tokenizer import Tokenizer


class EndedSequence(NamedTuple):
    """A sequence that has ended, and how."""

    request_id: str
    finish_reason: FinishReason
    num_output_tokens: int
    """All that belong to the output; those behind the one that completed a stop string do not."""


class OutputKind(StrEnum):
    """What a caller wants to see while a request runs."""

    DELTA = "delta"  # what is new
    CUMULATIVE = "cumulative"  # everything so far
    FINAL = "final"  # everything, once, at the end


class ProcessedUpdates(NamedTuple):
    """What became of a step's updates."""

    ended: Sequence[EndedSequence]
    """Sequences that end with these updates, whoever ended them."""
    outputs: Sequence[RequestOutput]
    """For the callers; one per prompt at most."""


class OutputProcessor:
    """Puts together the outputs of all live requests of one model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._answers: dict[str, _Answer] = {}
        self._owner: dict[str, tuple[_Answer, CompletionStream]] = {}
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
        self._owner.update({name: (answer, stream) for name, stream in zip(ids, answer.streams, strict=True)})
        return ids

    def discard(self, request_id: str) -> None:
        """Takes a request back that the engine has refused: no output of it is ever made."""
        self._forget(self._answers[request_id])

    def process(self, updates: Iterable[TokenUpdate]) -> ProcessedUpdates:
        """Takes what a step made, for any of the live sequences.

        Updates of sequences that have ended here, while an engine elsewhere had a step on its way, are left out.
        """
        ended: list[EndedSequence] = []
        touched: dict[str, _Answer] = {}
        owners = self._owner
        for update in updates:
            owner = owners.get(update.request_id)
            if owner is None:
                continue
            answer, stream = owner
            if stream.finish_reason is None:
                touched[answer.request_id] = answer
                if update.news is not None:
                    answer.hear(stream.times, update.news)
                stream.push(update)
                if stream.finish_reason is not None:
                    answer.num_running -= 1
                    ended.append(EndedSequence(update.request_id, stream.finish_reason, stream.num_tokens))
        outputs: list[RequestOutput] = []
        for answer in touched.values():
            output = answer.take()
            if output is not None:
                outputs.append(output)
            if not answer.num_running:
                self._forget(answer)
        return ProcessedUpdates(ended, outputs)

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

    def request_of(self, sequence_id: str) -> str | None:
        """Whose sequence it is; None of one whose request has ended."""
        owner = self._owner.get(sequence_id)
        return None if owner is None else owner[0].request_id

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
    _sends_deltas: bool = field(init=False)
    streams: list[CompletionStream] = field(init=False)
    num_running: int = field(init=False)
    """Sequences that have not ended."""
    _scores: PromptScores | None = field(init=False)
    """Log-probabilities of the prompt's tokens, where they are wanted."""
    _num_cached_tokens: int = 0
    _error: str | None = None
    _hidden_state: bytes | None = None
    _has_sent: bool = False

    def __post_init__(self) -> None:
        params = self.prompt.params
        self._sends_deltas = self.kind is OutputKind.DELTA
        self.streams = [
            CompletionStream(self.tokenizer, self.prompt, i, seed, RequestTimes(self.arrival_time_s))
            for i, seed in enumerate(self.seeds)
        ]
        self.num_running = len(self.streams)
        num_tokens = len(self.prompt.prompt_token_ids)
        self._scores = None if params.prompt_logprobs is None else PromptScores(self.tokenizer, num_tokens)

    def hear(self, times: RequestTimes, news: SequenceNews) -> None:
        if times.scheduled_s is None:
            times.scheduled_s = news.scheduled_time_s
        times.num_preemptions = max(times.num_preemptions, news.num_preemptions)
        self._num_cached_tokens = max(self._num_cached_tokens, news.num_cached_tokens)
        self._error = self._error or news.error
        self._hidden_state = self._hidden_state or news.hidden_state
        if self._scores is not None:
            # Each chunk brings those of its own positions. None comes twice: what is computed again after a preemption
            # is not reported again.
            self._scores.put(news.prompt_logprobs_start, news.prompt_logprobs)

    def abort(self, time_s: float, reason: FinishReason) -> None:
        for stream in self.streams:
            if stream.finish_reason is None:
                stream.finish(reason, time_s)
                self.num_running -= 1

    def _metrics(self) -> RequestMetrics | None:
        return RequestMetrics.of([stream.times for stream in self.streams], [stream.drafts for stream in self.streams])

    def take(self) -> RequestOutput | None:
        """The output to hand out now, if any."""
        finished = not self.num_running
        if self._sends_deltas:
            # The first of several sequences scores the prompt; others, with a cached prefix, may be ahead of it.
            if self._scores is not None and self._scores.num_missing and self.streams[0].finish_reason is None:
                return None
            completions: list[CompletionOutput] = []
            for stream in self.streams:
                if stream.has_news:
                    completions.append(stream.take_delta())  # noqa: PERF401 (a comprehension is a call, for each token)
        elif finished or self.kind is OutputKind.CUMULATIVE:
            completions = [stream.so_far() for stream in self.streams] if any(s.has_news for s in self.streams) else []
        else:
            return None
        if not completions:
            return None
        # In deltas they are sent once.
        prompt_logprobs = None if self._sends_deltas and self._has_sent else self._scores
        self._has_sent = True
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt.prompt_text,
            prompt_token_ids=self.prompt.prompt_token_ids,
            prompt_logprobs=prompt_logprobs,
            outputs=completions,
            finished=finished,
            num_cached_tokens=self._num_cached_tokens,
            metrics=self._metrics() if finished else None,
            error=self._error,
            hidden_state=self._hidden_state,
        )
