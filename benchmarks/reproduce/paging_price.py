"""The price of paging: time of a decode step over scattered KV blocks, beside KV that lies in one piece.

    scattered    blocks of 16 tokens from a pool that concurrently growing requests have mixed
    in order     the same blocks, one contiguous run per request (--kv-reservation contiguous)
    contiguous   runs of blocks of 128 tokens, the span that attention reads at a time: no indirection inside

The work and the tokens are the same. How scattered the blocks are is counted from the block tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from benchmarks.reproduce.claim import Claim, ReproduceOptions, Reproduction
from twostroke.batch import ScheduledBatch
from twostroke.config.cache import MAX_BLOCK_SIZE, CacheConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.measure.figure import MEASURED, PREDICTED, bar_chart
from twostroke.measure.model_engine import ModelEngine, model_engine
from twostroke.measure.report import median
from twostroke.measure.workload import Workload, of_lengths

BLOCK_SIZE = 16
CASES = ((1, 128), (1, 512), (1, 2048), (8, 128), (8, 512), (8, 2048), (32, 128), (32, 512))
"""Pairs of (number of requests, context tokens of each)."""
LAYOUTS = ("scattered", "in order", "contiguous")
FEWEST_APART = 0.5
"""Least share of neighbours in a block table that lie apart, for blocks that count as scattered."""


@dataclass(slots=True)
class TableWatch:
    """The block tables of the first KV group, followed through the batches."""

    tables: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    """Block table by request."""

    def __call__(self, batch: ScheduledBatch) -> None:
        """Update the tables from a batch."""
        for request in batch.requests:
            if not request.block_tables or not request.block_tables[0].block_ids:
                continue
            update = request.block_tables[0]
            table = self.tables.setdefault(request.request_id, [])
            table[update.start :] = update.block_ids

    def take_share_apart(self) -> float:
        """Return the share of neighbours in all tables that are not consecutive blocks, and forget the tables.

        0 where no table has two blocks.
        """
        steps = [later - earlier for table in self.tables.values() for earlier, later in pairwise(table)]
        self.tables.clear()
        return sum(step != 1 for step in steps) / len(steps) if steps else 0.0


@dataclass(frozen=True, slots=True)
class PagedCase:
    """One batch size and context: medians of rounds that ran in turn."""

    step_s: Mapping[str, Sequence[float]]
    """Seconds of whole engine steps by layout, one per round."""
    operator_s: Mapping[str, Sequence[float]]
    """Seconds of `step_s` that the model's operators take, by layout."""
    apart: Mapping[str, float]
    """Share of neighbouring blocks that lie apart, by layout."""

    def price(self, layout: str, *, operators_only: bool = False) -> float:
        """Return how many times as long a step over scattered blocks takes: the median of the rounds' ratios."""
        times = self.operator_s if operators_only else self.step_s
        return median([a / b for a, b in zip(times["scattered"], times[layout], strict=True)])


def reproduce(options: ReproduceOptions) -> Reproduction:
    """Run every case on all layouts in turn."""
    rounds, steps = (4, 32) if options.full else (2, 4)
    cases = CASES if options.full else ((1, 64), (4, 128))
    watches = {layout: TableWatch() for layout in LAYOUTS}
    with ExitStack() as open_ones:
        engines = {
            layout: open_ones.enter_context(closing(_engine(options, layout, cases, steps, watches[layout])))
            for layout in LAYOUTS
        }
        engines["scattered"].run(_mixing(cases, options.seed), progress="paging price, mixing the pool")
        measured = {case: _measure(case, engines, watches, rounds, steps) for case in cases}
    return Reproduction(
        claims=tuple(claims_of(measured)),
        config={"model": options.model_name, "block_size": BLOCK_SIZE, "contiguous_block_size": MAX_BLOCK_SIZE},
        workload={"requests and context": cases, "steps": steps, "seed": options.seed},
        details={
            _name(case): {
                "step_ms": _in_ms(found.step_s),
                "operator_ms": _in_ms(found.operator_s),
                "neighbouring_blocks_apart": found.apart,
            }
            for case, found in measured.items()
        },
        draw=bar_chart(
            [_name(case) for case in measured],
            {
                "over blocks in order": ([found.price("in order") for found in measured.values()], PREDICTED),
                "over contiguous KV": ([found.price("contiguous") for found in measured.values()], MEASURED),
            },
            "step over scattered blocks, times as long",
            "requests x context",
            lines=(1.0,),
        ),
        figure_size=(9.0, 4.0),
        warmup=1,
        repeats=rounds,
    )


