"""Tokens that a grammar allows in one generated sequence."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from twostroke.grammar.backend import GrammarMatcher, TokenBits


class TokenConstraint:
    """Matcher of a grammar, with the mask of the next token, which is computed once per token.

    Args:
        matcher: matcher of this sequence alone, at its current place.
        vocab_size: columns of the logits.
        eos_ids: the model's end-of-text tokens.
        ignores_eos: whether these may come only where no other token may.
    """

    __slots__ = ("_bits", "_can_continue", "_end_bits", "_ignores_eos", "_matcher")

    def __init__(
        self, matcher: GrammarMatcher, vocab_size: int, eos_ids: NDArray[np.int64], *, ignores_eos: bool
    ) -> None:
        self._matcher = matcher
        self._end_bits = _bits_of(eos_ids, vocab_size)
        self._ignores_eos = ignores_eos
        self._bits: TokenBits | None = None  # not computed yet
        self._can_continue = True

    @property
    def bits(self) -> TokenBits:
        """Tokens that may come next."""
        if self._bits is None:
            bits = np.zeros_like(self._end_bits)
            self._matcher.fill_mask(bits)
            others = bits & ~self._end_bits
            self._can_continue = bool(others.any())
            self._bits = others if self._ignores_eos and self._can_continue else bits
        return self._bits

    @property
    def is_complete(self) -> bool:
        """Whether the text has the requested form, and only its end can follow."""
        return len(self.bits) > 0 and not self._can_continue and self._matcher.is_accepting

    @property
    def failure(self) -> str:
        """Reason why no token may come; empty while one may."""
        return self._matcher.failure

    def append(self, token_id: int) -> None:
        """Advance by one token."""
        self._matcher.accept(token_id)
        self._bits = None

    def copy(self) -> TokenConstraint:
        """Return an independent copy."""
        new = object.__new__(TokenConstraint)
        new._matcher, new._end_bits, new._ignores_eos = self._matcher.copy(), self._end_bits, self._ignores_eos
        new._bits, new._can_continue = (
            self._bits,
            self._can_continue,
        )  # shared, because they are not changed once computed
        return new


def _bits_of(token_ids: NDArray[np.int64], vocab_size: int) -> TokenBits:
    words = np.zeros(-(-vocab_size // 32), np.uint32)
    np.bitwise_or.at(words, token_ids // 32, np.uint32(1) << (token_ids % 32).astype(np.uint32))
    return words.view(np.int32)
