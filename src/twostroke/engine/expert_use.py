"""The experts that served tokens chose, for the costs of later steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from twostroke.batch import ScheduledBatch
from twostroke.config.experts import ExpertsSpec
from twostroke.config.layer_spec import LayerSpec
from twostroke.cost.expert_shares import ExpertShare, ExpertShares

FIRST_TOKENS = 1024
"""Tokens of the first measurement. Fewer would miss experts that are chosen rarely."""
MOST_TOKENS = 16_384
"""Most tokens between two measurements."""
_GROUPS_PER_OCTAVE = 8
"""Shares of a group differ by less than 9 %. Expectations at their mean are within 0.1 % of those at each share."""


class ExpertUse:
    """Shares of the tokens that choose each expert, as served.

    They are measured after 1,024 tokens, then whenever the tokens have doubled, and at last every 16,384 tokens. Each
    of the last measurements halves what was counted before, so that shares follow a load that changes. Tokens of steps
    without prefill count alone as soon as there are enough: it is decode whose time depends on experts, and prompts may
    choose others.

    Args:
        layers: all layers of the model.
        read: returns the tokens of each expert so far, of all layers with experts in a row; passes before the first
            request may be among them.
    """

    def __init__(self, layers: Sequence[LayerSpec], read: Callable[[], NDArray[np.int64]]) -> None:
        self._layers, self._read = layers, read
        self._before = read()
        self._counts = {False: np.zeros_like(self._before), True: np.zeros_like(self._before)}
        """Tokens of each expert in steps with prefill, and in those without."""
        self._num_decoded, self._num_measured, self._num_new = 0, 0, 0
        self._is_decode = False

    def measured_before(self, batch: ScheduledBatch) -> tuple[ExpertShares, ...] | None:
        """Note a step that is about to run; return new shares for each kind of experts if they are due, else None."""
        found, is_decode = None, batch.num_prefill_tokens == 0
        if is_decode is not self._is_decode:
            self._take()
            self._is_decode = is_decode
        if self._num_new >= min(max(FIRST_TOKENS, self._num_measured), MOST_TOKENS):
            found = self._shares()
        self._num_new += batch.num_tokens
        self._num_decoded += batch.num_tokens if is_decode else 0
        return found

    def _take(self) -> None:
        """Add what was counted since the last call to the counts of its kind of steps."""
        now = self._read()
        self._counts[self._is_decode] += now - self._before
        self._before = now

    def _shares(self) -> tuple[ExpertShares, ...]:
        self._take()
        of_decodes, of_others = self._counts[True], self._counts[False]
        counts = of_decodes.copy() if self._num_decoded >= FIRST_TOKENS else of_decodes + of_others
        self._num_measured += self._num_new
        self._num_new = 0
        if self._num_measured >= MOST_TOKENS:
            of_decodes //= 2
            of_others //= 2
        return measured_shares(self._layers, counts)


def measured_shares(layers: Sequence[LayerSpec], counts: NDArray[np.int64]) -> tuple[ExpertShares, ...]:
    """Return the shares of counted tokens for each kind of experts, in order of first appearance.

    Args:
        layers: all layers of the model.
        counts: tokens of each expert, of all layers with experts in a row; a layer without tokens has equal shares.
    """
    kinds: dict[ExpertsSpec, list[NDArray[np.int64]]] = defaultdict(list)
    begin = 0
    for spec in (layer.experts for layer in layers if layer.experts is not None):
        kinds[spec].append(counts[begin : begin + spec.num_experts])
        begin += spec.num_experts
    return tuple(_shares(np.stack(alike), spec.num_chosen) for spec, alike in kinds.items())


def _shares(counts: NDArray[np.int64], num_chosen: int) -> ExpertShares:
    """Return the shares of the experts of layers alike, the largest first; counts are [num_layers, num_experts].

    >>> _shares(np.array([[100, 50, 50, 0]]), 2)
    (ExpertShare(num_experts=1, share=1.0), ExpertShare(num_experts=2, share=0.5))
    """
    counts = np.where(counts.sum(1, keepdims=True) > 0, counts, 1)
    shares = num_chosen * counts / counts.sum(1, keepdims=True)
    shares = shares[shares > 0]
    _, group, sizes = np.unique(np.rint(-_GROUPS_PER_OCTAVE * np.log2(shares)), return_inverse=True, return_counts=True)
    means = np.bincount(group, weights=shares) / sizes
    return tuple(ExpertShare(num, min(1.0, share)) for num, share in zip(sizes.tolist(), means.tolist(), strict=True))
