"""Sampling state of a request: rules, fixed when it arrives, and a history that grows by each token."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Self

import numpy as np
from numpy.typing import NDArray

from twostroke.grammar.backend import GrammarMatcher
from twostroke.sampling.constraint import TokenConstraint
from twostroke.sampling.noise import NoiseStream
from twostroke.sampling_params import SamplingParams

Ids = NDArray[np.int64]
_no_ids = partial(np.empty, 0, np.int64)


@dataclass(frozen=True, slots=True)
class SamplingRules:
    """SamplingParams prepared for one vocabulary; the n sequences of a request share them."""

    params: SamplingParams
    vocab_size: int
    eos_ids: Ids
    """End-of-text tokens, sorted and unique, as all arrays of ids here."""
    changes_logits: bool = False
    """Whether the request restricts tokens, by allowed ids, biases and bad words."""
    allowed_ids: Ids | None = None
    bias_ids: Ids = field(default_factory=_no_ids)
    bias_values: NDArray[np.float32] = field(default_factory=partial(np.empty, 0, np.float32))
    end_ids: Ids = field(default_factory=_no_ids)
    """End-of-text and stop tokens, which may not be drawn before min_tokens, even if they would not stop (as in
    vLLM)."""
    bad_endings: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict[tuple[int, ...], tuple[int, ...]])
    """Tokens that would complete a bad word, by its beginning. () leads to the words of a single token."""
    bad_prefix_lens: tuple[int, ...] = ()

    @classmethod
    def compile(
        cls,
        params: SamplingParams,
        vocab_size: int,
        eos_token_ids: Iterable[int] = (),
        bad_words_token_ids: Sequence[Sequence[int]] = (),
    ) -> Self:
        """Prepare the parameters.

        Args:
            params: parameters of the caller, checked against the model.
            vocab_size: columns of the logits.
            eos_token_ids: the model's end-of-text tokens.
            bad_words_token_ids: the bad words as the tokenizer spells them; each spelling is one sequence.
        """
        rules = cls(params, vocab_size, _ids((i for i in eos_token_ids if i < vocab_size), vocab_size))
        if params.logit_bias or params.min_tokens or params.allowed_token_ids is not None or bad_words_token_ids:
            return rules._with_restrictions(bad_words_token_ids)
        return rules

    def _with_restrictions(self, bad_words_token_ids: Iterable[Sequence[int]]) -> Self:
        """Return the rules with the parts that change logits."""
        params, vocab_size = self.params, self.vocab_size
        endings: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)
        for word in bad_words_token_ids:
            if word and word[-1] < vocab_size:
                endings[tuple(word[:-1])].add(word[-1])
        bias = dict(sorted((params.logit_bias or {}).items()))
        stops = [i for i in params.stop_token_ids if i < vocab_size]
        return replace(
            self,
            changes_logits=bool(params.allowed_token_ids is not None or bias or endings),
            allowed_ids=None if params.allowed_token_ids is None else _ids(params.allowed_token_ids, vocab_size),
            bias_ids=np.array(list(bias), np.int64),
            bias_values=np.array(list(bias.values()), np.float32),
            end_ids=_ids((*self.eos_ids.tolist(), *stops), vocab_size) if params.min_tokens else _no_ids(),
            bad_endings={prefix: tuple(sorted(ids)) for prefix, ids in endings.items()},
            bad_prefix_lens=tuple(sorted({len(prefix) for prefix in endings})),
        )

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits."""
        p = self.params
        return p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0

    @property
    def has_filter(self) -> bool:
        """Whether unlikely tokens are removed before the draw."""
        p = self.params
        return p.min_p > 0.0 or 0 < p.top_k < self.vocab_size or p.top_p < 1.0


class TokenCounts:
    """Distinct tokens that penalties apply to, with their counts in the output; prompt tokens count 0."""

    __slots__ = ("_counts", "_ids", "_slots")

    def __init__(self, prompt_token_ids: Iterable[int], output_token_ids: Iterable[int]) -> None:
        counts = dict.fromkeys(prompt_token_ids, 0)
        for token_id, count in Counter(output_token_ids).items():
            counts[token_id] = count
        self._slots = {token_id: slot for slot, token_id in enumerate(counts)}
        self._ids = np.array(list(counts), np.int64)  # [capacity]; the first len(_slots) are in use
        self._counts = np.array(list(counts.values()), np.float32)

    @property
    def ids(self) -> Ids:
        """Each token once. int64 [N]."""
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> NDArray[np.float32]:
        """Occurrences in the output. float32 [N]."""
        return self._counts[: len(self._slots)]

    def add(self, token_id: int) -> None:
        """Count one more occurrence in the output."""
        slot = self._slots.setdefault(token_id, len(self._slots))
        if slot == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros(slot + 16, np.int64)))
            self._counts = np.concatenate((self._counts, np.zeros(slot + 16, np.float32)))
        self._ids[slot] = token_id
        self._counts[slot] += 1

    def copy(self) -> TokenCounts:
        """Return an independent copy."""
        new = object.__new__(TokenCounts)
        new._slots, new._ids, new._counts = self._slots.copy(), self._ids.copy(), self._counts.copy()
        return new


