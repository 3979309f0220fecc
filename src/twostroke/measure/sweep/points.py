"""Measured points of a sweep: the time of a prompt or of a decode step, compared with its floor.

Also TTFT as a polynomial of the prompt's length: fixed cost, cost per token, cost per pair of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from twostroke.cost.step_cost import MachineLimits, StepCost
from twostroke.errors import InvalidParameter
from twostroke.events import MeasurementBegan, StepScheduled
from twostroke.measure.model_engine import ModelEngine
from twostroke.measure.report import median
from twostroke.measure.workload import SMALL_VOCAB_SIZE, workload_of_lengths


@dataclass(frozen=True, slots=True)
class PrefillPoint:
    """Prompt that runs alone."""

    prompt_length: int
    ttft_s: float
    cost: tuple[StepCost, ...]
    """Cost of each of its steps."""

    def floor_s(self, machine: MachineLimits) -> float:
        """Return the least seconds that the machine's limits allow."""
        return sum(machine.floor_s(cost) for cost in self.cost)

    def raised(self, machine: MachineLimits) -> MachineLimits:
        """Return limits raised so that the prompt is not faster than its floor."""
        if self.floor_s(machine) <= self.ttft_s:
            return machine
        # only the time of all steps together is known: raise both rates alike
        factor = self.floor_s(machine) / self.ttft_s
        rates = machine.flops_per_s * factor, machine.bytes_per_s * factor
        return MachineLimits(*rates, machine.is_estimate)

    @property
    def tok_s(self) -> float:
        """Prompt tokens per second."""
        return self.prompt_length / self.ttft_s


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """Requests that decode together."""

    num_requests: int
    context: int
    """Prompt tokens of each request."""
    tpot_s: float
    """Seconds of a step, which gives each request a token."""
    cost: StepCost
    """Cost of the middle step."""

    def floor_s(self, machine: MachineLimits) -> float:
        """Return the least seconds that the machine's limits allow."""
        return machine.floor_s(self.cost)

    @property
    def tok_s(self) -> float:
        """Output tokens per second of all requests together."""
        return self.num_requests / self.tpot_s


def measure_prefill(engine: ModelEngine, prompt_length: int, repeats: int, progress: str) -> PrefillPoint:
    """Return the median TTFT of a prompt that runs alone."""
    times: list[float] = []
    for repeat in range(repeats):
        workload = workload_of_lengths([(prompt_length, 1)], vocab_size=SMALL_VOCAB_SIZE, seed=repeat)
        times.append(engine.run(workload, progress=progress).requests[0].times.ttft_s)
    return PrefillPoint(prompt_length, median(times), tuple(step.cost for step in _steps(engine) if step.cost))


def output_length(num_requests: int, context: int, steps: int, budget: int) -> int:
    """Return the output length that leaves `steps` steps in which all requests decode.

    Prompts are prefilled in chunks of `budget` tokens, and the first request already decodes in each of these steps.

    >>> output_length(1, 128, steps=8, budget=512), output_length(8, 128, steps=8, budget=512)
    (10, 11)
    """
    return 1 + steps + -(-num_requests * context // budget)


def measure_decode(
    engine: ModelEngine, num_requests: int, context: int, num_outputs: int, progress: str
) -> DecodePoint:
    """Return the median time of the steps in which all requests decode and nothing is prefilled.

    Args:
        engine: an idle engine.
        num_requests: number of concurrent requests.
        context: prompt tokens of each.
        num_outputs: see `output_length`.
        progress: title of a progress bar.
    """
    run = engine.run(
        workload_of_lengths([(context, num_outputs)] * num_requests, vocab_size=SMALL_VOCAB_SIZE), progress=progress
    )
    seconds = [step.wall_s for step in run.decode_steps(num_requests)]
    costs = [
        step.cost
        for step in _steps(engine)
        if step.batch.num_decode_tokens == num_requests and not step.batch.num_prefill_tokens and step.cost
    ]
    assert seconds, f"{num_requests} requests of {context} tokens never decode together in {num_outputs} steps"
    return DecodePoint(num_requests, context, median(seconds), costs[len(costs) // 2])


def _steps(engine: ModelEngine) -> list[StepScheduled]:
    """Return the steps of the last run, with the costs that the journal computed."""
    steps: list[StepScheduled] = []
    for event in engine.engine.recent_events:
        if isinstance(event, MeasurementBegan):
            steps.clear()
        elif isinstance(event, StepScheduled) and not event.batch.is_empty:
            steps.append(event)
    return steps


@dataclass(frozen=True, slots=True)
class QuadraticFit:
    """Curve y = a + b n + c n^2 by least squares: b comes from linear layers, c from attention, a from a step's fixed
    cost."""

    a: float
    b: float
    c: float
    r_squared: float
    """Share of y's variance that the curve explains; 1 is all."""
    residuals: tuple[float, ...]
    """Measured minus fitted values, in the order given."""

    def at(self, n: float) -> float:
        """Return the curve's value."""
        return self.a + self.b * n + self.c * n * n


def fit_quadratic(lengths: Sequence[float], values: Sequence[float]) -> QuadraticFit:
    """Fit a curve to (length, value) pairs.

    Args:
        lengths: at least three different lengths.
        values: one value per length.

    Raises:
        InvalidParameter: there are fewer than three different lengths, which do not determine a parabola.

    >>> fit = fit_quadratic([0, 1, 2, 3], [1.0, 3.5, 7.0, 11.5])
    >>> round(fit.a, 6), round(fit.b, 6), round(fit.c, 6), round(fit.r_squared, 6)
    (1.0, 2.0, 0.5, 1.0)
    """
    if len(set(lengths)) < 3:
        raise InvalidParameter("prompt_lengths", list(lengths), "must be three different lengths or more")
    n, y = np.asarray(lengths, np.float64), np.asarray(values, np.float64)
    largest = max(float(np.abs(n).max()), 1.0)
    x = n / largest  # powers of large lengths would cost the solver precision
    scaled, *_ = np.linalg.lstsq(np.stack([np.ones_like(x), x, x * x], axis=1), y, rcond=None)
    a, b, c = (float(value) for value in scaled / (1.0, largest, largest * largest))
    residuals = y - (a + b * n + c * n * n)
    spread = float(((y - y.mean()) ** 2).sum())
    r_squared = 1.0 - float((residuals**2).sum()) / spread if spread else 1.0
    return QuadraticFit(a, b, c, r_squared, tuple(float(value) for value in residuals))
