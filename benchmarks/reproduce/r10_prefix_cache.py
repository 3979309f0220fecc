"""R10: hits of the prefix cache on real request traces, and their effect on the time to the first token.

Lengths are divided by 64, and so are the trace's 512-token blocks, which become blocks of 8 tokens. Requests run one at
a time in the trace's order. Hits are counted by the engine and must equal the replay of the pool's documented rules to
the block, request by request.

The published ideals (36.6 % and 64.0 % of all prompt blocks) count every block of the trace, including the partly
filled last one. Ours count what an engine can use: full blocks, and never the block with the prompt's last token, which
has to be computed to be sampled from. That costs 0.04 and 0.18 percentage points.

The gain in TTFT is smaller than the share of cached tokens. A step has a fixed time that does not depend on its tokens,
and a token after a cached prefix still attends to all of it. So the step-time model predicts the gain from lengths and
predicted hits (cost/step_model.py); it is fitted just before. The prediction by tokens alone is reported, too. Each
request runs several times, always after a reset of the cache, and its median counts: one outlier in 500 requests
exceeds the gain.

The hits of a cache of a given size, one request after the other, are predicted (PrefixCacheReplay) only from the
documented rules of the block pool:

- only full blocks can be found, and a prompt's last token is always computed: at most (prompt tokens - 1) // block_size
  blocks are hits;
- a needed block comes from the free ones, or else the cached block freed longest ago is evicted;
- a block can be found once its last token is computed; if the same content can be found already, the old block stays
  and the new one is free as soon as its request has ended;
- a request that ends frees its blocks tail first, so its head is evicted last.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.alternating import close_together
from benchmarks.claim import Claim, ReproduceOptions, Reproduction
from benchmarks.counting_engine import counting_engine
from benchmarks.reproduce.recorded import FittedSteps
from twostroke.config.cache import CacheConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.measure.figure import MEASURED, PREDICTED, style_axes
from twostroke.measure.model_engine import model_engine
from twostroke.measure.report import median, percentiles
from twostroke.measure.workload import TraceSpec, Workload, WorkloadRequest, workload_of_trace
from twostroke.served_run import Run
from twostroke.simulation.trace import TraceEntry, read_trace

_ROOT = -1


@dataclass(slots=True)
class PrefixCacheReplay:
    """Replay of a prefix cache with one request at a time.

    Args:
        num_blocks: size of the pool; None never evicts.
        block_size: tokens per block.
        output_token_id: token of every output.
    """

    num_blocks: int | None
    block_size: int
    output_token_id: int = 1
    _names: dict[tuple[int, tuple[int, ...]], int] = field(default_factory=dict[tuple[int, tuple[int, ...]], int])
    _cached: OrderedDict[int, None] = field(default_factory=OrderedDict[int, None])
    """Blocks that can be found; the first is evicted first."""

    def run(self, request: WorkloadRequest) -> int:
        """Run one request to its end.

        Returns:
            Number of the prompt's blocks that were found.
        """
        size = self.block_size
        num_prompt = len(request.prompt_token_ids)
        chain = self._chain(request)
        usable = (num_prompt - 1) // size
        num_hits = 0
        while num_hits < usable and chain[num_hits] in self._cached:
            del self._cached[chain[num_hits]]  # in use: cannot be forgotten
            num_hits += 1
        held: list[int | None] = [*chain[:num_hits]]
        # the prompt's step takes its blocks at once; each further one is taken when its first token is computed
        for num_computed in range(num_prompt, num_prompt + request.max_tokens):  # the last one sampled never is
            self._take(held, num_computed)
            self._name(held, chain, num_computed)
        for name in reversed(held):
            if name is not None:
                self._cached[name] = None
        return num_hits

    def _chain(self, request: WorkloadRequest) -> list[int]:
        """Return one name per full block, equal if all tokens up to the block's end are equal."""
        size = self.block_size
        tokens = request.prompt_token_ids + (self.output_token_id,) * (request.max_tokens - 1)
        names: list[int] = []
        parent = _ROOT
        for begin in range(0, len(tokens) - size + 1, size):
            parent = self._names.setdefault((parent, tokens[begin : begin + size]), len(self._names))
            names.append(parent)
        return names

    def _take(self, held: list[int | None], num_tokens: int) -> None:
        wanted = -(-num_tokens // self.block_size) - len(held)
        held.extend([None] * wanted)
        if self.num_blocks is not None:
            assert len(held) <= self.num_blocks, (
                f"a request of {num_tokens} tokens does not fit {self.num_blocks} blocks"
            )
            while len(held) + len(self._cached) > self.num_blocks:
                self._cached.popitem(last=False)

    def _name(self, held: list[int | None], chain: Sequence[int], num_tokens: int) -> None:
        for i in range(num_tokens // self.block_size):
            if held[i] is None and chain[i] not in self._cached:
                held[i] = chain[i]


SPEC = TraceSpec(divisor=64)
CAPACITIES = (1000, 3000, 10_000, 30_000, None)
"""Sizes of the cache in blocks; None holds everything."""
PUBLISHED = {
    "conversation": (0.045, 0.065, 0.211, 0.326, 0.366),
    "synthetic": (0.083, 0.188, 0.424, 0.624, 0.640),
}
"""Share of all prompt blocks found, by capacity, from a block-wise replay without our last-token rule."""
SMALL = 300
ONE_AT_A_TIME = SchedulerConfig(max_num_seqs=1)
"""Scheduler with one request at a time, its prompt in chunks of the usual budget."""
TTFT_REQUESTS = 500
ROUNDS = 3
"""Runs of each request; results are medians."""
POINTS = 0.05
"""Largest accepted difference between the gain and its prediction."""


def reproduce(options: ReproduceOptions) -> Reproduction:
    """Replay the traces, then run the engine; full traces, or their beginnings."""
    claims: list[Claim] = []
    details: dict[str, Any] = {}
    remarks: list[str] = []
    four, blocks = replace(ONE_AT_A_TIME, max_num_seqs=4), CacheConfig(block_size=SPEC.block_size)
    step_times = FittedSteps.measured(options, four, blocks) if options.with_model else None
    for trace, published in PUBLISHED.items():
        path = options.traces / f"mooncake_{trace}.jsonl"
        if not path.exists():
            remarks.append(
                f"{path.name} is not in {options.traces_name}: this trace was left out. "
                "It is published with the Mooncake FAST'25 paper "
                f"(kvcache-ai/Mooncake, FAST25-release/traces); --traces says where to look."
            )
            continue
        entries = read_trace(path)[: None if options.full else SMALL]
        workload = workload_of_trace(entries, replace(SPEC, vocab_size=options.vocab_size()), name=path.name)
        for capacity, ideal in zip(CAPACITIES, published, strict=True):
            case = _hits(workload, entries, capacity, f"R10 {trace}, {capacity or 'infinite'}")
            details[f"{trace}-{capacity or 'infinite'}"] = {**case, "published": ideal}
            what = f"{trace}, {f'{capacity:,} blocks' if capacity else 'infinite'}"
            claims.append(Claim.equal(f"{what}: blocks hit", case["predicted_hits"], case["measured_hits"]))
            claims.append(Claim.equal(f"{what}: requests that differ", 0, case["requests_that_differ"]))
            if options.full:
                claims.append(Claim.reported(f"{what}: share of the trace's blocks (published)", case["share"], ideal))
        if step_times is not None:
            ttft = _ttft(workload.first(TTFT_REQUESTS if options.full else 60), options, step_times)
            details[f"{trace}-ttft"] = ttft
            mean = f"{trace}: mean TTFT without / with the cache, within {POINTS * 100:g} points"
            fixed = f"{trace}: share of the TTFT with the cache that its tokens do not change, by the step times"
            half = f"{trace}: the same, median of {ttft['requests_where_half_was_found']} requests that found half"
            predicted = ttft["predicted_ratio"]
            claims.append(Claim.within(mean, predicted, ttft["ratio"], POINTS / predicted).judged(options.full))
            by_tokens = f"{trace}: the same, predicted by computed tokens alone"
            claims.append(Claim.reported(by_tokens, ttft["ratio"], ttft["token_ratio"]))
            claims.append(Claim.reported(fixed, ttft["predicted_fixed_share"]))
            claims.append(Claim.reported(half, ttft["ratio_where_half_was_found"]))
    if not options.with_model:
        remarks.append("TTFT was left out: it needs a model")
    return Reproduction(
        claims=tuple(claims),
        config={"block_size": SPEC.block_size, "model": options.model_name if options.with_model else None},
        workload={"traces": tuple(PUBLISHED), "divisor": SPEC.divisor, "requests": None if options.full else SMALL},
        details=details,
        remarks=tuple(remarks),
        draw=(lambda figure: _draw(figure, details)) if details else None,
    )


def _hits(workload: Workload, entries: list[TraceEntry], capacity: int | None, title: str) -> dict[str, Any]:
    replay = PrefixCacheReplay(capacity, SPEC.block_size)
    predicted = [replay.run(request) for request in workload.requests]
    # enough for every token ever computed, so that nothing is evicted
    num_blocks = capacity or sum(-(-r.num_tokens // SPEC.block_size) for r in workload.requests)
    cache = CacheConfig(block_size=SPEC.block_size, num_kv_blocks=num_blocks)
    longest = workload.max_request_tokens
    # one request at a time, its prompt in one step
    scheduler = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=longest)
    run = counting_engine(scheduler, cache, max_model_len=longest).run(workload, progress=title)
    measured = [request.num_cached_tokens // SPEC.block_size for request in run.requests]
    return {
        "predicted_hits": sum(predicted),
        "measured_hits": sum(measured),
        "requests_that_differ": sum(p != m for p, m in zip(predicted, measured, strict=True)),
        "share": sum(measured) / sum(len(entry.hash_ids) for entry in entries),
    }


def _prefill_s(step_times: FittedSteps, num_prompt: int, num_cached: int) -> float:
    """Return the seconds of a prompt's chunks, with the first `num_cached` tokens cached."""
    seconds, budget = 0.0, ONE_AT_A_TIME.max_num_batched_tokens
    for start in range(num_cached, num_prompt, budget):
        count = min(budget, num_prompt - start)
        seconds += step_times.seconds([(start, count, start + count == num_prompt)])
    return seconds


def _predicted(workload: Workload, step_times: FittedSteps) -> dict[str, float]:
    """Return the predicted effect of the cache on TTFTs, from lengths and predicted hits alone."""
    replay = PrefixCacheReplay(None, SPEC.block_size)
    lengths = [len(request.prompt_token_ids) for request in workload.requests]
    found = [replay.run(request) * SPEC.block_size for request in workload.requests]
    without = sum(_prefill_s(step_times, length, 0) for length in lengths)
    with_cache = sum(_prefill_s(step_times, length, cached) for length, cached in zip(lengths, found, strict=True))
    fixed_s = step_times.seconds([(0, 1, 1)])  # a one-token step without context: the part that no hit saves
    return {
        "predicted_ratio": without / with_cache,
        "predicted_fixed_share": len(lengths) * fixed_s / with_cache,
        "predicted_mean_s_without": without / len(lengths),
        "predicted_mean_s_with": with_cache / len(lengths),
    }


def _ttft(workload: Workload, options: ReproduceOptions, step_times: FittedSteps) -> dict[str, Any]:
    """Return the effect of the cache on TTFTs, from two engines that alternate by request, so that noise affects
    both."""
    workload = workload.cut_outputs(1)
    longest = workload.max_request_tokens
    all_blocks = sum(-(-r.num_tokens // SPEC.block_size) for r in workload.requests)
    with_cache = CacheConfig(block_size=SPEC.block_size, num_kv_blocks=all_blocks)
    caches = {"without": replace(with_cache, enable_prefix_caching=False), "with": with_cache}
    made = {name: model_engine(options.load(longest), ONE_AT_A_TIME, cache) for name, cache in caches.items()}
    rounds: dict[str, list[list[Run]]] = {name: [] for name in made}
    with close_together(made) as engines:
        for _ in range(ROUNDS if options.full else 1):
            for name, engine in engines.items():
                engine.engine.reset_prefix_cache()
                rounds[name].append([])
            for index, request in enumerate(workload.requests):
                # alternate, so that neither run always finds the processor's caches filled by the other
                for name in sorted(engines, reverse=bool(index % 2)):
                    rounds[name][-1].append(engines[name].run(Workload((request,))))
    ttft_s = {
        name: [median([run.requests[0].times.ttft_s for run in of_request]) for of_request in zip(*of, strict=True)]
        for name, of in rounds.items()
    }
    tokens = {name: sum(s.num_prefill_tokens for run in of[0] for s in run.steps) for name, of in rounds.items()}
    found = [run.requests[0].num_cached_tokens for run in rounds["with"][0]]
    both = zip(ttft_s["without"], ttft_s["with"], found, workload.requests, strict=True)
    halves = [was / now for was, now, cached, request in both if 2 * cached >= len(request.prompt_token_ids)]
    return {
        "ratio": sum(ttft_s["without"]) / sum(ttft_s["with"]),
        **_predicted(workload, step_times),
        "token_ratio": tokens["without"] / tokens["with"],
        "ratio_where_half_was_found": median(halves) if halves else 1.0,
        "requests_where_half_was_found": len(halves),
        "computed_tokens": tokens,
        "ttft_s": {name: percentiles(values) for name, values in ttft_s.items()},
        "num_requests": len(workload),
    }


def _draw(figure: Any, details: dict[str, Any]) -> None:
    axes = figure.add_subplot()
    labels = [f"{c:,}" if c else "infinite" for c in CAPACITIES]
    for trace, style in zip(PUBLISHED, ("o-", "s-"), strict=True):
        cases = [details[name] for c in CAPACITIES if (name := f"{trace}-{c or 'infinite'}") in details]
        if cases:
            measured, published = ([100 * case[key] for case in cases] for key in ("share", "published"))
            axes.plot(labels, measured, style, color=MEASURED, label=f"{trace}, measured")
            axes.plot(labels, published, style[0], color=PREDICTED, label=f"{trace}, published")
    style_axes(axes, xlabel="KV blocks of 8 tokens", ylabel="% of the trace's prompt blocks found")
