"""R6: chunks and mixed batches, each alone and both (Agrawal et al. 2024, Sarathi-Serve, section 5.4, table 4).

    prefill first   prompts whole, in steps of their own, before anybody decodes
    mixed           prompts whole, beside decodes: first tokens come early, others wait for a whole prompt
    chunked         prompts in chunks, in steps of their own: first tokens come late
    both            chunks beside decodes: what the engine does by default

Each of the two alone is worse than both in one of the two latencies: mixing alone in the time between tokens, chunking
alone in the time to the first.
"""

from __future__ import annotations

from contextlib import closing

from benchmarks.reproduce.claim import Claim, ReproduceOptions, Reproduction
from twostroke.config.cache import CacheConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.measure.figure import MEASURED, PREDICTED, bar_chart
from twostroke.measure.model_engine import model_engine
from twostroke.measure.report import median, percentiles
from twostroke.measure.workload import Lengths, Workload, of_lengths

BUDGET, SLOTS = 256, 16
VARIANTS = {
    "prefill first": SchedulerConfig(
        mixing="prefill_first", enable_chunked_prefill=False, max_num_batched_tokens=BUDGET, max_num_seqs=SLOTS
    ),
    "mixed": SchedulerConfig(enable_chunked_prefill=False, max_num_batched_tokens=BUDGET, max_num_seqs=SLOTS),
    "chunked": SchedulerConfig(mixing="prefill_first", max_num_batched_tokens=BUDGET, max_num_seqs=SLOTS),
    "both": SchedulerConfig(max_num_batched_tokens=BUDGET, max_num_seqs=SLOTS),
}
LONGEST_OUTPUT = 96
SHARE = 0.6
"""Of what the engine does when it is never without work."""


def reproduce_ablation(options: ReproduceOptions) -> Reproduction:
    """Measures the four, round by round."""
    count, rounds = (60, 3) if options.full else (8, 1)
    capacity = _capacity(options)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in VARIANTS}
    for round_ in range(rounds):
        workload = _load(options, count, SHARE * capacity, seed=round_)
        for name, config in VARIANTS.items():
            found[name].append(_serve(options, config, workload))
    middle = {name: {key: median([r[key] for r in runs]) for key in runs[0]} for name, runs in found.items()}
    mixed, chunked, both = (middle[name] for name in ("mixed", "chunked", "both"))
    claims = (
        Claim.at_least("p99 ITL, mixing alone / both", 1.0, mixed["itl_p99_s"] / both["itl_p99_s"]),
        Claim.at_least("median TTFT, chunking alone / both", 1.0, chunked["ttft_p50_s"] / both["ttft_p50_s"]),
        Claim.reported("p99 ITL, chunking alone / both", chunked["itl_p99_s"] / both["itl_p99_s"]),
        Claim.reported("median TTFT, mixing alone / both", mixed["ttft_p50_s"] / both["ttft_p50_s"]),
        *(
            Claim.reported(f"{words}, {name}", of[key] * 1e3)
            for name, of in middle.items()
            for key, words in (("ttft_p50_s", "median TTFT ms"), ("itl_p99_s", "p99 ITL ms"))
        ),
    )
    return Reproduction(
        claims=tuple(claim.judged(options.full) for claim in claims),
        config={"model": options.model_name, "max_num_batched_tokens": BUDGET, "slots": SLOTS},
        workload={"requests": count, "share_of_capacity": SHARE, "capacity": capacity},
        details={"medians": middle, "rounds": found},
        draw=bar_chart(
            list(middle),
            {
                "median TTFT": ([of["ttft_p50_s"] * 1e3 for of in middle.values()], PREDICTED),
                "p99 ITL": ([of["itl_p99_s"] * 1e3 for of in middle.values()], MEASURED),
            },
            "ms",
        ),
        repeats=rounds,
    )


def _load(options: ReproduceOptions, count: int, rate: float | None, seed: int) -> Workload:
    prompts, outputs = Lengths.uniform(64, _longest(options)), Lengths.uniform(16, LONGEST_OUTPUT)
    return options.drawn(count, prompts, outputs, rate=rate, seed=seed)


def _longest(options: ReproduceOptions) -> int:
    """Tokens of a prompt: several budgets of them, or a quick look's."""
    return 1200 if options.full else 400


def _capacity(options: ReproduceOptions) -> float:
    """Requests a second when it is never without work."""
    workload = _load(options, 24, None, seed=99)
    return len(workload) / _serve(options, VARIANTS["both"], workload)["duration_s"]


def _serve(options: ReproduceOptions, config: SchedulerConfig, workload: Workload) -> dict[str, float]:
    load = options.load(_longest(options) + LONGEST_OUTPUT)
    cache = CacheConfig(enable_prefix_caching=False)
    with closing(model_engine(load, config, cache)) as engine:
        engine.run(of_lengths([(64, 2)] * 2, vocab_size=options.vocab_size()))
        run = engine.run(workload)
    gaps = percentiles([gap for r in run.requests for gap in r.times.itl_s])
    return {
        "ttft_p50_s": percentiles([r.times.ttft_s for r in run.requests])["p50"],
        "itl_p99_s": gaps["p99"],
        "duration_s": run.duration_s,
    }
