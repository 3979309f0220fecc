"""A step that the device has been given, and what its end needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from twostroke.batch import ScheduledBatch, StepResult
from twostroke.runner.branches import Branch
from twostroke.runner.host_copy import HostCopy
from twostroke.runner.input_batch import InputBatch
from twostroke.sampling.state import SamplingState
from twostroke.speculation.proposer import Watcher


@dataclass(frozen=True, slots=True, eq=False)
class Path:
    """A way in which a sequence might go on, verified from its last known token on."""

    token_ids: tuple[int, ...]
    drawn: Sequence[int]
    """Rows of what was drawn: behind the last known token, and behind each of these."""
    branch: Branch | None = None
    """None: the chain."""


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """Tokens that the device draws, or is to draw."""

    logits: Tensor
    """[R, V]"""
    states: Sequence[SamplingState]
    """R of them."""
    paths: dict[int, list[Path]]
    """By row of the table; the chain first."""
    token_ids: Tensor | None
    """int64 [R], enqueued; -1 where they must be drawn again (Sampler.draw_early). None: nothing is drawn yet."""
    copy: HostCopy | None
    """Of the same."""


@dataclass(slots=True, eq=False)
class LaunchedStep:
    """From the moment at which its pass is enqueued until its results are known.

    ```
    device   |= pass n =|draw n|= pass n+1 ====|draw n+1|
    host      … launch n+1 |finish n| account n, decide n+2 | launch n+2 |finish n+1| …
    ```
    """

    batch: ScheduledBatch
    inputs: InputBatch
    branches: Sequence[Branch]
    watcher: Watcher | None
    hidden: Tensor
    """[num_tokens, hidden_size]"""
    features: Tensor
    """What the watcher wants to see of the layers."""
    begin_s: float
    """When its pass was begun."""
    draft_time_s: float
    draw: Draw | None = None
    places: dict[int, int] = field(default_factory=dict[int, int])
    """Where in `draw.token_ids` the next token of a row of the table is."""
    drew_otherwise: bool = False
    """Whether a token turned out to be another one than the device was given to go on with."""
    outcome: StepResult | Exception | None = None
    """How it ended; None: it has not."""
