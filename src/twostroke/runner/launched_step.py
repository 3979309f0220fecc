"""A step that the device has been given, and what its end needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from twostroke.batch import ScheduledBatch
from twostroke.runner.input_batch import InputBatch
from twostroke.sampling.state import SamplingState


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """Tokens that are to be drawn: one for each request that reached its last known token."""

    logits: Tensor
    """[R, V]"""
    states: Sequence[SamplingState]
    """R of them."""


@dataclass(slots=True, eq=False)
class LaunchedStep:
    """From the moment at which its pass is enqueued until its results are known."""

    batch: ScheduledBatch
    inputs: InputBatch
    hidden: Tensor
    """[num_tokens, hidden_size]"""
    begin_s: float
    """When its pass was begun."""
    draw: Draw | None = None
