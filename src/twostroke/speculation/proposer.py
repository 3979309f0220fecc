"""What guesses the next tokens of requests, for the target to verify in its next pass.

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

TokenIds = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class DraftRequest:
    """A sequence whose next tokens are to be guessed."""

    token_ids: TokenIds
    """[num_tokens]: the prompt and the output so far. A view: it is good until the next step."""
    num_drafts: int
    """So many are of use; 0 and more."""


class Proposer(Protocol):
    """Guesses."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[tuple[int, ...]]:
        """Drafts for each request, at most as many as are of use."""
        ...
