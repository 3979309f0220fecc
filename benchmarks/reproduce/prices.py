"""Cost of paging: time of a decode step over scattered KV blocks, compared with contiguous KV.

    scattered    blocks of 16 tokens from a pool that concurrently growing requests have mixed
    in order     the same blocks, one contiguous run per request (--kv-reservation contiguous)
    contiguous   runs of blocks of 128 tokens, the span that attention reads at a time: no indirection inside

The work and the tokens are the same. The block tables show how scattered the blocks are.

Cost of batch invariance: our operators against torch's own, which do not guarantee it.

Linear layers: all products of one layer, in proven tiles (kernels/reference/row_tiles.py) compared with one plain
`F.linear` each, by number of rows. Attention: paged, in partitions of 128 keys, compared with one
`scaled_dot_product_attention` over contiguous K and V, which no paged engine has; so its ratio includes
the cost of paging.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.alternating import alternate, close_together, in_ms, ratio
from benchmarks.claim import Claim, ReproduceOptions, Reproduction
from twostroke.batch import ScheduledBatch
from twostroke.config.cache import MAX_BLOCK_SIZE, CacheConfig
from twostroke.config.kv_format import KVFormat
from twostroke.config.model import ModelConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.kernels.interface import GroupShape, Scoring
from twostroke.kernels.reference.attention import PagedAttention
from twostroke.kernels.reference.linear import PackedLinear
from twostroke.measure.figure import bar_chart
from twostroke.measure.model_engine import ModelEngine, model_engine
from twostroke.measure.report import median
from twostroke.measure.workload import SMALL_VOCAB_SIZE, Workload, workload_of_lengths
from twostroke.model.model_files import find_model
from twostroke.served_run import StepSample

BLOCK_SIZE = 16
CASES = ((1, 128), (1, 512), (1, 2048), (8, 128), (8, 512), (8, 2048), (32, 128), (32, 512))
"""Pairs of (number of requests, context tokens of each)."""
LAYOUTS = ("scattered", "in order", "contiguous")
MOST_PRICE = 1.1
"""Longest step over scattered blocks relative to contiguous KV. vLLM's paper measured 1.20 to 1.26 for its kernel."""
MIN_SCATTERED_SHARE = 0.5
"""Least share of neighbours in a block table that lie apart, for blocks that count as scattered."""


@dataclass(slots=True)
class TableWatch:
    """Follower of the first KV group's block tables through the batches."""

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

        The share is 0 if no table has two blocks.
        """
        steps = [later - earlier for table in self.tables.values() for earlier, later in pairwise(table)]
        self.tables.clear()
        return sum(step != 1 for step in steps) / len(steps) if steps else 0.0


@dataclass(frozen=True, slots=True)
class PagedCase:
    """One batch size and context: medians of alternating rounds."""

    step_s: Mapping[str, Sequence[float]]
    """Seconds of whole engine steps by layout, one per round."""
    operator_s: Mapping[str, Sequence[float]]
    """Seconds of `step_s` that the model's operators take, by layout."""
    apart: Mapping[str, float]
    """Share of neighbouring blocks that lie apart, by layout."""

    def price(self, layout: str, *, operators_only: bool = False) -> float:
        """Return the time of a step over scattered blocks relative to `layout`: the median of the rounds' ratios."""
        times = self.operator_s if operators_only else self.step_s
        return ratio(times["scattered"], times[layout])


def reproduce(options: ReproduceOptions) -> Reproduction:
    """Run every case on all layouts alternately."""
    rounds, steps = (4, 32) if options.full else (2, 4)
    cases = CASES if options.full else ((1, 64), (4, 128))
    watches = {layout: TableWatch() for layout in LAYOUTS}
    made = {layout: _engine(options, layout, cases, steps, watch) for layout, watch in watches.items()}
    with close_together(made) as engines:
        engines["scattered"].run(_mixing(cases, options.seed), progress="paging price, mixing the pool")
        measured = {case: _measure(case, engines, watches, rounds, steps) for case in cases}
    return Reproduction(
        claims=tuple(claims_of(measured, full=options.full)),
        config={"model": options.model_name, "block_size": BLOCK_SIZE, "contiguous_block_size": MAX_BLOCK_SIZE},
        workload={"requests and context": cases, "steps": steps, "seed": options.seed},
        details={
            _name(case): {
                "step_ms": in_ms(found.step_s),
                "operator_ms": in_ms(found.operator_s),
                "neighbouring_blocks_apart": found.apart,
            }
            for case, found in measured.items()
        },
        draw=bar_chart(
            [_name(case) for case in measured],
            {
                "over blocks in order": [found.price("in order") for found in measured.values()],
                "over contiguous KV": [found.price("contiguous") for found in measured.values()],
            },
            "step over scattered blocks, times as long",
            "requests x context",
            lines=(1.0,),
        ),
        figure_size=(9.0, 4.0),
        warmup=1,
        repeats=rounds,
    )


