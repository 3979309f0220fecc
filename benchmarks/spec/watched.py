"""An observed drafter: the drafter's and the target's distribution at each verified draft.

The engine's own parts draft and verify without change; the target's distribution is recomputed from its hidden states.
That takes time, so no times are measured with it.

The acceptance of a draft follows from the two distributions that draft and token are drawn from:

    classical   sum_x min(p(x), q(x)) = 1 - TV          a draft drawn from q is kept with probability min(1, p/q)
                                                        (Leviathan et al. 2023, arXiv:2211.17192, theorem 3.5;
                                                        Chen et al. 2023, arXiv:2302.01318)
    coupled     sum_x 1 / sum_y max(p(y)/p(x), q(y)/q(x))
                                                        both are drawn with the same Gumbel noise, and have to be equal
                                                        (Daliri, Musco and Suresh 2024, arXiv:2408.07978)

No way of drawing makes two tokens equal more often than the classical share. The coupled one is at least
(1 - TV) / (1 + TV), which is classical / (2 - classical); no method whose drafts do not change the tokens can guarantee
more (the same paper).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from twostroke.model.decoder import DecoderModel
from twostroke.sampling.noise import NoiseStream
from twostroke.sampling.sampler import Sampler
from twostroke.sampling.state import SamplingState
from twostroke.speculation.proposer import ComputedSpan, DraftRequest, Drafts, FeatureObserver, Proposer, TargetStep
from twostroke.startup.prepared import Drafter, DrafterFacts, LoadedTarget

Probabilities = npt.NDArray[np.float64]


class Overlap(NamedTuple):
    """Acceptance probability of the draft at one position."""

    classical: float
    """Probability if drafts were accepted with min(1, p/q)."""
    coupled: float
    """Probability in this engine: draft and token are drawn with the same noise, and must be equal."""

    @property
    def at_least(self) -> float:
        """Lower bound of `coupled` for any distributions."""
        return self.classical / (2 - self.classical)


def probabilities(logits: npt.NDArray[np.floating], temperature: float) -> Probabilities:
    """Return the probability of each token, as the sampler draws without filters.

    Args:
        logits: [vocab_size]; -inf is a token that is never drawn.
        temperature: 0 gives all probability to the largest logit, the first of equal ones.

    Returns:
        [vocab_size], which sum to 1.
    """
    wide = logits.astype(np.float64)
    if temperature == 0:
        found = np.zeros_like(wide)
        found[wide.argmax()] = 1.0
        return found
    weights = np.exp((wide - wide.max()) / temperature)
    return weights / weights.sum()


def overlap(p: Probabilities, q: Probabilities) -> Overlap:
    """Return both probabilities; they are symmetric in `p` and `q`.

    With tokens in the falling order of p/q, the inner sum over y takes p up to x and q after it, so only sorting costs
    time. Reason for the sum: of exponential times E(x)/p(x) and E(x)/q(x), x comes first on both sides if every other
    E(y) is at least E(x) max(p(y)/p(x), q(y)/q(x)).

    Args:
        p: [vocab_size], which sum to 1.
        q: of the same tokens.

    >>> overlap(np.array([0.5, 0.5, 0.0]), np.array([0.5, 0.0, 0.5]))
    Overlap(classical=0.5, coupled=0.3333333333333333)
    """
    both = (p > 0) & (q > 0)
    shared_p, shared_q = p[both], q[both]
    order = np.argsort(np.log(shared_q) - np.log(shared_p))  # the ratio itself may be beyond a float
    shared_p, shared_q = shared_p[order], shared_q[order]
    up_to = np.cumsum(shared_p) + p[q == 0].sum()  # p/q is infinite there: before all others
    behind = np.cumsum(shared_q[::-1])[::-1] - shared_q + q[p == 0].sum()
    with np.errstate(over="ignore"):  # a token with almost no probability adds 1 / infinity
        coupled = 1 / (up_to / shared_p + behind / shared_q)
    return Overlap(float(np.minimum(p, q).sum()), float(coupled.sum()))


@dataclass(frozen=True, slots=True)
class ObservedDrafter:
    """Wrapper of a drafter that draws from a model's distribution, at a temperature and without filters or
    penalties."""

    drafter: Drafter
    overlaps: list[Overlap] = field(default_factory=list[Overlap])
    """One entry per verified draft, in order; drafts after a rejected one are not verified."""

    @property
    def facts(self) -> DrafterFacts:
        return self.drafter.facts

    @property
    def words(self) -> str:
        return self.drafter.words

    def build(self, target: LoadedTarget) -> Proposer:
        sampler = _WatchedSampler(target.sampler)
        proposer = self.drafter.build(replace(target, sampler=sampler))
        return _WatchedProposer(proposer, sampler, target.model, self.overlaps)


class _WatchedSampler(Sampler):
    """The target's sampler for the drafter; keeps the distributions that drafts were drawn from."""

    def __init__(self, sampler: Sampler) -> None:
        super().__init__(sampler.vocab_size)
        self._sampler = sampler
        self.drawn: dict[tuple[NoiseStream, int], tuple[npt.NDArray[np.float32], float]] = {}
        """Logits [vocab_size] and temperature, by sequence and position."""

    def draw(self, logits: Tensor, states: Sequence[SamplingState]) -> tuple[Tensor, dict[int, str]]:
        for row, state in zip(logits.cpu().numpy(), states, strict=True):
            # a later draw there is another choice, from the tokens left by the first
            self.drawn.setdefault((state.stream, state.position), (row.copy(), state.rules.params.temperature))
        return self._sampler.draw(logits, states)


class _WatchedProposer:
    """Wrapper of a proposer that passes every call on."""

    def __init__(
        self, proposer: Proposer, sampler: _WatchedSampler, model: DecoderModel, overlaps: list[Overlap]
    ) -> None:
        self._proposer = proposer
        self._watcher = proposer if isinstance(proposer, FeatureObserver) else None
        self._sampler = sampler
        self._model = model
        self._overlaps = overlaps
        self._streams: dict[int, NoiseStream] = {}
        """Noise streams of the rows that drafts were requested for in this step."""

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return () if self._watcher is None else self._watcher.feature_layers

    def needs_step(self, reads_prompts: bool) -> bool:
        """Return True, since it compares every step."""
        return True

    def propose(self, requests: Sequence[DraftRequest]) -> list[Drafts]:
        self._streams = {request.row: request.sampling.stream for request in requests}
        return self._proposer.propose(requests)

    def observe(self, step: TargetStep) -> None:
        for read in step.spans:
            if read.row in self._streams:
                self._compare(step, read)
        self._streams = {}
        self._sampler.drawn.clear()
        if self._watcher is not None:
            self._watcher.observe(step)

    def forget(self, row: int, num_tokens: int) -> None:
        self._proposer.forget(row, num_tokens)

    def _compare(self, step: TargetStep, read: ComputedSpan) -> None:
        """Compare the drafts after the tokens that were finally read: the accepted ones, and the first rejected one."""
        stream = self._streams[read.row]
        logits = self._model.compute_logits(step.hidden[read.first : read.first + read.num_tokens]).cpu().numpy()
        for position, row in enumerate(logits, read.begin + 1):
            if (stream, position) in self._sampler.drawn:
                guessed, temperature = self._sampler.drawn[stream, position]
                self._overlaps.append(overlap(probabilities(row, temperature), probabilities(guessed, temperature)))
