"""min_p, top_k and top_p: which tokens stay in the draw.

All three keep the most likely tokens down to some threshold, so a row is decided by a prefix of its falling order
and the whole vocabulary need not be sorted: torch.topk brings a few, and only rows whose kept set might reach
beyond them come again with more. The answer does not depend on how many were brought.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import log

import numpy as np
import torch
from torch import Tensor

from twostroke.sampling.rowwise import SLICE_ELEMENTS, row_sums
from twostroke.sampling_params import SamplingParams

WIDTHS = (128, 1024)
"""Candidates fetched in the first rounds; the last round takes the whole vocabulary."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """The tokens left in the draw, for some of the rows."""

    rows: Tensor
    """Which rows. int64 [r]."""
    token_ids: Tensor
    """int64 [r, C]."""
    logits: Tensor
    """Those of the tokens; -inf where a token is not kept. float32 [r, C]."""


@dataclass(frozen=True, slots=True)
class _Limits:
    """The filters of some rows, each [r, 1] on the device of the logits."""

    top_k: Tensor  # int64; the vocabulary size where off
    floor: Tensor  # float32; min_p cuts logits below it; -inf where off
    top_p: Tensor  # float64; 1 where off
    mass: Tensor  # float64; sum of exp(logits) that min_p leaves, where top_p needs it

    def of(self, rows: Tensor) -> _Limits:
        return _Limits(self.top_k[rows], self.floor[rows], self.top_p[rows], self.mass[rows])


def kept_candidates(logits: Tensor, params: Sequence[SamplingParams]) -> Iterator[Candidates]:
    """Applies min_p, then top_k, then top_p.

    min_p keeps p >= min_p * max p. top_k keeps everything at least as likely as the k-th. top_p keeps the smallest
    prefix of the falling order (equal ones by rising token id) whose share of what is left reaches top_p
    (Holtzman et al., "The curious case of neural text degeneration", ICLR 2020, section 3.1). The most likely
    token always stays.

    Args:
        logits: float32 [R, V], divided by temperature, the largest of each row 0; -inf for excluded tokens.
        params: R of them.

    Yields:
        Groups of rows; together each row once.
    """
    vocab_size = logits.shape[1]
    limits = _limits(logits, params)
    is_pending = torch.ones(len(params), dtype=torch.bool, device=logits.device)
    for width in (*(w for w in WIDTHS if w < vocab_size), vocab_size):
        # A row with a larger k cannot be decided among so few, and need not be looked at.
        may_fit = (limits.top_k[:, 0] < width) | (limits.top_k[:, 0] == vocab_size)
        rows = (is_pending & may_fit).nonzero()[:, 0]
        if not len(rows):
            continue
        values, token_ids = (logits if len(rows) == len(logits) else logits[rows]).topk(width, dim=-1)
        kept, is_decided = _kept(values, token_ids, limits.of(rows), is_whole=width == vocab_size)
        values.masked_fill_(~kept, -torch.inf)
        is_pending[rows] = ~is_decided
        if bool(is_decided.all()):
            yield Candidates(rows, token_ids, values)
        elif bool(is_decided.any()):
            yield Candidates(rows[is_decided], token_ids[is_decided], values[is_decided])
        if not bool(is_pending.any()):
            return


def _limits(logits: Tensor, params: Sequence[SamplingParams]) -> _Limits:
    vocab_size = logits.shape[1]

    def column(values: list[int] | list[float], kind: type) -> Tensor:
        return torch.from_numpy(np.array(values, kind)[:, None]).to(logits.device)

    # The largest logit is 0, so p >= min_p * max p says: logit >= log(min_p).
    floor = column([log(p.min_p) if p.min_p else -np.inf for p in params], np.float32)
    mass = torch.ones(len(params), 1, dtype=torch.float64, device=logits.device)
    needs_mass = [row for row, p in enumerate(params) if p.top_p < 1.0 and not 0 < p.top_k < vocab_size]
    num_rows = max(1, SLICE_ELEMENTS // vocab_size)
    for start in range(0, len(needs_mass), num_rows):
        rows = torch.tensor(needs_mass[start : start + num_rows], device=logits.device)
        some = logits[rows]
        weights = some.to(torch.float64).exp_().masked_fill_(some < floor[rows], 0.0)
        mass[rows] = row_sums(weights)
    return _Limits(
        top_k=column([p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params], np.int64),
        floor=floor,
        top_p=column([p.top_p for p in params], np.float64),
        mass=mass,
    )


def _kept(values: Tensor, token_ids: Tensor, limits: _Limits, *, is_whole: bool) -> tuple[Tensor, Tensor]:
    """Which of the candidates are kept, and whether that settles their rows.

    Args:
        values: the largest logits in falling order. float32 [r, C].
        token_ids: theirs; the order of equal values means nothing. int64 [r, C].
        limits: of these rows.
        is_whole: nothing lies outside the candidates.

    Returns:
        bool [r, C] and bool [r].
    """
    num_candidates = values.shape[1]
    last = values[:, -1:]
    kth = values.gather(-1, limits.top_k.clamp(max=num_candidates) - 1)
    floor = torch.where(limits.top_k < num_candidates, torch.maximum(kth, limits.floor), limits.floor)
    kept = values >= floor  # a prefix
    nothing_outside = (last < floor) | (last == -torch.inf) | is_whole
    if bool((limits.top_p < 1.0).any()):
        weights = values.to(torch.float64).exp_().masked_fill_(~kept, 0.0)
        up_to = weights.cumsum(dim=-1)  # one after the other, so the value at i is the same for every C
        before = torch.zeros_like(up_to)
        before[:, 1:] = up_to[:, :-1]
        has_top_k = limits.top_k < num_candidates
        target = limits.top_p * torch.where(has_top_k, up_to[:, -1:], limits.mass)
        in_nucleus = kept & ((before < target) | (limits.top_p == 1.0))
        num_kept = in_nucleus.sum(dim=-1, keepdim=True)
        threshold = values.gather(-1, num_kept - 1)
        # Without top_k the mass is known beforehand, so a row may be settled although kept tokens lie outside; equal
        # ones of the last must all be here, else the lowest ids among them are not known.
        reached = (up_to[:, -1:] >= target) & (last < threshold) & (limits.top_p < 1.0) & ~has_top_k
        kept = _cut_equal_ones(values, token_ids, threshold, num_kept)
        nothing_outside |= reached
    return kept, nothing_outside[:, 0]


def _cut_equal_ones(values: Tensor, token_ids: Tensor, threshold: Tensor, num_kept: Tensor) -> Tensor:
    """Keeps `num_kept` [r, 1] candidates: all above the threshold, and of the equal ones those of the lowest ids."""
    at_least = values >= threshold
    if bool((at_least.sum(dim=-1, keepdim=True) == num_kept).all()):
        return at_least
    above = values > threshold
    equal_ids = torch.where(values == threshold, token_ids, torch.iinfo(torch.int64).max)
    quota = num_kept - above.sum(dim=-1, keepdim=True)
    highest_kept_id = equal_ids.sort(dim=-1).values.gather(-1, quota - 1)
    return above | (equal_ids <= highest_kept_id)
