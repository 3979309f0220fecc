"""min_p, top_k and top_p: filters that keep the most likely tokens for the draw.

All three keep the tokens down to some value, so a row is decided by its values in falling order alone. Token ids matter
only where top_p cuts through equal values. Sorting values without ids is fast in numpy, which uses vector instructions:
64 rows of 4,096 take 0.4 ms on one core, where torch.sort takes 12 and torch.topk of 128 takes 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from twostroke.kernels.memory import send
from twostroke.sampling.rowwise import exclude_below_, exp_
from twostroke.sampling_params import SamplingParams

_PIECE = 32
"""Logits per maximum, by which the largest are found without ordering the rest."""
_FEW_IN = 4 * _PIECE
"""Ratio of a row's length to the number sought above which maxima of pieces are used: there are then four times as many
pieces."""


def effective_top_k(params: SamplingParams, vocab_size: int) -> int:
    """Return the number of tokens that top_k keeps; the size of the vocabulary where it is off."""
    return params.top_k if 0 < params.top_k < vocab_size else vocab_size


@dataclass(frozen=True, slots=True, eq=False)
class FilterColumns:
    """Parameters of a batch's filters. All [R, 1]."""

    floor: Tensor
    """float32: log(min_p), or -inf. The largest logit is 0, so p >= min_p * max p means logit >= log(min_p)."""
    top_k: Tensor
    """int64; the size of the vocabulary where it is off."""
    top_p: Tensor
    """float64: top_p, 1 where it is off."""

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> FilterColumns:
        """Make the columns from the rows' parameters."""

        def column(values: list[int] | list[float], kind: type) -> Tensor:
            return send(np.array(values, kind)[:, None], device)

        return cls(
            column([log(p.min_p) if p.min_p else -np.inf for p in params], np.float32),
            column([effective_top_k(p, vocab_size) for p in params], np.int64),
            column([p.top_p for p in params], np.float64),
        )


def apply_filters(logits: Tensor, params: Sequence[SamplingParams]) -> None:
    """Apply min_p, then top_k, then top_p: set logits of the tokens that they drop to -inf.

    min_p keeps p >= min_p * max p. top_k keeps all tokens at least as likely as the k-th. top_p keeps the smallest
    prefix of the falling order (equal values by rising token id) whose share of the remaining probability reaches top_p
    (Holtzman et al., "The curious case of neural text degeneration", ICLR 2020, section 3.1). The most likely token
    always stays.

    Args:
        logits: float32 [R, V], divided by temperature, the largest of each row 0; -inf for excluded tokens. Changed.
        params: R of them. Equal values of top_k are fastest, because only the largest logits are put in order.
    """
    vocab_size = logits.shape[1]
    columns = FilterColumns.of(params, vocab_size, logits.device)
    floor, top_k, top_p = columns.floor, columns.top_k, columns.top_p
    has_top_k, has_top_p = bool((top_k < vocab_size).any()), bool((top_p < 1.0).any())
    if has_top_k or has_top_p:
        width = min(int(top_k.max()) + 1, vocab_size)  # one more shows whether an equal value follows the k-th
        values = _largest_descending(logits, width)  # [r, width]
        floor = torch.where(top_k < vocab_size, torch.maximum(floor, values.gather(-1, top_k - 1)), floor)
        if has_top_p:
            if width < vocab_size and bool((values[:, -1:] >= floor).any()):
                values = _largest_descending(logits, vocab_size)  # equals of the k-th may follow; top_p counts them
            num_kept = _num_in_nucleus(values, floor, top_p)
            floor = torch.maximum(floor, values.gather(-1, num_kept - 1))
            _drop_surplus_ties(logits, values, floor, num_kept)
    exclude_below_(logits, floor)


def _largest_descending(logits: Tensor, width: int) -> Tensor:
    """Return the largest values of each row in falling order. float32 [R, width]."""
    if logits.device.type != "cpu":
        return logits.topk(width, dim=-1).values
    if width * _FEW_IN <= logits.shape[1]:
        return torch.from_numpy(np.stack([_largest(row, width) for row in logits.numpy()]))
    values = -logits.numpy()  # negative, so that the rising order is the falling one
    if width < logits.shape[1]:
        values.partition(width - 1, axis=-1)
        values = values[:, :width].copy()
    values.sort(axis=-1)
    return torch.from_numpy(np.negative(values, out=values))


def _largest(row: NDArray[np.float32], width: int) -> NDArray[np.float32]:
    """Return the `width` largest values of a long row in falling order.

    The `width` largest maxima of pieces are values of the row, so the smallest of them is at most the last value
    sought: smaller values need not be looked at. A piece is every n-th logit, since numpy takes maxima of whole rows 30
    times as fast as maxima of 32 neighbours.
    """
    maxima = row[: len(row) // _PIECE * _PIECE].reshape(_PIECE, -1).max(axis=0)
    bound = np.partition(maxima, len(maxima) - width)[-width]
    candidates = row[row >= bound]
    candidates.sort()
    return candidates[: -width - 1 : -1]


def _num_in_nucleus(values: Tensor, floor: Tensor, top_p: Tensor) -> Tensor:
    """Return how many values of each row min_p, top_k and top_p keep. values: [R, C], falling; the others and the
    result (int64): [R, 1]."""
    left = values >= floor
    # A sequential sum, so that the sum up to a token does not depend on what follows it.
    up_to = exp_(values.to(torch.float64)).masked_fill_(~left, 0.0).cumsum_(dim=-1)
    target = up_to[:, -1:] * top_p
    # A token is kept if the tokens before it do not reach the target; the first always is.
    left[:, 1:] &= (up_to[:, :-1] < target) | (top_p == 1.0)
    return left.sum(dim=-1, keepdim=True)


def _drop_surplus_ties(logits: Tensor, values: Tensor, threshold: Tensor, num_kept: Tensor) -> None:
    """Set surplus logits that equal the threshold to -inf, the highest token ids first."""
    surplus = ((values >= threshold).sum(dim=-1) - num_kept[:, 0]).tolist()
    for row, count in enumerate(surplus):
        if count:
            equal_ids = (logits[row] == threshold[row]).nonzero()[:, 0]
            logits[row, equal_ids[-count:]] = -torch.inf
