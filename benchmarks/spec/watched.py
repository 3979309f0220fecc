"""A drafter that is watched: of each of its drafts that was looked at, what it and the target thought of the place.

The engine's own parts draft and verify, and nothing of it knows; what the target thinks is computed once more from its
hidden states. That takes time, so nothing is timed with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
from torch import Tensor

from benchmarks.spec.overlap import Overlap, overlap, probabilities
from twostroke.model.decoder import DecoderModel
from twostroke.sampling.noise import NoiseStream
from twostroke.sampling.sampler import Sampler
from twostroke.sampling.state import SamplingState
from twostroke.speculation.proposer import DraftRequest, Drafts, Proposer, TargetRead, TargetStep, Watcher
from twostroke.startup.drafting import Drafter, DrafterFacts, Target


@dataclass(frozen=True, slots=True)
class WatchedDrafter:
    """One that draws drafts from a model's distribution, at a temperature and without filters or penalties."""

    drafter: Drafter
    overlaps: list[Overlap] = field(default_factory=list[Overlap])
    """One for each draft that was looked at, as they come: behind one that falls nothing is looked at."""

    @property
    def facts(self) -> DrafterFacts:
        """See Drafter."""
        return self.drafter.facts

    @property
    def words(self) -> str:
        """See Drafter."""
        return self.drafter.words

    def build(self, target: Target) -> Proposer:
        """See Drafter."""
        sampler = _WatchedSampler(target.sampler)
        proposer = self.drafter.build(replace(target, sampler=sampler))
        return _WatchedProposer(proposer, sampler, target.model, self.overlaps)


class _WatchedSampler(Sampler):
    """The target's, for who drafts; keeps what drafts were drawn from."""

    def __init__(self, sampler: Sampler) -> None:
        super().__init__(sampler.vocab_size)
        self._sampler = sampler
        self.drawn: dict[tuple[NoiseStream, int], tuple[npt.NDArray[np.float32], float]] = {}
        """By sequence and position: logits [vocab_size] and temperature."""

    def draw(self, logits: Tensor, states: Sequence[SamplingState]) -> tuple[Tensor, dict[int, str]]:
        """See Sampler."""
        for row, state in zip(logits.cpu().numpy(), states, strict=True):
            # what is drawn there later is another choice, from what the first one left
            self.drawn.setdefault((state.stream, state.position), (row.copy(), state.rules.params.temperature))
        return self._sampler.draw(logits, states)


class _WatchedProposer:
    """Passes everything on."""

    def __init__(
        self, proposer: Proposer, sampler: _WatchedSampler, model: DecoderModel, overlaps: list[Overlap]
    ) -> None:
        self._proposer = proposer
        self._watcher = proposer if isinstance(proposer, Watcher) else None
        self._sampler = sampler
        self._model = model
        self._overlaps = overlaps
        self._streams: dict[int, NoiseStream] = {}
        """Of the rows that drafts were asked for in this step."""

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """See Watcher."""
        return () if self._watcher is None else self._watcher.feature_layers

    def watches(self, reads_prompts: bool) -> bool:
        """See Watcher: it compares every step."""
        return True

    def propose(self, requests: Sequence[DraftRequest]) -> list[Drafts]:
        """See Proposer."""
        self._streams = {request.row: request.sampling.stream for request in requests}
        return self._proposer.propose(requests)

    def observe(self, step: TargetStep) -> None:
        """See Watcher."""
        for read in step.reads:
            if read.row in self._streams:
                self._compare(step, read)
        self._streams = {}
        self._sampler.drawn.clear()
        if self._watcher is not None:
            self._watcher.observe(step)

    def forget(self, row: int, num_tokens: int) -> None:
        """See Proposer."""
        self._proposer.forget(row, num_tokens)

    def _compare(self, step: TargetStep, read: TargetRead) -> None:
        """Of the tokens read for good, the draft behind each: those that stood, and the first that did not."""
        stream = self._streams[read.row]
        logits = self._model.compute_logits(step.hidden[read.first : read.first + read.num_tokens]).cpu().numpy()
        for position, row in enumerate(logits, read.begin + 1):
            if (stream, position) in self._sampler.drawn:
                guessed, temperature = self._sampler.drawn[stream, position]
                self._overlaps.append(overlap(probabilities(row, temperature), probabilities(guessed, temperature)))
