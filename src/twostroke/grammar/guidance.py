"""Grammar backend on llguidance (https://github.com/guidance-ai/llguidance).

It takes derivatives of regular expressions under an Earley parser. Nothing is built in advance, so schemas compile
fast.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from threading import Lock

import numpy as np
from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask

from twostroke.errors import InvalidParameter
from twostroke.grammar.backend import OptionalCallSyntax, OptionalCallTokens, RequiredCallSyntax, TokenBits
from twostroke.grammar.json_schema import NO_TEXT, refusal, to_llguidance, wide_parts
from twostroke.grammar.trial import parser_limits, refusal_reason
from twostroke.grammar.vocabulary import GuidanceVocabulary, TokenReader
from twostroke.sampling_params import StructuredOutputs

MAX_KEPT = 64
"""Number of compiled grammars kept in the cache."""


class Guidance:
    """Grammar backend that uses llguidance. The vocabulary is built on first use.

    Args:
        tokens: reader of the model's tokens.
        vocab_size: columns of the model's logits.
        eos_token_ids: the model's end-of-text tokens.
        draws: whether tokens are sampled with these grammars. If so, the vocabulary is prepared for repeated masks.
            If not, grammars are only checked, and the vocabulary is ready in half the time.
    """

    def __init__(
        self, tokens: TokenReader, vocab_size: int, eos_token_ids: Collection[int], *, draws: bool = True
    ) -> None:
        self._tokens = tokens
        self._draws = draws
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._vocabulary: GuidanceVocabulary | None = None
        self._making_vocabulary, self._using_kept = Lock(), Lock()
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()
        self._refused: OrderedDict[str, str] = OrderedDict()
        """Reason of each refused grammar, by grammar text."""

    def warm_up(self) -> None:
        """Build the vocabulary now. Skip it if tokens cannot be decoded one by one: then no grammar is supported."""
        if self._tokens.decodes_independently:
            self._ready_vocabulary()

    def compile(self, wanted: StructuredOutputs, calls: OptionalCallSyntax | RequiredCallSyntax | None = None) -> str:
        if not self._tokens.decodes_independently:
            limit = "not supported by this model's tokenizer: the text of a token depends on the tokens around it"
            raise InvalidParameter("structured_outputs", wanted, limit, "Leave it out, and validate the output.")
        if isinstance(calls, RequiredCallSyntax):
            grammar = to_llguidance(wanted, replace(calls, rules=self._with_tokens(calls)))
            reason = self._refusal_reason(grammar, wanted, to_llguidance(wanted))
        else:
            grammar = to_llguidance(wanted, None if calls is None else self._written(calls))
            reason = self._refusal_reason(grammar, wanted, grammar)
        if reason:
            raise refusal(wanted, reason)
        matcher = self.matcher(grammar)
        bits = np.zeros(-(-self._vocab_size // 32), np.int32)
        matcher.fill_mask(bits)
        if not matcher.failure and not self._can_begin(bits):
            raise refusal(wanted, NO_TEXT)
        if matcher.failure:
            raise refusal(wanted, matcher.failure)
        return grammar

    def matcher(self, grammar: str) -> GuidanceMatcher:
        """Return a matcher. If the grammar is unusable, the matcher's `failure` gives the reason and it allows no
        token."""
        vocabulary, forget = self._ready_vocabulary(), partial(self._forget, grammar)
        with self._using_kept:
            first = self._kept.get(grammar)
            if first is not None:
                self._kept.move_to_end(grammar)
                return GuidanceMatcher(first.deep_copy(), vocabulary, forget)
        # outside the lock: a slow grammar must not hold up other threads
        first = LLMatcher(vocabulary.tokenizer, grammar, log_level=0, limits=parser_limits())
        if not first.is_error():
            with self._using_kept:
                self._kept[grammar] = first.deep_copy()
                if len(self._kept) > MAX_KEPT:
                    self._kept.popitem(last=False)
        return GuidanceMatcher(first, vocabulary, forget)

    def _forget(self, grammar: str) -> None:
        """Drop a cached matcher after a copy of it has failed, because copies share the limit on expressions."""
        with self._using_kept:
            self._kept.pop(grammar, None)

    def _written(self, calls: OptionalCallSyntax) -> OptionalCallTokens:
        first_id = self._ready_vocabulary().first_id
        beginning = calls.beginning
        for text, token_id in self._special((*calls.markers, *calls.markup)).items():
            ways = " | ".join([json.dumps(text), *self._places(token_id)])
            beginning = beginning.replace(json.dumps(text), f"({ways})")
        return OptionalCallTokens(
            markers=calls.markers,
            first_tokens=frozenset(token_id + first_id for token_id in self._special(calls.markers).values()),
            tokens=frozenset(self._special((*calls.markers, *calls.markup)).values()),
            bare=calls.bare,
            beginning=beginning,
        )

    def _with_tokens(self, call: RequiredCallSyntax) -> str:
        """Return the rules with special tokens in place of their texts; end-of-text tokens are left out."""
        rules = call.rules
        for text, token_id in self._special(call.markup).items():
            ways = '""' if token_id in self._eos_token_ids else f"({' | '.join(self._places(token_id))})"
            rules = rules.replace(json.dumps(text), ways)
        return rules

    def _special(self, texts: Sequence[str]) -> dict[str, int]:
        """Return the texts that are special tokens, with their ids."""
        special = {self._tokens.token_bytes(i): i for i in sorted(self._tokens.special_token_ids)}
        return {text: special[name] for text in texts if (name := text.encode()) in special}

    def _places(self, token_id: int) -> list[str]:
        """Return Lark alternatives for a token within a text and at its beginning."""
        return [f"<[{place}]>" for place in sorted({token_id, token_id + self._ready_vocabulary().first_id})]

    def _refusal_reason(self, grammar: str, wanted: StructuredOutputs, tried: str) -> str:
        """Return the reason why a grammar is refused; empty if it is accepted.

        `tried` is compiled in place of a grammar that needs special tokens of the model.
        """
        with self._using_kept:
            if grammar in self._kept:
                return ""
            known = self._refused.get(grammar)
        if known is not None:
            return known
        reason = next(filter(None, map(refusal_reason, (*wide_parts(wanted), tried))), "")
        if reason:
            with self._using_kept:
                self._refused[grammar] = reason
                if len(self._refused) > MAX_KEPT:
                    self._refused.popitem(last=False)
        return reason

    def _ready_vocabulary(self) -> GuidanceVocabulary:
        with self._making_vocabulary:
            if self._vocabulary is None:
                self._vocabulary = GuidanceVocabulary(
                    self._tokens, self._vocab_size, self._eos_token_ids, draws=self._draws
                )
            return self._vocabulary

    def _can_begin(self, bits: TokenBits) -> bool:
        allowed = np.unpackbits(bits.view(np.uint8), bitorder="little")
        allowed[list(self._eos_token_ids)] = 0
        return bool(allowed.any())


class GuidanceMatcher:
    """Grammar state of one sequence in llguidance."""

    __slots__ = ("_forget", "_is_at_beginning", "_matcher", "_vocabulary")

    def __init__(
        self,
        matcher: LLMatcher,
        vocabulary: GuidanceVocabulary,
        forget: Callable[[], object],
        *,
        is_at_beginning: bool = True,
    ) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._forget = forget
        self._is_at_beginning = is_at_beginning

    def fill_mask(self, bits: TokenBits) -> None:
        vocabulary = self._vocabulary
        assert bits.shape == (vocabulary.num_words,), f"{bits.shape}, {vocabulary.num_words} words"
        whole = np.zeros((1, vocabulary.num_list_words), np.int32)
        fill_next_token_bitmask(self._matcher, whole)
        start = vocabulary.first_id // 32 if self._is_at_beginning else 0
        bits[:] = 0 if self._matcher.is_error() else whole[0, start : start + vocabulary.num_words]

    def accept(self, token_id: int) -> None:
        self._matcher.consume_token(token_id + (self._vocabulary.first_id if self._is_at_beginning else 0))
        self._is_at_beginning = False

    def copy(self) -> GuidanceMatcher:
        copied = self._matcher.deep_copy()
        return GuidanceMatcher(copied, self._vocabulary, self._forget, is_at_beginning=self._is_at_beginning)

    @property
    def is_accepting(self) -> bool:
        return not self._matcher.is_error() and self._matcher.is_accepting()

    @property
    def failure(self) -> str:
        if not self._matcher.is_error():
            return ""
        self._forget()
        return self._matcher.get_error()
