"""One engine at one point: the time of a prompt, or of a step that only decodes, beside the least it could take.

And TTFT as a polynomial of the prompt's length: what is fixed, what each token costs, what each pair of tokens costs.
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
from twostroke.measure.workload import SOME_TOKENS, of_lengths


@dataclass(frozen=True, slots=True)
class PrefillPoint:
    """A prompt, alone."""

    prompt_length: int
    ttft_s: float
    cost: tuple[StepCost, ...]
    """Of each step that read it."""

    def floor_s(self, machine: MachineLimits) -> float:
        """The least that the machine's limits allow."""
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
    """Prompt tokens of each."""
    tpot_s: float
    """Time of a step, which brings each of them a token."""
    cost: StepCost
    """Of the step in the middle."""

    def floor_s(self, machine: MachineLimits) -> float:
        """The least that the machine's limits allow."""
        return machine.floor_s(self.cost)

    @property
    def tok_s(self) -> float:
        """Output tokens per second of all of them."""
        return self.num_requests / self.tpot_s


def measure_prefill(engine: ModelEngine, prompt_length: int, repeats: int, progress: str) -> PrefillPoint:
    """Median TTFT of a prompt that has the engine to itself."""
    times: list[float] = []
    for repeat in range(repeats):
        workload = of_lengths([(prompt_length, 1)], vocab_size=SOME_TOKENS, seed=repeat)
        times.append(engine.run(workload, progress=progress).requests[0].times.ttft_s)
    return PrefillPoint(prompt_length, median(times), tuple(step.cost for step in _steps(engine) if step.cost))


def output_length(num_requests: int, context: int, steps: int, budget: int) -> int:
    """Output tokens that leave `steps` steps in which all of them decode.

    The prompts are read in chunks of `budget` tokens, and who was read first has made a token in each of these steps.

    >>> output_length(1, 128, steps=8, budget=512), output_length(8, 128, steps=8, budget=512)
    (10, 11)
    """
    return 1 + steps + -(-num_requests * context // budget)


def measure_decode(
    engine: ModelEngine, num_requests: int, context: int, num_outputs: int, progress: str
) -> DecodePoint:
    """Median time of the steps in which all of them decode and nothing else happens.

    Args:
        engine: must be idle.
        num_requests: at once.
        context: prompt tokens of each.
        num_outputs: see `output_length`.
        progress: title of a progress bar.
    """
    run = engine.run(of_lengths([(context, num_outputs)] * num_requests, vocab_size=SOME_TOKENS), progress=progress)
    seconds = [step.wall_s for step in run.decode_steps(num_requests)]
    costs = [
        step.cost
        for step in _steps(engine)
        if step.batch.num_decode_tokens == num_requests and not step.batch.num_prefill_tokens and step.cost
    ]
    assert seconds, f"{num_requests} requests of {context} tokens never decode together in {num_outputs} steps"
    return DecodePoint(num_requests, context, median(seconds), costs[len(costs) // 2])


def _steps(engine: ModelEngine) -> list[StepScheduled]:
    """Of the last run, as the journal costed them."""
    steps: list[StepScheduled] = []
    for event in engine.engine.recent_events:
        if isinstance(event, MeasurementBegan):
            steps.clear()
        elif isinstance(event, StepScheduled) and not event.batch.is_empty:
            steps.append(event)
    return steps


@dataclass(frozen=True, slots=True)
class QuadraticFit:
    """y = a + b n + c n^2, least squares: linear layers make b, attention makes c, a step's fixed cost makes a."""

    a: float
    b: float
    c: float
    r_squared: float
    """Share of y's variance that the curve explains; 1 is all."""
    residuals: tuple[float, ...]
    """Measured less fitted, in the order given."""

    def at(self, n: float) -> float:
        """The curve."""
        return self.a + self.b * n + self.c * n * n


def fit_quadratic(lengths: Sequence[float], values: Sequence[float]) -> QuadraticFit:
    """Fits a curve to (length, value) pairs.

    Args:
        lengths: at least three different ones.
        values: as many.

    Raises:
        InvalidParameter: fewer than three different lengths, which no parabola is determined by.

    >>> fit = fit_quadratic([0, 1, 2, 3], [1.0, 3.5, 7.0, 11.5])
    >>> round(fit.a, 6), round(fit.b, 6), round(fit.c, 6), round(fit.r_squared, 6)
    (1.0, 2.0, 0.5, 1.0)
    """
    if len(set(lengths)) < 3:
        raise InvalidParameter("prompt_lengths", list(lengths), "must be three different lengths or more")
    n, y = np.asarray(lengths, np.float64), np.asarray(values, np.float64)
    largest = max(float(np.abs(n).max()), 1.0)
    x = n / largest  # powers of thousands would leave the solver few digits
    scaled, *_ = np.linalg.lstsq(np.stack([np.ones_like(x), x, x * x], axis=1), y, rcond=None)
    a, b, c = (float(value) for value in scaled / (1.0, largest, largest * largest))
    residuals = y - (a + b * n + c * n * n)
    spread = float(((y - y.mean()) ** 2).sum())
    r_squared = 1.0 - float((residuals**2).sum()) / spread if spread else 1.0
    return QuadraticFit(a, b, c, r_squared, tuple(float(value) for value in residuals))
