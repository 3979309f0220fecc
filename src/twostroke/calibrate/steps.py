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
from dataclasses import replace

from tqdm.auto import tqdm

from twostroke.bench.model_engine import model_engine
from twostroke.bench.workload import Workload, of_lengths
from twostroke.config.cache import CacheConfig
from twostroke.config.load import LoadConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.cost.step_fit import TimedStep
from twostroke.cost.step_model import knots
from twostroke.kv_cache.layout import KVLayout
from twostroke.model.model_files import find_model
from twostroke.simulation.observed import ObservedSteps

_SHORT = 32
"""Tokens of a prompt whose context counts little."""
_HEIGHTS = (64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1)
_LONG_HEIGHTS = (8, 4, 2, 1)
_SOME_TOKENS = 128
"""Ids that every vocabulary has; which ones does not matter for time."""


def measure_steps(
    load: LoadConfig,
    scheduler: SchedulerConfig,
    cache: CacheConfig,
    *,
    longest: int = 1024,
    repeats: int = 10,
    progress: bool = False,
) -> list[TimedStep]:
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
    heights = tuple(h for h in _HEIGHTS if h <= scheduler.max_num_seqs) or (1,)
    model = find_model(load.model).config()
    most = min(load.max_model_len or model.max_context, model.max_context)
    stairs = repeats * len(heights) + 2
    longest = max(1, min(longest, (most - stairs) // 2))
    load = replace(load, max_model_len=min(most, max(2 * longest, _SHORT) + stairs))
    num_tokens = max(heights[0] * (_SHORT + stairs), _LONG_HEIGHTS[0] * (longest + stairs), 2 * longest + stairs)
    num_groups = len(
        KVLayout.of(model.layer_windows, block_size=1, num_kv_heads=1, head_dim=1, kv_format="bf16").groups
    )
    num_blocks = num_groups * (num_tokens // cache.block_size + heights[0])
    cache = replace(cache, enable_prefix_caching=False, num_kv_blocks=num_blocks, kv_cache_memory=None)
    budget = min(scheduler.max_num_batched_tokens, 2 * longest)
    observed = ObservedSteps()
    scheduler = replace(scheduler, max_num_seqs=heights[0], max_num_batched_tokens=budget)
    steps: list[TimedStep] = []
    with closing(model_engine(load, scheduler, cache, [observed])) as engine:
        engine.run(of_lengths([(_SHORT, 4)] * 2, vocab_size=_SOME_TOKENS))  # warms up
        observed.take()
        workloads = list(_workloads(heights, budget, longest, repeats))
        for workload in tqdm(workloads, desc="steps", leave=False, disable=not progress):
            engine.run(workload)
            steps += observed.take()
    return steps


def _workloads(heights: Sequence[int], budget: int, longest: int, repeats: int) -> Iterator[Workload]:
    sizes = [size for size in knots(budget) if size >= 16]
    for _ in range(3):
        for size in sizes:
            yield of_lengths([(size, 1)], vocab_size=_SOME_TOKENS)
    yield _staircase(heights, _SHORT, repeats)
    yield _staircase([h for h in _LONG_HEIGHTS if h <= heights[0]], longest, repeats)
    yield _staircase([1], 2 * longest, repeats)
    num_decodes = min(8, heights[0] - 1)
    for size in sizes:
        yield _mixed(num_decodes, size, budget)


def _staircase(heights: Sequence[int], num_prompt_tokens: int, repeats: int) -> Workload:
    """Request by request, as many outputs as leave each height `repeats` steps."""
    lengths: list[tuple[int, int]] = []
    for stair, height in enumerate(heights, start=1):
        lower = heights[stair] if stair < len(heights) else 0
        lengths += [(num_prompt_tokens, 1 + stair * repeats)] * (height - lower)
    return of_lengths(lengths, vocab_size=_SOME_TOKENS)


def _mixed(num_decodes: int, size: int, budget: int) -> Workload:
    """Prompts and the beginning of one more fill the first step; in the second the others decode beside its rest."""
    in_first = max(0, budget - num_decodes * _SHORT)
    return of_lengths([(_SHORT, 3)] * num_decodes + [(in_first + size, 1)], vocab_size=_SOME_TOKENS)
