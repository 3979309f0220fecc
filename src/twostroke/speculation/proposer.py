"""What guesses the next tokens of requests, for the target to verify in the same step.

A draft stands if it is the token that the target takes at its position, with that position's own noise (Daliri, Musco
and Suresh 2024, drafter-invariant speculative decoding). So a proposer can be wrong, and cost time; it cannot change a
single token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from torch import Tensor

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


class Drafts(NamedTuple):
    """What is guessed of one sequence: how it goes on, and how else it might.

    ```
    known …  t(n-1) ─┬─ d1 ── d2 ── d3        the chain
                     ├─ e1 ── d2              a branch: a path of its own from the last known token on
                     └─ d1 ── e2              another one
    ```

    A chain takes a place for each of its tokens; a branch one more, as the last known token is read again for it.
    """

    chain: tuple[int, ...] = ()
    branches: tuple[tuple[int, ...], ...] = ()

    @property
    def num_places(self) -> int:
        """Of those that a request has for drafts, so many are taken."""
        return len(self.chain) + sum(1 + len(branch) for branch in self.branches)


class Proposer(Protocol):
    """Guesses."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Drafts]:
        """Drafts for each request, at most as many as there are places for."""
        ...

    def forget(self, row: int, num_tokens: int) -> None:
        """Whatever is kept of a sequence's tokens from the `num_tokens`th on is void."""
        ...


class TargetRead(NamedTuple):
    """What the target read of one sequence in a step, drafts that fell left out: a tuple, as one is made per step."""

    row: int
    first: int
    """Place of the first of the tokens in the flat batch."""
    begin: int
    """Its position."""
    num_tokens: int
    num_known: int
    """Tokens of the sequence, with those that this step has drawn."""

    @property
    def end(self) -> int:
        """Position behind the last of the tokens."""
        return self.begin + self.num_tokens


@dataclass(frozen=True, slots=True, eq=False)
class TargetStep:
    """What the target made of a step's tokens. The tensors are whoever's who wants to keep them."""

    hidden: Tensor
    """[num_tokens, hidden_size], behind the final norm."""
    features: Tensor
    """[num_tokens, feature layers x hidden_size]: the inputs of the layers that were asked for, side by side."""
    reads: Sequence[TargetRead]
    block_tables: Sequence[npt.NDArray[np.int32]]
    """Per KV group of the target, [rows, max_blocks]; views that later steps change."""


@runtime_checkable
class Watcher(Protocol):
    """A proposer that guesses from what the target makes of its tokens.

    It is shown steps whether or not anybody drafts: it should keep what it is shown, and work when it is asked.
    """

    def watches(self, reads_prompts: bool) -> bool:
        """Whether it wants to see the next step; who was not asked for long need not.

        Args:
            reads_prompts: tokens of prompts are among the step's: nobody reads them twice.
        """
        ...

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Layers of the target whose inputs it wants, rising."""
        ...

    def observe(self, step: TargetStep) -> None:
        """A step was computed."""
        ...
