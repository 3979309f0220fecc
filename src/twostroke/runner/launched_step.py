"""Step that was launched on the device, with the data needed to finish it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from twostroke.batch import ScheduledBatch
from twostroke.runner.input_batch import InputBatch
from twostroke.sampling.state import SamplingState


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """Draws of a step: one for each request that reached its last known token."""

    logits: Tensor
    """float32 [R, V]."""
    states: Sequence[SamplingState]
    """R sampling states."""


@dataclass(slots=True, eq=False)
class LaunchedStep:
    """Step between the launch of its pass and its results."""

    batch: ScheduledBatch
    inputs: InputBatch
    hidden: Tensor
    """[num_tokens, hidden_size]: hidden states."""
    begin_s: float
    """Time at which its pass was started."""
    draw: Draw | None = None
