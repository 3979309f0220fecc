"""One generated sequence on its way out: tokens in, text, log-probabilities and times out."""

from __future__ import annotations

from collections.abc import Sequence

from twostroke.batch import TokenLogprobs
from twostroke.client.input_processor import PromptInput
from twostroke.engine.stop_checker import HiddenTokens, StopMatch, StopStrings
from twostroke.engine.token_update import TokenUpdate
from twostroke.outputs import CompletionOutput, DraftTally, Logprob, LogprobsAtPosition, RequestTimes
from twostroke.request import FinishReason
from twostroke.tokenizer.tokenizer import IncrementalDetokenizer, Tokenizer


class CompletionStream:
    """The output of one sequence, built up token by token.

    `token_ids` are all tokens generated, the one that ended it included. The text leaves out the end-of-text or stop
    token, and the stop string unless the request wants it.

    Args:
        tokenizer: of the model.
        prompt: with the request's parameters.
        index: among the sequences of the prompt.
        seed: its tokens are drawn with.
        times: where to note when each token was there, and the end.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: PromptInput,
        index: int,
        seed: int,
        times: RequestTimes,
    ) -> None:
        self._tokenizer = tokenizer
        self._params = params = prompt.params
        self._wants_logprobs = params.logprobs is not None
        self._has_stops = bool(params.stop)
        self._eos_token_ids = prompt.eos_token_ids
        self._index = index
        self._seed = seed
        self._detokenizer = IncrementalDetokenizer(tokenizer, params.skip_special_tokens, prompt.shown_token_ids)
        self._hidden = HiddenTokens(_left_out(tokenizer, prompt) if params.stop else {}, params.stop)
        self._stops = (prompt.find_stops if params.stop else StopStrings)(self._hidden.stops)
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[LogprobsAtPosition] = []
        self._cumulative_logprob = 0.0
        self._num_tokens_sent = 0
        self.has_news = False
        """Whether there is something that no delta has brought."""
        self.times = times
        self.drafts = DraftTally()
        """What became of its drafts."""
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return len(self._token_ids)

    def push(self, update: TokenUpdate) -> None:
        """Takes what a step made; tokens behind a stop string, which ends it earlier, do not count.

        Finish reason STOP means that the last token is an end-of-text or stop token, or completes structured outputs.
        """
        assert self.finish_reason is None, f"tokens for a sequence that ended with {self.finish_reason}"
        token_ids = text_ids = update.token_ids
        news = update.news
        if news is not None and self._ends_text(token_ids, news.finish_reason, news.stop_reason):
            text_ids = token_ids[:-1]
        if self._has_stops:
            token_ids = token_ids[: self._push_until_stop(text_ids, len(token_ids))]
        else:  # no token has to be looked at alone
            text = self._detokenizer.push(text_ids)
            if text:
                self._text.append(text)
        if token_ids:
            self.has_news = True
            self._token_ids.extend(token_ids)
            self.times.token_times_s.extend([update.time_s] * len(token_ids))
            self.drafts.passed(len(token_ids), update.num_draft_tokens)
        for entry in update.logprobs[: len(token_ids)]:
            self._logprobs.append(decode_logprobs(entry, self._tokenizer))
            self._cumulative_logprob += entry.logprobs[0]
        if self.finish_reason is not None:
            self.times.finish_s = update.time_s
        elif news is not None and news.finish_reason is not None:
            self.finish(news.finish_reason, update.time_s, news.stop_reason)

    def _push_until_stop(self, text_ids: Sequence[int], num_tokens: int) -> int:
        """Adds the text of token after token; returns how many count, those of `num_tokens` behind a stop do not."""
        for position, token_id in enumerate(text_ids, start=1):
            may_stop = len(self._token_ids) + position > self._params.min_tokens
            text = self._hidden.marks.get(token_id) or self._detokenizer.push((token_id,))
            if self._add_text(text, may_stop):
                return position
        return num_tokens

    def finish(self, reason: FinishReason, time_s: float, stop_reason: int | None = None) -> None:
        """Nothing more will come: what was held back of the text is released."""
        assert self.finish_reason is None, f"ended twice: {self.finish_reason}, then {reason}"
        # the text that was held back is that of the last token but the one that ended it
        num_text_tokens = self.num_tokens - self._ends_text(self._token_ids, reason, stop_reason)
        may_stop = reason in (FinishReason.LENGTH, FinishReason.STOP) and num_text_tokens > self._params.min_tokens
        is_cut = reason is not FinishReason.STOP
        if not (self._add_text(self._detokenizer.finish(), may_stop) or self._end_text(may_stop, is_cut=is_cut)):
            self.finish_reason, self.stop_reason = reason, stop_reason
        self.times.finish_s = time_s
        self.has_news = True

    def take_delta(self) -> CompletionOutput:
        """What is new since the last delta."""
        delta = self._output("".join(self._text), self._num_tokens_sent)
        self._text.clear()
        self._num_tokens_sent = len(self._token_ids)
        self.has_news = False
        return delta

    def so_far(self) -> CompletionOutput:
        """All of it."""
        self._text = ["".join(self._text)]
        self.has_news = False
        return self._output(self._text[0], 0)

    def _output(self, text: str, first_token: int) -> CompletionOutput:
        return CompletionOutput(
            index=self._index,
            text=text,
            token_ids=tuple(self._token_ids[first_token:]),
            logprobs=self._logprobs[first_token:] if self._wants_logprobs else None,
            cumulative_logprob=self._cumulative_logprob if self._wants_logprobs else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            seed=self._seed,
        )

    def _ends_text(self, token_ids: Sequence[int], reason: FinishReason | None, stop_reason: int | None) -> bool:
        """Whether the last token is no text: the one that completes structured outputs is."""
        if reason is not FinishReason.STOP or not token_ids:  # without tokens: what it wanted was a hidden state
            return False
        return stop_reason is not None or token_ids[-1] in self._eos_token_ids

    def _add_text(self, text: str, may_stop: bool) -> bool:
        """Appends text as far as it is certain; True when a stop string ended it."""
        if not self._has_stops:
            self._release(text)
            return False
        return self._take(*self._stops.push(text, may_stop))

    def _end_text(self, may_stop: bool, *, is_cut: bool) -> bool:
        """Appends what was held back; True when a stop string ended it."""
        return self._has_stops and self._take(*self._stops.finish(may_stop, is_cut=is_cut))

    def _take(self, text: str, match: StopMatch | None) -> bool:
        if match is None:
            self._release(self._hidden.shown(text))
            return False
        stop = self._hidden.asked(match.stop)
        kept = stop if self._params.include_stop_str_in_output else ""
        self._release(self._hidden.shown(text[: match.start]) + kept)
        self.finish_reason, self.stop_reason = FinishReason.STOP, stop
        return True

    def _release(self, text: str) -> None:
        if text:
            self._text.append(text)


def _left_out(tokenizer: Tokenizer, prompt: PromptInput) -> dict[int, str]:
    """Texts of the special tokens that the output's text leaves out."""
    if not prompt.params.skip_special_tokens:
        return {}
    ids = tokenizer.special_token_ids - prompt.shown_token_ids
    return {token_id: tokenizer.decoded_token(token_id) for token_id in ids}


def decode_logprobs(entry: TokenLogprobs, tokenizer: Tokenizer) -> LogprobsAtPosition:
    """Log-probabilities by token id, the chosen token first, each with its rank and its own text.

    The chosen token may stand again among the most likely ones or be left out there; it is listed once.
    """
    chosen, *likely = entry.token_ids
    ranks = dict(zip(likely, _ranks(entry), strict=True)) | {chosen: entry.rank}
    return {
        token_id: Logprob(logprob, ranks[token_id], tokenizer.decoded_token(token_id))
        for token_id, logprob in dict(zip(entry.token_ids, entry.logprobs, strict=True)).items()
    }


def _ranks(entry: TokenLogprobs) -> list[int]:
    """Ranks of the most likely tokens; a place is left free for the chosen one when it is left out of them."""
    chosen, *likely = entry.token_ids
    left_out = chosen not in likely
    return [place + (left_out and place >= entry.rank) for place in range(1, len(likely) + 1)]
