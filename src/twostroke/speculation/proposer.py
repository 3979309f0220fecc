"""What guesses the next tokens of requests, for the target to verify in the same step.

A draft stands if it is the token that the target takes at its position, with that position's own noise (Daliri, Musco
and Suresh 2024, drafter-invariant speculative decoding). So a proposer can be wrong, and cost time; it cannot change a
single token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from twostroke.sampling.state import SamplingState

TokenIds = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class DraftRequest:
    """A sequence whose next tokens are to be guessed. Its arrays are views, good until the step is over.

    ```
    known tokens    t0 … t(n-1)            the last one was drawn a moment ago: the target has not read it yet
    drafts                     d1 … dk     at positions n … n + k - 1; all of these have places in the block tables
    ```
    """

    row: int
    """Its name among those that live; given on once it has ended."""
    token_ids: TokenIds
    """[num_tokens]: the prompt and the output so far."""
    num_drafts: int
    """So many are of use; 1 and more."""
    sampling: SamplingState
    """Before the draw of the first draft's position."""
    block_tables: Sequence[npt.NDArray[np.int32]]
    """Per KV group of the target, [max_blocks]."""


class Proposer(Protocol):
    """Guesses."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[tuple[int, ...]]:
        """Drafts for each request, at most as many as are of use."""
        ...

    def forget(self, row: int, num_tokens: int) -> None:
        """Whatever is kept of a sequence's tokens from the `num_tokens`th on is void."""
        ...
