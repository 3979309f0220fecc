"""Assembly of RequestOutputs from the updates of steps, and detection of stop strings.

The engine reports what each step made for each sequence (`TokenUpdate`), after committing it. The result lists the
sequences that have ended, including those ended by a stop string, with the number of their output tokens
(`EndedSequence`), and the outputs to hand out. Tokens behind a stop string are removed only from the output. There are
no callbacks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from twostroke.batch import TokenLogprobs
from twostroke.client.input_processor import PromptInput
from twostroke.client.prompt_scores import PromptScores, decode_logprobs
from twostroke.client.stop_strings import HiddenTokens, StopMatch
from twostroke.engine.token_update import SequenceStatus, TokenUpdate
from twostroke.outputs import (
    CompletionOutput,
    DraftTally,
    LogprobsAtPosition,
    RequestOutput,
    RequestTimes,
)
from twostroke.request import FinishReason
from twostroke.tokenizer.tokenizer import IncrementalDetokenizer, Tokenizer


class CompletionStream:
    """The output of one sequence, assembled token by token.

    `token_ids` are all generated tokens, including the one that ended it. The text leaves out the end-of-text or stop
    token.

    Args:
        tokenizer: of the model.
        prompt: with the request's parameters.
        index: among the sequences of the prompt.
        seed: of its sampling.
        times: record of the token times and the end.
    """

    _looks_for_stops = False

    def __init__(self, tokenizer: Tokenizer, prompt: PromptInput, index: int, seed: int, times: RequestTimes) -> None:
        self._tokenizer = tokenizer
        self._params = params = prompt.params
        self._eos_token_ids = prompt.eos_token_ids
        self._index = index
        self._seed = seed
        self._detokenizer = IncrementalDetokenizer(tokenizer, params.skip_special_tokens, prompt.shown_token_ids)
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[LogprobsAtPosition] | None = None if params.logprobs is None else []
        self._cumulative_logprob = 0.0
        self._num_tokens_sent = 0
        self.has_news = False
        """Whether there is output that no delta has included."""
        self.times = times
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens so far."""
        return len(self._token_ids)

    def push(self, update: TokenUpdate) -> None:
        """Add the update of a step; tokens behind a stop string do not count.

        Finish reason STOP means that the last token is an end-of-text or stop token, or completes structured outputs.
        """
        assert self.finish_reason is None, f"tokens for a sequence that ended with {self.finish_reason}"
        token_ids, status = update.token_ids, update.status
        ends_text = status is not None and self._ends_text(token_ids, status.finish_reason, status.stop_reason)
        text_ids = token_ids[:-1] if ends_text else token_ids
        if self._looks_for_stops:
            token_ids = token_ids[: self._read_until_stop(text_ids, len(token_ids))]
        else:
            self._text.append(self._detokenizer.push(text_ids))
        if token_ids:
            self.has_news = True
            if update.num_draft_tokens or self.times.drafts is not None:
                self._count_drafts(len(token_ids), update.num_draft_tokens)
            self._token_ids.extend(token_ids)
            self.times.token_times_s.extend([update.time_s] * len(token_ids))
        if self._logprobs is not None:
            self._push_logprobs(self._logprobs, update.logprobs[: len(token_ids)])
        if self.finish_reason is not None:
            self.times.finish_s = update.time_s
        elif status is not None and status.finish_reason is not None:
            self.finish(status.finish_reason, update.time_s, status.stop_reason)

    def finish(self, reason: FinishReason, time_s: float, stop_reason: int | None = None) -> None:
        """End the sequence, and release the text that was held back."""
        assert self.finish_reason is None, f"ended twice: {self.finish_reason}, then {reason}"
        if not self._close(reason, stop_reason):
            self.finish_reason, self.stop_reason = reason, stop_reason
        self.times.finish_s = time_s
        self.has_news = True

    def take_delta(self) -> CompletionOutput:
        """Return the output since the last delta."""
        delta = self._output("".join(self._text), self._num_tokens_sent)
        self._text.clear()
        self._num_tokens_sent = len(self._token_ids)
        self.has_news = False
        return delta

    def so_far(self) -> CompletionOutput:
        """Return the whole output so far."""
        self._text = ["".join(self._text)]
        self.has_news = False
        return self._output(self._text[0], 0)

    def _output(self, text: str, first_token: int) -> CompletionOutput:
        return CompletionOutput(
            index=self._index,
            text=text,
            token_ids=tuple(self._token_ids[first_token:]),
            logprobs=None if self._logprobs is None else self._logprobs[first_token:],
            cumulative_logprob=None if self._logprobs is None else self._cumulative_logprob,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            seed=self._seed,
        )

    def _ends_text(self, token_ids: Sequence[int], reason: FinishReason | None, stop_reason: int | None) -> bool:
        """Return whether the last token is not part of the text; a token that completes structured outputs is part of
        it."""
        if reason is not FinishReason.STOP or not token_ids:  # no tokens: the request wanted a hidden state
            return False
        return stop_reason is not None or token_ids[-1] in self._eos_token_ids

    def _read_until_stop(self, text_ids: Sequence[int], num_tokens: int) -> int:
        """Add the text of some tokens up to a stop string; return how many of the step's `num_tokens` count."""
        raise NotImplementedError

    def _close(self, reason: FinishReason, stop_reason: int | None) -> bool:
        """Release what was held back of the text; return whether a stop string ended it."""
        del reason, stop_reason
        self._text.append(self._detokenizer.finish())
        return False

    def _count_drafts(self, num_tokens: int, num_draft_tokens: int) -> None:
        """Count a pass, from the first pass with drafts on; earlier passes gave one token each."""
        if self.times.drafts is None:
            self.times.drafts = DraftTally.without_drafts(self.num_tokens)
        self.times.drafts.passed(num_tokens, num_draft_tokens)

    def _push_logprobs(self, logprobs: list[LogprobsAtPosition], entries: Sequence[TokenLogprobs]) -> None:
        for entry in entries:
            logprobs.append(decode_logprobs(entry, self._tokenizer))
            self._cumulative_logprob += entry.logprobs[0]


