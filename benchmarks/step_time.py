"""How long a step takes, by live rows and context: measured in the same run that is then predicted from it."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace

from twostroke.config.cache import CacheConfig
from twostroke.config.load import LoadConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.measure.model_engine import ModelEngine, model_engine
from twostroke.measure.report import median
from twostroke.measure.workload import of_lengths

_SOME_TOKENS = 128
"""Ids that every vocabulary has; which ones does not matter for time."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """A grid of measured step times, linear in between."""

    rows: tuple[int, ...]
    contexts: tuple[float, ...]
    seconds: tuple[tuple[float, ...], ...]
    """[rows][contexts]"""

    def at(self, live: int, context: float) -> float:
        """Seconds of a step with `live` decoding requests of `context` tokens on average.

        >>> StepTimes((1, 3), (0.0, 10.0), ((1.0, 2.0), (3.0, 4.0))).at(2, 5.0)
        2.5
        """
        by_context = [_linear(self.contexts, per_row, context) for per_row in self.seconds]
        return _linear(self.rows, by_context, live)


def _linear(places: Sequence[float], values: Sequence[float], at: float) -> float:
    """Linear between the two nearest places, and beyond the last ones."""
    if len(places) == 1:
        return values[0]
    right = min(max(bisect.bisect_left(places, at), 1), len(places) - 1)
    low, high = places[right - 1], places[right]
    return values[right - 1] + (values[right] - values[right - 1]) * (at - low) / (high - low)


def measure_step_times(
    load: LoadConfig, *, rows: Sequence[int], contexts: Sequence[int], steps: int, progress: bool = True
) -> StepTimes:
    """Measures decode steps only.

    Args:
        load: which model; its context is cut to what is measured.
        rows: numbers of live requests to measure at.
        contexts: prompt lengths to measure at, in tokens.
        steps: steps at each point; their median counts.
        progress: show what is being measured.
    """
    load = replace(load, max_model_len=max(contexts) + steps + 2)
    # a budget that takes all prompts at once, so that every other step is decode only
    scheduler = SchedulerConfig(max_num_seqs=max(rows), max_num_batched_tokens=max(rows) * max(contexts))
    engine = model_engine(load, scheduler, CacheConfig(enable_prefix_caching=False))
    _point(engine, max(rows), contexts[0], steps=4)  # warm-up
    title = "step times" if progress else None
    seconds = tuple(tuple(_point(engine, n, c, steps, title) for c in contexts) for n in rows)
    engine.close()
    # the first decode step of a prompt of c tokens sees c + 1, the last one c + steps
    return StepTimes(tuple(rows), tuple(c + (steps + 1) / 2 for c in contexts), seconds)


def _point(engine: ModelEngine, rows: int, context: int, steps: int, progress: str | None = None) -> float:
    workload = of_lengths([(context, steps + 1)] * rows, vocab_size=_SOME_TOKENS)
    run = engine.run(workload, progress=progress and f"{progress}, {rows} rows, context {context}")
    return median([s.wall_s for s in run.steps if s.num_decode_tokens == rows and not s.num_prefill_tokens])
