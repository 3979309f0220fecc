"""Proposers of drafts, which the target verifies in the same step.

A draft is accepted if it equals the token that the target draws at its position, with that position's own noise
(Daliri, Musco and Suresh 2024, drafter-invariant speculative decoding). So a proposer can be wrong, and cost time, but
it cannot change a token.
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
    """Sequence that drafts are wanted for. Its arrays are views, valid until the step is over.

    ```
    known tokens    t0 … t(n-1)            the last one was just drawn: the target has not computed it yet
    drafts                     d1 … dk     at positions n … n + k - 1; all of these have slots in the block tables
    ```
    """

    row: int
    """Row of the live sequence; reused once it has ended."""
    token_ids: TokenIds
    """[num_tokens]: the prompt and the output so far."""
    num_drafts: int
    """Most drafts that are useful; at least 1."""
    sampling: SamplingState
    """Sampling state before the draw of the first draft's position."""
    block_tables: Sequence[npt.NDArray[np.int32]]
    """[max_blocks] for each KV group of the target."""


class Drafts(NamedTuple):
    """Drafts of one sequence: a chain, and alternative branches.

    ```
    known …  t(n-1) ─┬─ d1 ── d2 ── d3        the chain
                     ├─ e1 ── d2              a branch: a path of its own from the last known token on
                     └─ d1 ── e2              another one
    ```

    A chain takes a slot for each of its tokens. A branch takes one more, because the last known token is computed again
    for it.
    """

    chain: tuple[int, ...] = ()
    branches: tuple[tuple[int, ...], ...] = ()

    @property
    def num_slots(self) -> int:
        """Number of draft slots that the chain and the branches use."""
        return len(self.chain) + sum(1 + len(branch) for branch in self.branches)


class Proposer(Protocol):
    """Source of drafts."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Drafts]:
        """Return drafts for each request, at most as many as it has slots for."""
        ...

    def forget(self, row: int, num_tokens: int) -> None:
        """Invalidate everything kept of a row's tokens from the `num_tokens`th on."""
        ...


class ComputedSpan(NamedTuple):
    """Tokens of one sequence computed in a step, without rejected drafts; a tuple, because each step makes many."""

    row: int
    first: int
    """Index of the first of the tokens in the flat batch."""
    begin: int
    """Position of the first of the tokens."""
    num_tokens: int
    num_known: int
    """Tokens of the sequence, including those that this step has drawn."""

    @property
    def end(self) -> int:
        """Position after the last of the tokens."""
        return self.begin + self.num_tokens


@dataclass(frozen=True, slots=True, eq=False)
class TargetStep:
    """Outputs of the target for a step's tokens. Watchers may keep the tensors."""

    hidden: Tensor
    """[num_tokens, hidden_size]: hidden states after the final norm."""
    features: Tensor
    """[num_tokens, feature layers x hidden_size]: the inputs of the requested layers, side by side."""
    spans: Sequence[ComputedSpan]
    block_tables: Sequence[npt.NDArray[np.int32]]
    """[rows, max_blocks] for each KV group of the target; views that later steps change."""


@runtime_checkable
class FeatureObserver(Protocol):
    """Proposer that drafts from the target's hidden features.

    It is given steps whether or not drafts are wanted. It should only keep them, and compute when it is asked for
    drafts.
    """

    def needs_step(self, reads_prompts: bool) -> bool:
        """Return whether it needs the next step; a watcher that was not asked for a while may skip steps.

        Args:
            reads_prompts: whether the step has tokens of prompts, which are never computed twice.
        """
        ...

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Layers of the target whose inputs it needs, rising."""
        ...

    def observe(self, step: TargetStep) -> None:
        """Take the outputs of a computed step."""
        ...
