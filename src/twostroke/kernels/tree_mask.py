"""Masks of draft trees: which of a step's own tokens each query of a tree sees.

A drafter proposes several continuations at once, as a tree (SpecInfer, Miao et al. 2024, arXiv:2305.09781). Its tokens
take the slots after the sequence one after the other, parents before children. Each sees the whole prefix, its
ancestors and itself:

    tokens    0 ─┬─ 1 ── 2          mask    1 . . . .        keys are summed in the order of their slots, for
                 └─ 3 ── 4                  1 1 . . .        every tree: a branch has the bits of the same tokens run
                                            1 1 1 . .        one after the other where it has the same slots (0 1 2
                                            1 . . 1 .        here; 3 and 4 are one or more slots later, and agree
                                            1 . . 1 1        up to rounding)

The position of a token after the prefix is the number of its ancestors. Windows and rotary embeddings use that
position.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

TreeMasks = Sequence[npt.NDArray[np.bool_] | None]
"""Masks of a batch's sequences: bool [query_len, query_len], a row for each query; None for a causal mask."""


def within_window(mask: npt.NDArray[np.bool_], window: int | None) -> npt.NDArray[np.bool_]:
    """Return the mask without ancestors at a distance of a window or more.

    >>> within_window(np.tri(3, dtype=bool), 2).astype(int).tolist()
    [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    """
    num_queries = len(mask)
    assert mask.shape == (num_queries, num_queries), mask.shape
    assert mask.diagonal().all(), "a token sees itself"
    assert not np.triu(mask, 1).any(), "parents come before their children"
    if window is None:
        return mask
    distance = np.cumsum(mask[:, ::-1], axis=1)[:, ::-1]  # tokens seen from this one on, itself included
    return mask & (distance <= window)


def depths(mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Return positions relative to the first token of the step. [query_len]"""
    return mask.sum(1).astype(np.int64) - 1
