"""min_p, top_k and top_p: which tokens stay in the draw.

All three keep the most likely tokens down to some value, so a row is decided by its values in falling order alone;
token ids matter only where top_p cuts through equal ones. Sorting values without ids is what numpy does with vector
instructions: 64 rows of 4,096 take 0.4 ms on one core, where torch.sort takes 12 and torch.topk of 128 takes 2.
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
"""Logits of which one maximum is taken, to find the largest without ordering the others."""
_FEW_IN = 4 * _PIECE
"""How many times longer a row has to be than what is sought in it: there are four times as many pieces then."""


def effective_top_k(params: SamplingParams, vocab_size: int) -> int:
    """How many tokens top_k leaves; all of them where it is off."""
    return params.top_k if 0 < params.top_k < vocab_size else vocab_size


@dataclass(frozen=True, slots=True, eq=False)
class FilterColumns:
    """What filters each row of a batch has, from the parameters alone. All [R, 1]."""

    floor: Tensor
    """float32: log(min_p), or -inf. The largest logit is 0, so p >= min_p * max p says: logit >= log(min_p)."""
    top_k: Tensor
    """int64, the size of the vocabulary where it is off."""
    top_p: Tensor
    """float64"""

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> FilterColumns:
        """From the rows' parameters."""

        def column(values: list[int] | list[float], kind: type) -> Tensor:
            return send(np.array(values, kind)[:, None], device)

        return cls(
            column([log(p.min_p) if p.min_p else -np.inf for p in params], np.float32),
            column([effective_top_k(p, vocab_size) for p in params], np.int64),
            column([p.top_p for p in params], np.float64),
        )


def apply_filters(logits: Tensor, params: Sequence[SamplingParams]) -> None:
    """Applies min_p, then top_k, then top_p: sets what they cut off to -inf.

    min_p keeps p >= min_p * max p. top_k keeps everything at least as likely as the k-th. top_p keeps the smallest
    prefix of the falling order (equal ones by rising token id) whose share of what is left reaches top_p
    (Holtzman et al., "The curious case of neural text degeneration", ICLR 2020, section 3.1). The most likely
    token always stays.

    Args:
        logits: float32 [R, V], divided by temperature, the largest of each row 0; -inf for excluded tokens. Changed.
        params: R of them. Fastest when the top_k of all are alike: no more than the largest are put in order.
    """
    vocab_size = logits.shape[1]
    columns = FilterColumns.of(params, vocab_size, logits.device)
    floor, top_k, top_p = columns.floor, columns.top_k, columns.top_p
    has_top_k, has_top_p = bool((top_k < vocab_size).any()), bool((top_p < 1.0).any())
    if has_top_k or has_top_p:
        width = min(int(top_k.max()) + 1, vocab_size)  # one more shows whether the k-th has an equal beyond
        values = _falling(logits, width)  # [r, width]
        floor = torch.where(top_k < vocab_size, torch.maximum(floor, values.gather(-1, top_k - 1)), floor)
        if has_top_p:
            if width < vocab_size and bool((values[:, -1:] >= floor).any()):
                values = _falling(logits, vocab_size)  # equals of the k-th may lie beyond; top_p counts them
            num_kept = _num_in_nucleus(values, floor, top_p)
            floor = torch.maximum(floor, values.gather(-1, num_kept - 1))
            _cut_equal_ones(logits, values, floor, num_kept)
    exclude_below_(logits, floor)


def _falling(logits: Tensor, width: int) -> Tensor:
    """The largest values of each row in falling order. float32 [R, width]."""
    if logits.device.type != "cpu":
        return logits.topk(width, dim=-1).values
    if width * _FEW_IN <= logits.shape[1]:
        return torch.from_numpy(np.stack([_largest(row, width) for row in logits.numpy()]))
    values = -logits.numpy()  # so that rising is falling
    if width < logits.shape[1]:
        values.partition(width - 1, axis=-1)
        values = values[:, :width].copy()
    values.sort(axis=-1)
    return torch.from_numpy(np.negative(values, out=values))


def _largest(row: NDArray[np.float32], width: int) -> NDArray[np.float32]:
    """The `width` largest of a long row in falling order.

    Every one of the `width` largest maxima of pieces is a value of the row, so the smallest of them is no larger than
    the last one that is sought: what is below it need not be looked at again. A piece is every n-th logit, since numpy
    takes maxima of whole rows 30 times as fast as maxima of 32 neighbours.
    """
    maxima = row[: len(row) // _PIECE * _PIECE].reshape(_PIECE, -1).max(axis=0)
    bound = np.partition(maxima, len(maxima) - width)[-width]
    candidates = row[row >= bound]
    candidates.sort()
    return candidates[: -width - 1 : -1]


def _num_in_nucleus(values: Tensor, floor: Tensor, top_p: Tensor) -> Tensor:
    """How many of the falling values min_p, top_k and top_p keep. values: [R, C]; the others and int64: [R, 1]."""
    left = values >= floor
    # One after the other, so that the sum up to a token is the same whatever follows it.
    up_to = exp_(values.to(torch.float64)).masked_fill_(~left, 0.0).cumsum_(dim=-1)
    target = up_to[:, -1:] * top_p
    # A token is needed when what stands before it does not reach the target; the first always is.
    left[:, 1:] &= (up_to[:, :-1] < target) | (top_p == 1.0)
    return left.sum(dim=-1, keepdim=True)


def _cut_equal_ones(logits: Tensor, values: Tensor, threshold: Tensor, num_kept: Tensor) -> None:
    """Sets those that equal the threshold but are too many to -inf, the highest token ids first."""
    surplus = ((values >= threshold).sum(dim=-1) - num_kept[:, 0]).tolist()
    for row, count in enumerate(surplus):
        if count:
            equal_ids = (logits[row] == threshold[row]).nonzero()[:, 0]
            logits[row, equal_ids[-count:]] = -torch.inf