class StoppingStream(CompletionStream):
    """The output of a sequence that stop strings may end. The text leaves them out unless the request wants them."""

    _looks_for_stops = True

    def __init__(self, tokenizer: Tokenizer, prompt: PromptInput, index: int, seed: int, times: RequestTimes) -> None:
        super().__init__(tokenizer, prompt, index, seed, times)
        self._hidden = HiddenTokens(_left_out(tokenizer, prompt), prompt.params.stop)
        self._stops = prompt.find_stops(self._hidden.stops)

    def _read_until_stop(self, text_ids: Sequence[int], num_tokens: int) -> int:
        for position, token_id in enumerate(text_ids, start=1):
            may_stop = self.num_tokens + position > self._params.min_tokens
            text = self._hidden.marks.get(token_id) or self._detokenizer.push((token_id,))
            if self._append_until_stop(*self._stops.push(text, may_stop)):
                return position
        return num_tokens

    def _close(self, reason: FinishReason, stop_reason: int | None) -> bool:
        # the text that was held back belongs to the last token before the one that ended the sequence
        num_text_tokens = self.num_tokens - self._ends_text(self._token_ids, reason, stop_reason)
        may_stop = reason in (FinishReason.LENGTH, FinishReason.STOP) and num_text_tokens > self._params.min_tokens
        is_cut = reason is not FinishReason.STOP
        has_stopped = self._append_until_stop(*self._stops.push(self._detokenizer.finish(), may_stop))
        return has_stopped or self._append_until_stop(*self._stops.finish(may_stop, is_cut=is_cut))

    def _append_until_stop(self, text: str, match: StopMatch | None) -> bool:
        """Add text that is certain; return whether a stop string ended it."""
        if match is None:
            self._text.append(self._hidden.shown(text))
            return False
        stop = self._hidden.asked(match.stop)
        kept = stop if self._params.include_stop_str_in_output else ""
        self._text.append(self._hidden.shown(text[: match.start]) + kept)
        self.finish_reason, self.stop_reason = FinishReason.STOP, stop
        return True


def _left_out(tokenizer: Tokenizer, prompt: PromptInput) -> dict[int, str]:
    """Return the texts of the special tokens that the output's text leaves out."""
    if not prompt.params.skip_special_tokens:
        return {}
    ids = tokenizer.special_token_ids - prompt.shown_token_ids
    return {token_id: tokenizer.decoded_token(token_id) for token_id in ids}


# ------------------------------------------------------------------ the outputs of a prompt


class EndedSequence(NamedTuple):
    """A sequence that has ended, with its finish reason."""

    request_id: str
    finish_reason: FinishReason
    num_output_tokens: int
    """Number of tokens in the output, without those behind the one that completed a stop string."""


class OutputKind(StrEnum):
    """Form of a request's outputs while it runs."""

    DELTA = "delta"  # what is new
    CUMULATIVE = "cumulative"  # everything so far
    FINAL = "final"  # everything, once, at the end


class ProcessedUpdates(NamedTuple):
    """Results of processing a step's updates."""

    ended: Sequence[EndedSequence]
    """Sequences that ended with these updates, for any reason."""
    outputs: Sequence[RequestOutput]
    """Outputs for the callers, at most one per prompt."""


