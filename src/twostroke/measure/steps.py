"""Steps of all sizes through the real engine, timed: what the step-time model is fitted to.

chunks      one prompt at a time, of 16, 32, … tokens up to the budget: a pass of the first stroke
staircase   many requests decode, fewer and fewer: each height of the batch for some steps
                64 ▇▇▇
                48    ▇▇▇
                32       ▇▇▇  …  1
long        the same, fewer and with long prompts: chunks that see much before them, decodes that read much
mixed       prompts that come while others decode: both strokes in one pass
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from tqdm.auto import tqdm

from twostroke.config.cache import CacheConfig
from twostroke.config.load import LoadConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.cost.step_cost import Layers, MachineLimits
from twostroke.cost.step_fit import TimedStep
from twostroke.cost.step_model import UNKNOWN_TIMES, knots
from twostroke.kv_cache.layout import KVLayout
from twostroke.measure.model_engine import model_engine
from twostroke.measure.workload import SOME_TOKENS, Workload, of_lengths, with_arrivals
from twostroke.model.model_files import find_model_of
from twostroke.scheduler.replay import layers_of
from twostroke.simulation.observed import ObservedSteps

_SHORT = 32
"""Tokens of a prompt whose context counts little."""
_HEIGHTS = (64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1)
_LONG_HEIGHTS = (4, 2, 1)
_A_MOMENT_S = 1e-3
"""Shorter than a step, longer than it takes to look who has arrived."""


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """What was timed, and on what."""

    steps: tuple[TimedStep, ...]
    layers: Layers
    limits: MachineLimits | None


def measure_steps(
    load: LoadConfig,
    scheduler: SchedulerConfig,
    cache: CacheConfig,
    *,
    longest: int = 1024,
    repeats: int = 10,
    progress: bool = False,
) -> MeasuredSteps:
    """Loads the model and times its steps.

    Args:
        load: which model, and how.
        scheduler: its budget is the largest chunk, its slots the highest batch.
        cache: format and block size of the KV cache; nothing is reused here, and it is only as large as need be.
        longest: tokens of a long prompt, cut to what the model takes.
        repeats: steps at each height of a staircase.
        progress: show what is being measured.

    Raises:
        SetupError: the model cannot be loaded.
    """
    model = find_model_of(load).config()
    most = min(load.max_model_len or model.max_context, model.max_context)
    sizes = _Sizes.of(most, scheduler, longest, repeats)
    layout = KVLayout.of(model.kv_specs, block_size=cache.block_size, kv_format="bf16")  # for its groups alone
    num_blocks = sum(sizes.num_tokens // layout.tokens_per_block(g) + sizes.heights[0] for g in layout.groups)
    cache = replace(
        cache, enable_prefix_caching=False, num_kv_blocks=num_blocks, kv_cache_memory=None, gpu_memory_utilization=None
    )
    load = replace(load, max_model_len=sizes.longest_request)
    scheduler = replace(scheduler, max_num_seqs=sizes.heights[0], max_num_batched_tokens=sizes.budget)
    observed = ObservedSteps()
    steps: list[TimedStep] = []
    with closing(model_engine(load, scheduler, cache, [observed], step_times=UNKNOWN_TIMES)) as engine:
        engine.run(of_lengths([(sizes.short, 2)] * 2, vocab_size=SOME_TOKENS))  # warms up
        observed.take()
        for workload in tqdm(list(_workloads(sizes)), desc="steps", leave=False, disable=not progress):
            engine.run(workload)
            steps += observed.take()
    assert observed.started is not None, "an engine says first that it has started"
    return MeasuredSteps(tuple(steps), layers_of(observed.started), observed.started.machine)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """How large everything is, so that it fits into the context."""

    heights: tuple[int, ...]
    """Of the batch, stair by stair."""
    repeats: int
    """Steps of a stair."""
    short: int
    """Tokens of a prompt."""
    longest: int
    """Of a long one; the longest of all is twice that."""
    budget: int

    @classmethod
    def of(cls, most: int, scheduler: SchedulerConfig, longest: int, repeats: int) -> _Sizes:
        """For requests of at most `most` tokens."""
        short = max(1, min(_SHORT, most // 2))
        room = max(1, most - short - 1)  # outputs behind the first
        heights = tuple(h for h in _HEIGHTS if h <= scheduler.max_num_seqs)[-room:]
        repeats = max(1, min(repeats, room // len(heights)))
        longest = max(1, min(longest, (most - 1 - repeats * len(_LONG_HEIGHTS)) // 2))
        budget = min(scheduler.max_num_batched_tokens, 2 * longest)
        return cls(heights=heights, repeats=repeats, short=short, longest=longest, budget=budget)

    @property
    def longest_request(self) -> int:
        """Tokens."""
        stairs = 1 + self.repeats * len(self.heights)
        long_stairs = 1 + self.repeats * len(_LONG_HEIGHTS)
        return max(
            self.short + stairs, 2 * self.longest + 1 + self.repeats, self.longest + long_stairs, self.budget + 1
        )

    @property
    def num_tokens(self) -> int:
        """That are in KV memory at once, at most."""
        stairs = self.heights[0] * (self.short + 1 + self.repeats * len(self.heights))
        return max(stairs, _LONG_HEIGHTS[0] * (self.longest + 1 + 3 * self.repeats), self.longest_request)


def _workloads(sizes: _Sizes) -> Iterator[Workload]:
    chunks = [size for size in knots(sizes.budget) if size >= 16]
    for _ in range(2):
        for size in chunks:
            yield of_lengths([(size, 1)], vocab_size=SOME_TOKENS)
    yield _staircase(sizes.heights, sizes.short, sizes.repeats)
    yield _staircase([h for h in _LONG_HEIGHTS if h <= sizes.heights[0]], sizes.longest, sizes.repeats)
    yield _staircase([1], 2 * sizes.longest, sizes.repeats)
    num_decodes = min(4, sizes.heights[0] - 1)
    for size in chunks:
        yield _mixed(num_decodes, sizes.short, size)


def _staircase(heights: Sequence[int], num_prompt_tokens: int, repeats: int) -> Workload:
    """Request by request, as many outputs as leave each height `repeats` steps."""
    lengths: list[tuple[int, int]] = []
    for stair, height in enumerate(heights, start=1):
        lower = heights[stair] if stair < len(heights) else 0
        lengths += [(num_prompt_tokens, 1 + stair * repeats)] * (height - lower)
    return of_lengths(lengths, vocab_size=SOME_TOKENS)


def _mixed(num_decodes: int, short: int, size: int) -> Workload:
    """Some prompts, and one that arrives while their step runs: it is computed beside their first decode."""
    workload = of_lengths([(short, 3)] * num_decodes + [(size, 1)], vocab_size=SOME_TOKENS)
    return with_arrivals(workload, [0.0] * num_decodes + [_A_MOMENT_S])
