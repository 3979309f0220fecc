"""Floors and predictions of times, and the frontier of throughput and latency. Pure: no clock, no tensor.

Floors follow from operations and bytes (cost/step_cost.py), predictions from measured steps.

    TTFT   the prompt's chunks one after the other, each the longer of its arithmetic and its bytes
    TPOT   one step of B requests with c tokens of context each
    rate   B / TPOT                     cost of a million tokens   price of an hour / (3600 x rate) x 10^6

A floor is a time that no schedule beats on a machine of such rates. Activations and the engine's own time are excluded.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from twostroke.cost.price import cost_per_million_tokens
from twostroke.cost.step_cost import Layers, MachineLimits, ModelShape, Share, step_cost
from twostroke.cost.step_model import PredictsSteps

Shares = tuple[Share, ...]


@dataclass(frozen=True, slots=True)
class TTFTPoint:
    """Time to first token of a prompt that has the machine to itself."""

    num_prompt_tokens: int
    floor_s: float
    predicted_s: float | None
    """Predicted seconds; None: steps were not measured."""
    bound: Literal["compute", "memory"]
    """Resource that limits most of the time."""

    @property
    def tokens_per_s(self) -> float:
        """Prefill rate: predicted, or else the highest possible."""
        return self.num_prompt_tokens / (self.floor_s if self.predicted_s is None else self.predicted_s)


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """Step time and throughput of a number of requests that decode together."""

    batch: int
    tpot_floor_s: float
    tpot_predicted_s: float | None
    bound: Literal["compute", "memory"]
    cost_per_million_tokens: float | None
    """Price of output tokens; without a prediction it is a floor. None: no price is known."""
    distinct_experts: float = 0.0
    """Experts of a layer that the step is expected to read, in the mean of layers that have any."""

    @property
    def tokens_per_s_ceiling(self) -> float:
        """Highest possible rate of all requests together."""
        return self.batch / self.tpot_floor_s

    @property
    def tokens_per_s_predicted(self) -> float | None:
        """Predicted rate of all requests together."""
        return None if self.tpot_predicted_s is None else self.batch / self.tpot_predicted_s


@dataclass(frozen=True, slots=True)
class VerifyPoint:
    """A decode step that verifies drafts."""

    num_drafts: int
    """Drafts of each request."""
    intensity: float
    """Operations per byte."""
    bound: Literal["compute", "memory"]
    floor_s: float
    """Least seconds of the step, however many drafts are accepted."""
    least_tpot_s: float
    """Floor per token if all drafts are accepted."""


@dataclass(frozen=True, slots=True)
class Predictor:
    """Floors and predictions for a model on a machine."""

    shape: ModelShape
    machine: MachineLimits
    steps: PredictsSteps | None = None
    """Step times fitted to this machine; None: floors only."""
    num_drafts: int = 0
    """Drafts of each request that a decode step verifies, all accepted: the most that speculation can bring."""

    def ttft(self, num_prompt_tokens: int, tokens_per_step: int) -> TTFTPoint:
        """Return the time to first token of a prompt.

        Args:
            num_prompt_tokens: prompt tokens, none of them cached.
            tokens_per_step: tokens of the largest chunk.
        """
        chunks = [(share,) for share in chunks_of(num_prompt_tokens, tokens_per_step)]
        costs = [step_cost(self.shape, chunk, self.machine) for chunk in chunks]
        floor_s = sum(cost.seconds for cost in costs)
        computing_s = sum(cost.seconds for cost in costs if cost.bound == "compute")
        bound = "compute" if 2 * computing_s >= floor_s else "memory"
        return TTFTPoint(num_prompt_tokens, floor_s, self._predicted_s(chunks), bound)

    def tpot(self, batch: int, context: int, price_per_hour: float | None = None) -> FrontierPoint:
        """Return the frontier point of a number of requests.

        Args:
            batch: number of requests.
            context: computed tokens of each request.
            price_per_hour: price of the machine.
        """
        tokens = 1 + self.num_drafts
        shares = (Share(context, tokens, tokens),) * batch
        cost = step_cost(self.shape, shares, self.machine)
        floor_s, predicted_s = cost.seconds / tokens, self._predicted_s([shares])
        if predicted_s is not None:
            predicted_s /= tokens
        seconds = floor_s if predicted_s is None else predicted_s
        price = None if price_per_hour is None else cost_per_million_tokens(price_per_hour, batch / seconds)
        experts = self.shape.distinct_experts(batch * tokens)
        return FrontierPoint(batch, floor_s, predicted_s, cost.bound, price, experts)

    def verification(self, batch: int, context: int, most_drafts: int) -> tuple[VerifyPoint, ...]:
        """Return the arithmetic intensity of a decode step with 0, 1, 2 ... drafts of each request.

        Args:
            batch: number of requests in the step.
            context: computed tokens of each request.
            most_drafts: largest number of drafts of each request.
        """
        points: list[VerifyPoint] = []
        for k in range(most_drafts + 1):
            cost = step_cost(self.shape, (Share(context, k + 1, k + 1),) * batch, self.machine)
            points.append(VerifyPoint(k, cost.intensity, cost.bound, cost.seconds, cost.seconds / (k + 1)))
        return tuple(points)

    def frontier(self, most: int, context: int, price_per_hour: float | None = None) -> tuple[FrontierPoint, ...]:
        """Return the points of one request, two, four ... up to `most`."""
        return tuple(self.tpot(batch, context, price_per_hour) for batch in batches_up_to(most))

    def _predicted_s(self, steps: Iterable[Shares]) -> float | None:
        if self.steps is None:
            return None
        layers, predict = Layers(self.shape.windows), self.steps
        return sum(predict.seconds(layers.work(shares)) for shares in steps)


def chunks_of(num_prompt_tokens: int, tokens_per_step: int) -> list[Share]:
    """Return a prompt's chunks, one per step; the last one gives the first token.

    >>> [(share.num_computed_tokens, share.num_scheduled_tokens, share.num_logits_rows) for share in chunks_of(5, 2)]
    [(0, 2, 0), (2, 2, 0), (4, 1, 1)]
    """
    starts = range(0, num_prompt_tokens, tokens_per_step)
    ends = [min(start + tokens_per_step, num_prompt_tokens) for start in starts]
    return [Share(start, end - start, int(end == num_prompt_tokens)) for start, end in zip(starts, ends, strict=True)]


def batches_up_to(most: int) -> tuple[int, ...]:
    """Return the powers of two up to `most`, and `most` itself.

    >>> batches_up_to(6), batches_up_to(0)
    ((1, 2, 4, 6), ())
    """
    return tuple(sorted({1 << i for i in range(most.bit_length())} | {most})) if most > 0 else ()
