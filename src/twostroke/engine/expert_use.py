"""The experts that served tokens chose, for the costs of later steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from twostroke.batch import ScheduledBatch
from twostroke.config.layer_spec import LayerSpec
from twostroke.cost.expert_shares import ExpertShares, measured_shares

FIRST_TOKENS = 1024
"""Tokens of the first measurement. Fewer would miss experts that are chosen rarely."""
MOST_TOKENS = 16_384
"""Most tokens between two measurements. The shares of thousands of experts take some milliseconds."""


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
        ends = accumulate((layer.experts.num_experts for layer in layers if layer.experts is not None), initial=0)
        self._places = [slice(*both) for both in pairwise(ends)]
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
        counts = (of_decodes if self._num_decoded >= FIRST_TOKENS else of_decodes + of_others).tolist()
        self._num_measured += self._num_new
        self._num_new = 0
        if self._num_measured >= MOST_TOKENS:
            of_decodes //= 2
            of_others //= 2
        return measured_shares(self._layers, [counts[place] for place in self._places])
