"""Prompts for a server that may be anybody's: token ids where it takes them, else words of which each is one token.

A workload's prompts are token ids. As text, id i is word i of a short list, so what two prompts share as ids they share
as text, and a prompt of n ids is n words. Whether a word is one token is asked of a tokenizer: text that was made by
decoding random ids would not come back as the same ids.
"""

from __future__ import annotations

from collections.abc import Sequence

from twostroke.errors import InvalidParameter

MIN_WORDS = 32
"""With fewer, prompts would hardly differ."""

_REPEATS = 8

_FREQUENT_WORDS = """
    the of and to in is that for it as was with be by on not he his but at are this have from or had an they which one
    you were all her she there would their we him been has when who will no more if out so up said what its about than
    into them can only other time new some could these two may first then do any like my now over such our man me even
    most made after also did many off before must well back through years where much your way down should because long
    each just state those people too day still under last while own right place world old great year end take make
    self return def class import None True False else try except raise yield pass break continue lambda assert
    name value list str int data file path type key args line text len open read write size index count start stop
"""
CANDIDATES = tuple(_FREQUENT_WORDS.split())
"""Of English, and of Python, which the embedded model was trained on."""


def candidate_texts() -> list[str]:
    """Texts whose lengths in tokens tell which words are one token each: every candidate once, then many times."""
    # alone, a word may take another token for its beginning; in a row, each must add exactly one
    return [f" {word}" * times for times in (1, 1 + _REPEATS) for word in CANDIDATES]


def one_token_words(num_tokens: Sequence[int]) -> list[str]:
    """The candidates that are one token each wherever they stand in a text.

    Args:
        num_tokens: of each of `candidate_texts`, without tokens that frame a prompt.

    Raises:
        InvalidParameter: too few of them are.
    """
    once, often = num_tokens[: len(CANDIDATES)], num_tokens[len(CANDIDATES) :]
    words = [word for word, a, b in zip(CANDIDATES, once, often, strict=True) if b - a == _REPEATS]
    if len(words) < MIN_WORDS:
        limit = (
            f"{len(words)} of {len(CANDIDATES)} frequent words are one token to this tokenizer; {MIN_WORDS} are needed"
        )
        raise InvalidParameter("prompts", "text", limit, "Send token ids: --prompts token-ids.")
    return words


def as_text(token_ids: Sequence[int], words: Sequence[str]) -> str:
    """A prompt of ids as words; it begins with a space, so that the first word is like the others.

    >>> as_text([0, 2, 3], ["the", "of", "and"])
    ' the and the'
    """
    return "".join(f" {words[token_id % len(words)]}" for token_id in token_ids)