def claims_of(measured: Mapping[tuple[int, int], PagedCase], *, full: bool) -> Iterator[Claim]:
    """Yield claims that each layout matches its name, and the price, which only full runs are judged by."""
    for case, found in measured.items():
        name = _name(case)
        yield Claim.at_least(
            f"{name}: scattered blocks that lie apart, share", MIN_SCATTERED_SHARE, found.apart["scattered"]
        )
        yield Claim.at_most(f"{name}: blocks in order that lie apart, share", 0.0, found.apart["in order"])
        yield Claim.reported(f"{name}: step, scattered / in order", found.price("in order"))
        price = found.price("contiguous")
        yield Claim.at_most(f"{name}: step, scattered / contiguous", MOST_PRICE, price).judged(full)
        price = found.price("contiguous", operators_only=True)
        yield Claim.reported(f"{name}: operators alone, scattered / contiguous", price)


def _engine(
    options: ReproduceOptions, layout: str, cases: Sequence[tuple[int, int]], steps: int, watch: TableWatch
) -> ModelEngine:
    """Return an engine with KV memory for every case."""
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
    rng = np.random.default_rng((seed, 1))
    most, longest = max(batch for batch, _ in cases), max(context for _, context in cases)
    tokens_each = -(-max(batch * context for batch, context in cases) // most)
    outputs = rng.integers(3 * tokens_each // 4, 5 * tokens_each // 4, most)
    lengths = [(BLOCK_SIZE, min(int(output), longest - BLOCK_SIZE)) for output in outputs]
    return workload_of_lengths(lengths, vocab_size=SMALL_VOCAB_SIZE, seed=seed)


def _measure(
    case: tuple[int, int],
    engines: Mapping[str, ModelEngine],
    watches: Mapping[str, TableWatch],
    rounds: int,
    steps: int,
) -> PagedCase:
    batch, context = case
    workload = workload_of_lengths([(context, steps + 1)] * batch, vocab_size=SMALL_VOCAB_SIZE)
    apart: dict[str, float] = {}

    def measure(layout: str, _: int) -> list[StepSample]:
        watches[layout].tables.clear()
        run = engines[layout].run(workload, progress=f"paging price, {_name(case)}, {layout}")
        apart[layout] = round(watches[layout].take_share_apart(), 4)
        return run.decode_steps(batch)

    found = alternate(rounds, engines, measure, warm_up=1)
    step_s = {layout: [median([s.wall_s for s in steps]) for steps in of] for layout, of in found.items()}
    operator_s = {layout: [median([s.operator_s for s in steps]) for steps in of] for layout, of in found.items()}
    return PagedCase(step_s, operator_s, apart)


def _name(case: tuple[int, int]) -> str:
    return f"{case[0]} x {case[1]}"


ROWS = (1, 3, 8, 32, 33, 64, 200, 512)
"""Numbers of rows: one decode, a few, a tile height, just above one, batches, a prompt chunk that fits no height, a
budget."""
CONTEXTS = ((1, 1, 512), (8, 1, 512), (32, 1, 512), (1, 512, 512))
"""Cases: (requests, queries of each, context of each)."""
CPU = torch.device("cpu")

Operator = Callable[[], Tensor]


def reproduce_invariance(options: ReproduceOptions) -> Reproduction:
    """Run both alternately, A B A B; report medians of ratios."""
    torch.set_num_threads(options.threads or torch.get_num_threads())
    config = find_model(options.model).config()
    dtype = torch.bfloat16 if config.dtype != "float32" else torch.float32
    repeats = 60 if options.full else 6
    with torch.inference_mode():
        linear = {rows: _linear(config, dtype, rows, repeats) for rows in ROWS}
        attention = {case: _attention(config, dtype, *case, repeats) for case in CONTEXTS}
    claims = [
        Claim.reported(f"linear layers, {rows} rows: time / torch's own", case["ratio"])
        for rows, case in linear.items()
    ]
    claims += [
        Claim.reported(f"attention, {_attention_name(shape)}: time / torch's own over contiguous K, V", case["ratio"])
        for shape, case in attention.items()
    ]
    return Reproduction(
        claims=tuple(claims),
        config={"model": options.model_name, "dtype": str(dtype), "threads": torch.get_num_threads()},
        workload={"rows": ROWS, "attention (requests, queries, context)": CONTEXTS, "block_size": BLOCK_SIZE},
        details={
            "linear": {str(rows): case for rows, case in linear.items()},
            "attention": {_attention_name(shape): case for shape, case in attention.items()},
        },
        repeats=repeats,
        draw=bar_chart(
            [str(rows) for rows in linear],
            {"tiled / plain": [case["ratio"] for case in linear.values()]},
            "time of a layer's products, tiled / plain",
            "rows",
            lines=(1.0,),
        ),
    )


def _linear(config: ModelConfig, dtype: torch.dtype, num_rows: int, repeats: int) -> dict[str, float]:
    """Time all products of one decoder layer."""
    layer, hidden = config.layers[0], config.hidden_size
    q, kv, inner = layer.q_size, layer.kv_size, layer.intermediate_size
    shapes = ((hidden, q + 2 * kv), (q, hidden), (hidden, 2 * inner), (inner, hidden))
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(n, k, generator=generator).to(dtype) / math.sqrt(k) for k, n in shapes]
    inputs = [torch.randn(num_rows, k, generator=generator).to(dtype) for k, _ in shapes]
    packed = [PackedLinear(weight, None) for weight in weights]

    def tiled() -> Tensor:
        return [linear(x) for linear, x in zip(packed, inputs, strict=True)][-1]

    def plain() -> Tensor:
        return [F.linear(x, weight) for weight, x in zip(weights, inputs, strict=True)][-1]

    return _side_by_side(tiled, plain, repeats)


def _attention(
    config: ModelConfig, dtype: torch.dtype, num_seqs: int, num_queries: int, context: int, repeats: int
) -> dict[str, float]:
    """Time the attention of one layer."""
    spec = replace(config.layers[0].kv, window=None)
    heads, kv_heads, dim = config.layers[0].num_heads, spec.num_kv_heads, spec.head_dim
    generator = torch.Generator().manual_seed(0)
    blocks_each = -(-context // BLOCK_SIZE)
    storage = torch.randn(num_seqs * blocks_each, 1, 2, kv_heads, BLOCK_SIZE * dim, generator=generator).to(dtype)
    qkv = torch.randn(num_seqs * num_queries, heads + 2 * kv_heads, dim, generator=generator).to(dtype)
    attention = PagedAttention(heads, kv_heads, dim, dtype, CPU)
    kv_format: KVFormat = "f32" if dtype is torch.float32 else "bf16"
    plan = attention.plan(
        GroupShape(heads, spec, BLOCK_SIZE, BLOCK_SIZE * spec.bytes_per_token(kv_format), kv_format),
        np.arange(num_seqs + 1, dtype=np.int32) * num_queries,
        np.full(num_seqs, context, np.int32),
        np.arange(len(storage), dtype=np.int32).reshape(num_seqs, blocks_each),
    )
    q = torch.randn(num_seqs, heads, num_queries, dim, generator=generator).to(dtype)
    k, v = torch.randn(2, num_seqs, kv_heads, context, dim, generator=generator).to(dtype)

    def paged() -> Tensor:
        return attention(qkv, storage.view(torch.uint8), plan, 0, Scoring(dim**-0.5))

    def contiguous() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=num_queries > 1, enable_gqa=True)

    return _side_by_side(paged, contiguous, repeats)


def _side_by_side(ours: Operator, plain: Operator, repeats: int) -> dict[str, float]:
    """Return the median milliseconds of both, and the median of their ratios."""

    operators = {"ours": ours, "plain": plain}

    def seconds(name: str, _: int) -> float:
        start_s = time.perf_counter()
        operators[name]()
        return time.perf_counter() - start_s

    ours_s, plain_s = alternate(repeats, operators, seconds, warm_up=2).values()
    return {"ms": 1000 * median(ours_s), "plain_ms": 1000 * median(plain_s), "ratio": ratio(ours_s, plain_s)}


def _attention_name(shape: tuple[int, int, int]) -> str:
    num_seqs, num_queries, context = shape
    return f"{num_seqs} x {num_queries} queries over {context}"
