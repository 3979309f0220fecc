"""Grammars by llguidance (https://github.com/guidance-ai/llguidance): derivatives of regular expressions under an
Earley parser, so that nothing is built in advance and no schema takes long to compile.
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
from twostroke.grammar.backend import FreeCalls, RequiredCall, TokenBits, WrittenCalls
from twostroke.grammar.json_schema import NO_TEXT, refusal, to_llguidance, wide_parts
from twostroke.grammar.trial import parser_limits, why_not
from twostroke.grammar.vocabulary import GuidanceVocabulary, TokenReader
from twostroke.sampling_params import StructuredOutputs

MAX_KEPT = 64
"""Grammars that are kept compiled."""


class Guidance:
    """See GrammarBackend. Nothing is made before somebody asks for structure.

    Args:
        tokens: reads the model's tokens.
        vocab_size: columns of its logits.
        eos_token_ids: its end-of-text tokens.
        draws: tokens are drawn by these grammars, so the vocabulary is prepared for masks in a row; else grammars are
            checked only, and it is ready in half the time.
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
        """Why, by grammar."""

    def warm_up(self) -> None:
        """See GrammarBackend. A tokenizer whose tokens cannot be read one by one has no grammars to warm up for."""
        if self._tokens.reads_alone:
            self._ready_vocabulary()

    def compile(self, wanted: StructuredOutputs, calls: FreeCalls | RequiredCall | None = None) -> str:
        if not self._tokens.reads_alone:
            limit = "this model's tokenizer has a decoder in which a token's text depends on the tokens around it"
            raise InvalidParameter("structured_outputs", wanted, limit, "Leave it out, and check the text afterwards.")
        if isinstance(calls, RequiredCall):
            grammar = to_llguidance(wanted, replace(calls, rules=self._with_tokens(calls)))
            reason = self._why_not(grammar, wanted, to_llguidance(wanted))
        else:
            grammar = to_llguidance(wanted, None if calls is None else self._written(calls))
            reason = self._why_not(grammar, wanted, grammar)
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
        """See GrammarBackend; one that cannot be used says so in `failure`, and allows nothing."""
        vocabulary, forget = self._ready_vocabulary(), partial(self._forget, grammar)
        with self._using_kept:
            first = self._kept.get(grammar)
            if first is not None:
                self._kept.move_to_end(grammar)
                return GuidanceMatcher(first.deep_copy(), vocabulary, forget)
        # outside the lock: another thread's grammar may be the one that takes long
        first = LLMatcher(vocabulary.tokenizer, grammar, log_level=0, limits=parser_limits())
        if not first.is_error():
            with self._using_kept:
                self._kept[grammar] = first.deep_copy()
                if len(self._kept) > MAX_KEPT:
                    self._kept.popitem(last=False)
        return GuidanceMatcher(first, vocabulary, forget)

    def _forget(self, grammar: str) -> None:
        """Keep no matcher of a grammar of which one has failed: copies share what one may take of expressions."""
        with self._using_kept:
            self._kept.pop(grammar, None)

    def _written(self, calls: FreeCalls) -> WrittenCalls:
        first_id = self._ready_vocabulary().first_id
        beginning = calls.beginning
        for text, token_id in self._special((*calls.markers, *calls.markup)).items():
            ways = " | ".join([json.dumps(text), *self._places(token_id)])
            beginning = beginning.replace(json.dumps(text), f"({ways})")
        return WrittenCalls(
            markers=calls.markers,
            first_tokens=frozenset(token_id + first_id for token_id in self._special(calls.markers).values()),
            tokens=frozenset(self._special((*calls.markers, *calls.markup)).values()),
            bare=calls.bare,
            beginning=beginning,
        )

    def _with_tokens(self, call: RequiredCall) -> str:
        """Return the rules with special tokens in place of their texts; of those that end a text there is no need."""
        rules = call.rules
        for text, token_id in self._special(call.markup).items():
            ways = '""' if token_id in self._eos_token_ids else f"({' | '.join(self._places(token_id))})"
            rules = rules.replace(json.dumps(text), ways)
        return rules

    def _special(self, texts: Sequence[str]) -> dict[str, int]:
        """Return those of these texts that are special tokens, and their ids."""
        special = {self._tokens.token_bytes(i): i for i in sorted(self._tokens.special_token_ids)}
        return {text: special[name] for text in texts if (name := text.encode()) in special}

    def _places(self, token_id: int) -> list[str]:
        """Return Lark of a token, in a text and at its beginning."""
        return [f"<[{place}]>" for place in sorted({token_id, token_id + self._ready_vocabulary().first_id})]

    def _why_not(self, grammar: str, wanted: StructuredOutputs, tried: str) -> str:
        """Return why a grammar cannot be followed; where it needs tokens of the model, another one is tried for it."""
        with self._using_kept:
            if grammar in self._kept:
                return ""
            known = self._refused.get(grammar)
        if known is not None:
            return known
        reason = next(filter(None, map(why_not, (*wide_parts(wanted), tried))), "")
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
    """See GrammarMatcher."""

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
