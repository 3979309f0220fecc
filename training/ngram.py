"""Baseline: an interpolated modified Kneser-Ney n-gram model over the same tokens (Chen and Goodman, 1999).

An n-gram is packed into one int64, the last token in the lowest bits. So its context is a shift, its suffix a mask,
and all counts are sorted arrays.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Order:
    """Counts of one order; all arrays are sorted by their keys."""

    keys: IntArray
    counts: IntArray
    contexts: IntArray
    totals: IntArray
    backoff: FloatArray
    discounts: FloatArray


def pack(documents: Iterable[NDArray[np.uint16]], order: int, bits: int, start: int) -> IntArray:
    """Return the n-gram that ends at each token of each document; contexts before a document are filled with
    ``start``."""
    packed = []
    for document in documents:
        padded = np.concatenate((np.full(order - 1, start, np.int64), document.astype(np.int64)))
        key = np.zeros(len(document), np.int64)
        for offset in range(order):
            key = (key << bits) | padded[offset : offset + len(document)]
        packed.append(key)
    return np.concatenate(packed)


def discounts_of(counts: IntArray) -> FloatArray:
    """Return the discounts of counts 0, 1, 2 and 3 or more, from the numbers of counts; clipped to [0, count]."""
    n1, n2, n3, n4 = (float(np.count_nonzero(counts == c)) for c in (1, 2, 3, 4))
    y = n1 / (n1 + 2 * n2) if n1 else 0.5
    raw = [0.0, *(c - (c + 1) * y * above / max(n, 1.0) for c, n, above in ((1, n1, n2), (2, n2, n3), (3, n3, n4)))]
    return np.clip(np.array(raw), 0.0, np.array([0.0, 1.0, 2.0, 3.0]))


class KneserNey:
    """A model of the given order; probabilities of each context sum to one over the vocabulary."""

    def __init__(
        self, documents: Iterable[NDArray[np.uint16]], vocab_size: int, order: int = 5, start: int = 0
    ) -> None:
        self.vocab_size, self.order, self.start = vocab_size, order, start
        self.bits = max((vocab_size - 1).bit_length(), 1)
        if self.bits * order > 62:
            raise ValueError(f"{order} tokens of {self.bits} bits do not fit in one integer")
        keys, counts = np.unique(pack(documents, order, self.bits, start), return_counts=True)
        levels = [self._level(keys, counts)]
        for length in range(order - 1, 0, -1):
            # A lower order counts in how many contexts an n-gram was seen, not how often.
            keys, counts = np.unique(keys & ((1 << self.bits * length) - 1), return_counts=True)
            levels.append(self._level(keys, counts))
        self.levels = levels[::-1]

    def _level(self, keys: IntArray, counts: IntArray) -> Order:
        contexts, first = np.unique(keys >> self.bits, return_index=True)
        discounts = discounts_of(counts)
        totals = np.add.reduceat(counts, first)
        removed = np.add.reduceat(discounts[np.minimum(counts, 3)], first)
        return Order(keys, counts, contexts, totals, removed / totals, discounts)

    def probabilities(self, ngrams: IntArray) -> FloatArray:
        """Return the probability of the last token of each packed n-gram after the tokens before it: [n] -> [n]."""
        result = np.full(len(ngrams), 1.0 / self.vocab_size)
        for length, level in enumerate(self.levels, start=1):
            key = ngrams & ((1 << self.bits * length) - 1)
            context = key >> self.bits
            row, known = find(level.contexts, context)
            at, seen = find(level.keys, key)
            count = np.where(seen, level.counts[at], 0)
            kept = count - level.discounts[np.minimum(count, 3)]
            mixed = kept / level.totals[row] + level.backoff[row] * result
            result = np.where(known, mixed, result)
        return result

    def bits_of(self, documents: Iterable[NDArray[np.uint16]]) -> float:
        """Return the information content of all tokens of ``documents``, in bits."""
        return float(-np.log2(self.probabilities(pack(documents, self.order, self.bits, self.start))).sum())


def find(sorted_keys: IntArray, wanted: IntArray) -> tuple[IntArray, NDArray[np.bool_]]:
    """Return for each wanted key an index that is always valid, and whether the key is there."""
    at = np.minimum(np.searchsorted(sorted_keys, wanted), len(sorted_keys) - 1)
    return at, sorted_keys[at] == wanted
