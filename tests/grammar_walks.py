"""Shared by the grammar tests: masks as sets, and texts that are made by drawing from them."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from functools import cache

import numpy as np

import text_fakes
from twostroke.grammar.backend import GrammarMatcher
from twostroke.grammar.guidance import Guidance
from twostroke.sampling_params import StructuredOutputs
from twostroke.tokenizer.tokenizer import IncrementalDetokenizer, Tokenizer

NUM_PADDING_ROWS = 41
"""Columns of the logits without a token: no multiple of anything."""

ENDS = {"byte_level": "<|end|>", "byte_fallback": "</s>", "metaspace": "</s>", "wordpiece": "[SEP]"}
"""The end-of-text token of each kind of tokenizer in text_fakes that grammars work with."""


@cache
def backend(kind: str) -> Guidance:
    """Grammars for one of the small tokenizers."""
    return Guidance(text_fakes.tokenizer(kind), num_columns(kind), [eos_id(kind)])


def num_columns(kind: str) -> int:
    """Columns of an imagined model's logits."""
    return text_fakes.tokenizer(kind).max_token_id + 1 + NUM_PADDING_ROWS


def eos_id(kind: str) -> int:
    """Id of the end-of-text token."""
    token_id = text_fakes.tokenizer(kind).token_id(ENDS[kind])
    assert token_id is not None
    return token_id


def matcher_of(kind: str, **wanted: object) -> GrammarMatcher:
    """Return a matcher at the beginning; the keywords are those of StructuredOutputs."""
    return backend(kind).matcher(backend(kind).compile(StructuredOutputs(**wanted)))


def allowed(matcher: GrammarMatcher, vocab_size: int) -> set[int]:
    """Return the allowed tokens as a set."""
    bits = np.full(-(-vocab_size // 32), -1, np.int32)
    matcher.fill_mask(bits)
    return set(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist())


def text_of(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """Return the text that the user sees."""
    detokenizer = IncrementalDetokenizer(tokenizer)
    return detokenizer.push(token_ids) + detokenizer.finish()


def walk(
    matcher: GrammarMatcher, vocab_size: int, eos_ids: Collection[int], rng: random.Random, max_tokens: int = 400
) -> tuple[list[int], bool]:
    """Draws among what is allowed; the tokens before the end, and whether it came. Ends only when nothing else is left,
    or one time in eight where it may.
    """
    token_ids: list[int] = []
    while len(token_ids) < max_tokens:
        choices = allowed(matcher, vocab_size)
        others = sorted(choices.difference(eos_ids))
        if not others or (len(others) < len(choices) and rng.random() < 0.125):
            return token_ids, bool(choices)
        token_ids.append(rng.choice(others))
        matcher.accept(token_ids[-1])
    return token_ids, False
