"""Which of a step's own tokens the queries of a draft tree see.

A drafter proposes several continuations at once, as a tree (SpecInfer, Miao et al. 2024, arXiv:2305.09781). Its tokens
take the slots behind the sequence one after the other, parents before children, and each sees the whole prefix, its
ancestors and itself:

    tokens    0 ─┬─ 1 ── 2          mask    1 . . . .        keys are summed in the order of their slots, whatever
                 └─ 3 ── 4                  1 1 . . .        the tree: a branch has the bits of the same tokens run
                                            1 1 1 . .        one after the other where it has the same slots (0 1 2
                                            1 . . 1 .        here; 3 and 4 stand one or more slots later, and agree
                                            1 . . 1 1        up to rounding)

A token stands as many positions behind the prefix as it has ancestors; windows and rotations go by that position.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

TreeMasks = Sequence[npt.NDArray[np.bool_] | None]
"""Per sequence of a batch: bool [query_len, query_len], row by row what a query sees; None: it sees all before it."""


def within_window(mask: npt.NDArray[np.bool_], window: int | None) -> npt.NDArray[np.bool_]:
    """The same without the ancestors that are a window or more away.

    >>> within_window(np.tri(3, dtype=bool), 2).astype(int).tolist()
    [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    """
    num_queries = len(mask)
    assert mask.shape == (num_queries, num_queries), mask.shape
    assert mask.diagonal().all(), "a token sees itself"
    assert not np.triu(mask, 1).any(), "parents come before their children"
    if window is None:
        return mask
    distance = np.cumsum(mask[:, ::-1], axis=1)[:, ::-1]  # tokens seen from here on, itself included
    return mask & (distance <= window)


def depths(mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Positions behind the first token of the step. [query_len]"""
    return mask.sum(1).astype(np.int64) - 1