class SamplingState:
    """Generated sequence before the draw of its next token.

    It depends only on prompt and output, so it can be rebuilt after a preemption or in another process. Generated
    tokens stay output (and are penalised as output) when they are computed again in a prefill.
    """

    __slots__ = (
        "_num_output_tokens",
        "_num_prompt_tokens",
        "_tail",
        "_tail_len",
        "constraint",
        "counts",
        "rules",
        "stream",
    )

    def __init__(
        self,
        rules: SamplingRules,
        stream: NoiseStream,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int] = (),
        matcher: GrammarMatcher | None = None,
    ) -> None:
        """Start at the end of prompt and output. `matcher`, for structured outputs, is at the start of the text and not
        shared."""
        self.rules = rules
        self.stream = stream
        self._num_prompt_tokens = len(prompt_token_ids)
        self._num_output_tokens = len(output_token_ids)
        self._tail_len = max(rules.bad_prefix_lens, default=0)
        self._tail = tuple(output_token_ids[-self._tail_len :]) if self._tail_len else ()
        self.counts = self._counted(prompt_token_ids, output_token_ids) if rules.has_penalties else None
        """Counts for penalties; None without any."""
        self.constraint = None if matcher is None else self._constrained(matcher, output_token_ids)
        """Constraint of structured outputs; None without."""

    def _counted(self, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]) -> TokenCounts:
        rules = self.rules
        # Only the repetition penalty counts the prompt.
        prompt = prompt_token_ids if rules.params.repetition_penalty != 1.0 else ()
        # An id beyond the vocabulary would point into another request's row.
        assert max((*prompt, *output_token_ids), default=0) < rules.vocab_size, "token id outside the vocabulary"
        return TokenCounts(prompt, output_token_ids)

    def _constrained(self, matcher: GrammarMatcher, output_token_ids: Sequence[int]) -> TokenConstraint:
        rules = self.rules
        constraint = TokenConstraint(matcher, rules.vocab_size, rules.eos_ids, ignores_eos=rules.params.ignore_eos)
        for token_id in output_token_ids:
            constraint.append(token_id)
        return constraint

    @property
    def position(self) -> int:
        """Absolute position of the token drawn next."""
        return self._num_prompt_tokens + self._num_output_tokens

    def append(self, token_id: int) -> None:
        """Append a final token to the output."""
        assert 0 <= token_id < self.rules.vocab_size, f"token {token_id} of {self.rules.vocab_size}"
        self._num_output_tokens += 1
        if self._tail_len:
            self._tail = (*self._tail, token_id)[-self._tail_len :]
        if self.counts is not None:
            self.counts.add(token_id)
        if self.constraint is not None:
            self.constraint.append(token_id)

    def after_tokens(self, token_ids: Iterable[int]) -> SamplingState:
        """Return the state after these tokens; this one stays unchanged.

        Rows drawn after drafts, which are not final yet, use such a state. After a draft that the grammar forbids no
        token may come: that row is an error, but its draft is not accepted either.
        """
        new = object.__new__(SamplingState)
        new.rules, new.stream = self.rules, self.stream
        new._num_prompt_tokens, new._num_output_tokens = self._num_prompt_tokens, self._num_output_tokens
        new._tail_len, new._tail = self._tail_len, self._tail
        new.counts = None if self.counts is None else self.counts.copy()
        new.constraint = None if self.constraint is None else self.constraint.copy()
        for token_id in token_ids:
            new.append(token_id)
        return new

    def forbidden_ids(self) -> Sequence[int]:
        """Return the tokens that bad_words and min_tokens exclude next; duplicates are possible."""
        rules = self.rules
        forbidden: list[int] = []
        for length in rules.bad_prefix_lens:
            if length <= len(self._tail):
                forbidden += rules.bad_endings.get(self._tail[len(self._tail) - length :], ())
        if self._is_below_min_tokens:
            forbidden += rules.end_ids.tolist()
        return forbidden

    @property
    def changes_logits(self) -> bool:
        """Whether the logits must be changed before temperature for the next draw."""
        has_parts = self.counts is not None or self.constraint is not None
        return has_parts or self.rules.changes_logits or self._is_below_min_tokens

    @property
    def is_complete(self) -> bool:
        """Whether the output has the requested form, and nothing can follow."""
        return self.constraint is not None and self.constraint.is_complete

    @property
    def _is_below_min_tokens(self) -> bool:
        """Whether the output is shorter than min_tokens."""
        return self._num_output_tokens < self.rules.params.min_tokens


def _ids(token_ids: Iterable[int], vocab_size: int) -> Ids:
    """Return ids sorted and unique; an id beyond the vocabulary would point into another request's row."""
    ids = np.array(sorted(set(token_ids)), np.int64)
    assert not len(ids) or ids[-1] < vocab_size, f"token {ids[-1]} of {vocab_size}: check_against_model was not called"
    return ids