def claims_of(measured: Mapping[tuple[int, int], PagedCase]) -> Iterator[Claim]:
    """Report the ratios; claim only that each layout is as its name says."""
    for case, found in measured.items():
        name = _name(case)
        yield Claim.at_least(f"{name}: scattered blocks that lie apart, share", FEWEST_APART, found.apart["scattered"])
        yield Claim.at_most(f"{name}: blocks in order that lie apart, share", 0.0, found.apart["in order"])
        yield Claim.reported(f"{name}: step, scattered / in order", found.price("in order"))
        yield Claim.reported(f"{name}: step, scattered / contiguous", found.price("contiguous"))
        price = found.price("contiguous", operators_only=True)
        yield Claim.reported(f"{name}: operators alone, scattered / contiguous", price)


def _engine(
    options: ReproduceOptions, layout: str, cases: Sequence[tuple[int, int]], steps: int, watch: TableWatch
) -> ModelEngine:
    """Return an engine with room for every case."""
    longest = max(context for _, context in cases) + steps + 2
    most = max(batch for batch, _ in cases)
    # a budget that takes all prompts at once, so that every other step is decode only
    budget = max(batch * context for batch, context in cases)
    scheduler = SchedulerConfig(max_num_seqs=most, max_num_batched_tokens=max(budget, longest))
    cache = CacheConfig(
        block_size=MAX_BLOCK_SIZE if layout == "contiguous" else BLOCK_SIZE,
        kv_reservation="paged" if layout == "scattered" else "contiguous",
        enable_prefix_caching=False,
    )
    return model_engine(options.load(longest), scheduler, cache, at_submit=watch)


def _mixing(cases: Sequence[tuple[int, int]], seed: int) -> Workload:
    """Return requests that grow concurrently, a block at a time, until they hold as many blocks as the largest case.

    Their blocks interleave in the pool, and are freed in that order.
    """
    dice = np.random.default_rng((seed, 1))
    most, longest = max(batch for batch, _ in cases), max(context for _, context in cases)
    tokens_each = -(-max(batch * context for batch, context in cases) // most)
    outputs = dice.integers(3 * tokens_each // 4, 5 * tokens_each // 4, most)
    lengths = [(BLOCK_SIZE, min(int(output), longest - BLOCK_SIZE)) for output in outputs]
    return of_lengths(lengths, vocab_size=_SOME_TOKENS, seed=seed)


_SOME_TOKENS = 128
"""Token ids that every vocabulary has; step time does not depend on the ids."""


def _measure(
    case: tuple[int, int],
    engines: Mapping[str, ModelEngine],
    watches: Mapping[str, TableWatch],
    rounds: int,
    steps: int,
) -> PagedCase:
    batch, context = case
    workload = of_lengths([(context, steps + 1)] * batch, vocab_size=_SOME_TOKENS)
    step_s: dict[str, list[float]] = {layout: [] for layout in engines}
    operator_s: dict[str, list[float]] = {layout: [] for layout in engines}
    apart: dict[str, float] = {}
    for number in range(rounds + 1):
        for layout, engine in engines.items():
            watches[layout].tables.clear()
            run = engine.run(workload, progress=f"paging price, {_name(case)}, {layout}")
            apart[layout] = round(watches[layout].take_share_apart(), 4)
            if number:  # the first round warms up
                step_s[layout].append(median([s.wall_s for s in run.decode_steps(batch)]))
                operator_s[layout].append(median([s.operator_s for s in run.decode_steps(batch)]))
    return PagedCase(step_s, operator_s, apart)


def _name(case: tuple[int, int]) -> str:
    return f"{case[0]} x {case[1]}"


def _in_ms(times_s: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    return {layout: [round(1e3 * value, 4) for value in of] for layout, of in times_s.items()}