class OutputProcessor:
    """The outputs of all live requests of one model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._answers: dict[str, _PromptOutputs] = {}
        self._owner: dict[str, tuple[_PromptOutputs, CompletionStream]] = {}
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
        """Add a request.

        Args:
            request_id: unique among live requests.
            prompt: checked.
            seeds: one per sequence.
            arrival_time_s: on the engine's clock.
            kind: form of the outputs.

        Returns:
            The ids of its sequences, for the engine and its updates. An id begins with the caller's name, so that
            people can read the event log, and ends with a number that is never reused: so the ids of two sequences
            never
                collide,
            even if a caller reuses a name at once.
        """
        assert request_id not in self._answers, f"request {request_id} is live already"
        assert len(seeds) == prompt.params.n, f"{len(seeds)} seeds for n={prompt.params.n}"
        number, self._num_added = self._num_added, self._num_added + 1
        ids = tuple(f"{request_id}#{number}.{index}" for index in range(prompt.params.n))
        answer = _PromptOutputs(self._tokenizer, request_id, ids, prompt, seeds, arrival_time_s, kind)
        self._answers[request_id] = answer
        self._owner.update({name: (answer, stream) for name, stream in zip(ids, answer.streams, strict=True)})
        return ids

    def discard(self, request_id: str) -> None:
        """Remove a request that the engine has refused; it gets no output."""
        self._forget(self._answers[request_id])

    def process(self, updates: Iterable[TokenUpdate]) -> ProcessedUpdates:
        """Process the updates of a step, for any of the live sequences.

        Updates of sequences that have ended here, while an engine in another process was running a step, are ignored.
        """
        ended: list[EndedSequence] = []
        touched: dict[str, _PromptOutputs] = {}
        owners = self._owner
        for update in updates:
            owner = owners.get(update.request_id)
            if owner is None:
                continue
            answer, stream = owner
            if stream.finish_reason is None:
                touched[answer.request_id] = answer
                if update.status is not None:
                    answer.apply_status(stream.times, update.status)
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
        """End the running sequences of a request; return its last output, or None if it is not live."""
        answer = self._answers.get(request_id)
        if answer is None:
            return None
        answer.abort(time_s, reason)
        self._forget(answer)
        return answer.take()

    def is_live(self, request_id: str) -> bool:
        """Return whether a request of this id has not ended."""
        return request_id in self._answers

    def live_sequence_ids(self, request_id: str) -> tuple[str, ...]:
        """Return the ids of a request's running sequences, which the engine has to end if the request is aborted."""
        answer = self._answers.get(request_id)
        if answer is None:
            return ()
        named = zip(answer.sequence_ids, answer.streams, strict=True)
        return tuple(sequence_id for sequence_id, stream in named if stream.finish_reason is None)

    def request_of(self, sequence_id: str) -> str | None:
        """Return the request id of a sequence; None if the request has ended."""
        owner = self._owner.get(sequence_id)
        return None if owner is None else owner[0].request_id

    @property
    def num_requests(self) -> int:
        """Number of live requests."""
        return len(self._answers)

    def _forget(self, answer: _PromptOutputs) -> None:
        del self._answers[answer.request_id]
        for sequence_id in answer.sequence_ids:
            del self._owner[sequence_id]


@dataclass(slots=True)
class _PromptOutputs:
    """The output of one prompt, under assembly."""

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
    """Number of sequences that have not ended."""
    _scores: PromptScores | None = field(init=False)
    """Log-probabilities of the prompt's tokens, if requested."""
    _num_cached_tokens: int = 0
    _error: str | None = None
    _hidden_state: bytes | None = None
    _has_sent: bool = False

    def __post_init__(self) -> None:
        params = self.prompt.params
        self._sends_deltas = self.kind is OutputKind.DELTA
        make = StoppingStream if params.stop else CompletionStream
        self.streams = [
            make(self.tokenizer, self.prompt, i, seed, RequestTimes(self.arrival_time_s))
            for i, seed in enumerate(self.seeds)
        ]
        self.num_running = len(self.streams)
        num_tokens = len(self.prompt.prompt_token_ids)
        self._scores = None if params.prompt_logprobs is None else PromptScores(self.tokenizer, num_tokens)

    def apply_status(self, times: RequestTimes, status: SequenceStatus) -> None:
        if times.scheduled_s is None:
            times.scheduled_s = status.scheduled_time_s
        times.num_preemptions = max(times.num_preemptions, status.num_preemptions)
        self._num_cached_tokens = max(self._num_cached_tokens, status.num_cached_tokens)
        self._error = self._error or status.error
        self._hidden_state = self._hidden_state or status.hidden_state
        if self._scores is not None:
            # Each chunk has the scores of its own positions. No position is reported twice, even if it is computed
            # again after a preemption.
            self._scores.put(status.prompt_logprobs_start, status.prompt_logprobs)

    def abort(self, time_s: float, reason: FinishReason) -> None:
        for stream in self.streams:
            if stream.finish_reason is None:
                stream.finish(reason, time_s)
                self.num_running -= 1

    def take(self) -> RequestOutput | None:
        """Return the output to hand out now, if any."""
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
        # Deltas include them only once.
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
            times=[stream.times for stream in self.streams] if finished else (),
            error=self._error,
            hidden_state=self._hidden_state,
        )
