"""Timed steps of all sizes in the real engine, to which the step-time model is fitted.

chunks      one prompt at a time, of 16, 32, … tokens up to the budget: prefill passes
staircase   many requests decode, fewer and fewer: some steps at each batch size
                64 ▇▇▇
                48    ▇▇▇
                32       ▇▇▇  …  1
long        the same, with fewer requests and long prompts: chunks and decodes with a long context
mixed       prompts that arrive while other requests decode: prefill and decode in one pass
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
from twostroke.measure.workload import SMALL_VOCAB_SIZE, Workload, with_arrivals, workload_of_lengths
from twostroke.model.model_files import find_model_of
from twostroke.scheduler.replay import layers_of
from twostroke.simulation.observed import ObservedSteps

_SHORT = 32
"""Tokens of a prompt so short that its context hardly affects a step's time."""
_HEIGHTS = (64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1)
_LONG_HEIGHTS = (4, 2, 1)
_ARRIVAL_DELAY_S = 1e-3
"""Delay of an arrival: shorter than a step, longer than the engine takes to check for arrivals."""


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """Timed steps, with the model's layers and the machine's limits."""

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
    """Load the model and time its steps.

    Args:
        load: the model and how to load it.
        scheduler: its budget is the largest chunk, its slots the largest batch.
        cache: format and block size of the KV cache; no prefix is reused, and the cache is only as large as needed.
        longest: tokens of a long prompt, limited to the model's context.
        repeats: steps at each batch size of a staircase.
        progress: whether to show a progress bar.

    Raises:
        SetupError: the model cannot be loaded.
    """
    model = find_model_of(load).config()
    most = min(load.max_model_len or model.max_context, model.max_context)
    sizes = _Sizes.of(most, scheduler, longest, repeats)
    layout = KVLayout.of(model.kv_specs, block_size=cache.block_size, kv_format="bf16")  # only its groups are used
    num_blocks = sum(sizes.num_tokens // layout.tokens_per_block(g) + sizes.heights[0] for g in layout.groups)
    cache = replace(
        cache, enable_prefix_caching=False, num_kv_blocks=num_blocks, kv_cache_memory=None, gpu_memory_utilization=None
    )
    load = replace(load, max_model_len=sizes.longest_request)
    scheduler = replace(scheduler, max_num_seqs=sizes.heights[0], max_num_batched_tokens=sizes.budget)
    observed = ObservedSteps()
    steps: list[TimedStep] = []
    with closing(model_engine(load, scheduler, cache, [observed], step_times=UNKNOWN_TIMES)) as engine:
        engine.run(workload_of_lengths([(sizes.short, 2)] * 2, vocab_size=SMALL_VOCAB_SIZE))  # warms up
        observed.take()
        for workload in tqdm(list(_workloads(sizes)), desc="steps", leave=False, disable=not progress):
            engine.run(workload)
            steps += observed.take()
    assert observed.started is not None, "an engine says first that it has started"
    return MeasuredSteps(tuple(steps), layers_of(observed.started), observed.started.machine)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """Sizes of the workloads, chosen to fit into the context."""

    heights: tuple[int, ...]
    """Batch sizes of the staircase."""
    repeats: int
    """Steps at each batch size."""
    short: int
    """Tokens of a short prompt."""
    longest: int
    """Tokens of a long prompt; the longest prompt has twice as many."""
    budget: int

    @classmethod
    def of(cls, most: int, scheduler: SchedulerConfig, longest: int, repeats: int) -> _Sizes:
        """Return the sizes for requests of at most `most` tokens."""
        short = max(1, min(_SHORT, most // 2))
        room = max(1, most - short - 1)  # outputs after the first
        heights = tuple(h for h in _HEIGHTS if h <= scheduler.max_num_seqs)[-room:]
        repeats = max(1, min(repeats, room // len(heights)))
        longest = max(1, min(longest, (most - 1 - repeats * len(_LONG_HEIGHTS)) // 2))
        budget = min(scheduler.max_num_batched_tokens, 2 * longest)
        return cls(heights=heights, repeats=repeats, short=short, longest=longest, budget=budget)

    @property
    def longest_request(self) -> int:
        """Tokens of the longest request."""
        stairs = 1 + self.repeats * len(self.heights)
        long_stairs = 1 + self.repeats * len(_LONG_HEIGHTS)
        return max(
            self.short + stairs, 2 * self.longest + 1 + self.repeats, self.longest + long_stairs, self.budget + 1
        )

    @property
    def num_tokens(self) -> int:
        """Most tokens in KV memory at once."""
        stairs = self.heights[0] * (self.short + 1 + self.repeats * len(self.heights))
        return max(stairs, _LONG_HEIGHTS[0] * (self.longest + 1 + 3 * self.repeats), self.longest_request)


def _workloads(sizes: _Sizes) -> Iterator[Workload]:
    chunks = [size for size in knots(sizes.budget) if size >= 16]
    for _ in range(2):
        for size in chunks:
            yield workload_of_lengths([(size, 1)], vocab_size=SMALL_VOCAB_SIZE)
    yield _staircase(sizes.heights, sizes.short, sizes.repeats)
    yield _staircase([h for h in _LONG_HEIGHTS if h <= sizes.heights[0]], sizes.longest, sizes.repeats)
    yield _staircase([1], 2 * sizes.longest, sizes.repeats)
    num_decodes = min(4, sizes.heights[0] - 1)
    for size in chunks:
        yield _mixed(num_decodes, sizes.short, size)


def _staircase(heights: Sequence[int], num_prompt_tokens: int, repeats: int) -> Workload:
    """Return a workload whose output lengths give each batch size `repeats` steps."""
    lengths: list[tuple[int, int]] = []
    for stair, height in enumerate(heights, start=1):
        lower = heights[stair] if stair < len(heights) else 0
        lengths += [(num_prompt_tokens, 1 + stair * repeats)] * (height - lower)
    return workload_of_lengths(lengths, vocab_size=SMALL_VOCAB_SIZE)


def _mixed(num_decodes: int, short: int, size: int) -> Workload:
    """Return prompts and one more that arrives during their step, so that it is computed with their first decode."""
    workload = workload_of_lengths([(short, 3)] * num_decodes + [(size, 1)], vocab_size=SMALL_VOCAB_SIZE)
    return with_arrivals(workload, [0.0] * num_decodes + [_ARRIVAL_DELAY_S])
