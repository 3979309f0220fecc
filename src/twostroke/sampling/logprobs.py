"""Log-probabilities of the model's own distribution: logits before any processing, in float32."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from twostroke.sampling.rowwise import largest

SLICE_BYTES = 64 * 2**20
"""Most memory for one slice of log-probabilities."""


class PositionLogprobs(NamedTuple):
    """Log-probabilities of one position; the fields, in order, are those of batch.TokenLogprobs."""

    token_ids: tuple[int, ...]
    """Given token first, then the most likely ones, equal ones by rising id."""
    logprobs: tuple[float, ...]
    rank: int
    """Rank of the given token: 1 + the number of tokens that are more likely."""

    def first(self, num_top: int) -> PositionLogprobs:
        """Return the given token and the `num_top` most likely ones."""
        return PositionLogprobs(self.token_ids[: num_top + 1], self.logprobs[: num_top + 1], self.rank)


def num_slice_rows(vocab_size: int) -> int:
    """Return the rows of log-probabilities that fit into SLICE_BYTES; at least 1."""
    return max(1, SLICE_BYTES // (4 * vocab_size))


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> list[PositionLogprobs]:
    """Return log-probability and rank of one token per row, and the `num_top` most likely ones.

    It works on slices of rows, so that prompt log-probabilities of a long chunk need little memory besides their
    logits. The row-wise kernel of torch.log_softmax gives a row the same bits alone and among others
    (tests/unit/sampling).

    Args:
        logits: logits of the model, unprocessed; any float type. [N, V].
        token_ids: the tokens drawn, or the prompt's next tokens. int64 [N].
        num_top: 0 for the given tokens alone.
    """
    found: list[PositionLogprobs] = []
    step = num_slice_rows(logits.shape[1])
    for start in range(0, len(logits), step):
        found += _slice_logprobs(logits[start : start + step], token_ids[start : start + step], num_top)
    return found


def _slice_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> list[PositionLogprobs]:
    logprobs = logits.to(torch.float32).log_softmax(dim=-1)
    given = logprobs.gather(-1, token_ids[:, None])
    ranks = (logprobs > given).sum(dim=-1) + 1
    if num_top:
        top, top_ids = largest(logprobs, num_top)
        given, token_ids = torch.cat((given, top), dim=-1), torch.cat((token_ids[:, None], top_ids), dim=-1)
    else:
        token_ids = token_ids[:, None]
    rows = zip(token_ids.tolist(), given.tolist(), ranks.tolist(), strict=True)
    return [PositionLogprobs(tuple(ids), tuple(values), rank) for ids, values, rank in rows]
