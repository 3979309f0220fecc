"""`twostroke bench offline`: a workload through the engine on this machine, as fast as it goes or as it arrives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from twostroke.bench.drive import Run
from twostroke.bench.figure import MEASURED, PREDICTED, save_figure
from twostroke.bench.lengths import Lengths
from twostroke.bench.model_engine import model_engine
from twostroke.bench.report import DEFAULT_FOLDER, BenchResult, save
from twostroke.bench.summary import over_time, summarize
from twostroke.bench.workload import SyntheticSpec, TraceSpec, Workload, of_trace, read_trace, synthetic
from twostroke.config.cache import CacheConfig
from twostroke.config.load import LoadConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.errors import InvalidParameter
from twostroke.model.checkpoint import find_model_folder, read_model_config

_LIMIT_COLOURS = {"tokens": "#3b6ea5", "seqs": "#7a9e3f", "kv": "#c2410c", "none": "#d5dbe1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineOptions:
    """What is run, and where the result goes."""

    num_requests: int = 64
    """Requests to make."""
    prompt_lengths: str = "uniform:16:128"
    """Tokens of a prompt: fixed:N, uniform:LOW:HIGH or exponential:MEAN."""
    output_lengths: str = "exponential:64"
    """Tokens of an output, in the same forms; the end of the text is ignored."""
    request_rate: float | None = None
    """Arrivals per second, at random, whether or not the engine keeps up; default: all are queued at the start."""
    num_prefix_groups: int = 0
    """Groups of requests whose prompts begin alike."""
    prefix_length: int = 0
    """Tokens that the prompts of a group share, before their own."""
    trace: Path | None = None
    """A Mooncake trace whose first num_requests are run instead."""
    trace_divisor: int = 64
    """Lengths and blocks of the trace are divided by this; with 64 the block size should be 8."""
    time_divisor: float = 0.0
    """The trace's times are divided by this; 0 queues everything at the start."""
    seed: int = 0
    """Of the workload."""
    warmup: int = 1
    """Small runs before the one that counts."""
    name: str = "offline"
    """Of the files that are written."""
    results: Path = DEFAULT_FOLDER
    """Where they go."""
    plots: bool = True
    """Draw a PNG beside the JSON (needs the extra 'bench')."""

    def __post_init__(self) -> None:
        """Checks what needs no model."""
        if self.warmup < 0:
            raise InvalidParameter("warmup", self.warmup, "must be at least 0")
        if self.time_divisor < 0:
            raise InvalidParameter("time_divisor", self.time_divisor, "must be at least 0")
        if not self.name or Path(self.name).name != self.name:
            raise InvalidParameter("name", self.name, "must be a file name without folders")


def run_offline(
    options: OfflineOptions | None = None,
    load: LoadConfig | None = None,
    scheduler: SchedulerConfig | None = None,
    cache: CacheConfig | None = None,
) -> BenchResult:
    """Loads the model, runs the workload, saves JSON and PNG.

    Raises:
        InvalidParameter: a length that cannot be drawn, a trace that cannot be read, no request that fits.
        SetupError: the model cannot be loaded, or matplotlib is missing while plots are wanted.
    """
    options, load = options or OfflineOptions(), load or LoadConfig()
    scheduler, cache = scheduler or SchedulerConfig(), cache or CacheConfig()
    model = read_model_config(find_model_folder(load.model))
    context = min(load.max_model_len or model.max_context, model.max_context)
    workload = offline_workload(options, model.vocab_size).fitting(context)
    if not len(workload):
        raise InvalidParameter(
            "prompt_lengths", options.prompt_lengths, f"no request fits a context of {context} tokens"
        )
    engine = model_engine(load, scheduler, cache)
    for i in range(options.warmup):
        # other tokens than the workload's: a warm-up must not fill the prefix cache with what is measured
        engine.run(synthetic(SyntheticSpec(num_requests=4, vocab_size=model.vocab_size, seed=options.seed + 10**9 + i)))
    run = engine.run(workload, progress=options.name)
    engine.close()
    result = BenchResult.now(
        options.name,
        "twostroke bench offline",
        config={"load": asdict(load), "scheduler": asdict(scheduler), "cache": asdict(cache)},
        workload={**workload.description, "prompt_tokens": workload.num_prompt_tokens},
        results={**summarize(run), "startup": engine.startup_lines},
        warmup=options.warmup,
    )
    save(result, options.results)
    if options.plots:
        save_figure(lambda figure: _draw(figure, run), options.results / f"{options.name}.png", size=(8, 5))
    return result


def offline_workload(options: OfflineOptions, vocab_size: int) -> Workload:
    """The workload that the options describe."""
    if options.trace is not None:
        spec = TraceSpec(
            divisor=options.trace_divisor,
            vocab_size=vocab_size,
            time_divisor=options.time_divisor or None,
        )
        return of_trace(read_trace(options.trace)[: options.num_requests], spec, name=options.trace.name)
    return synthetic(
        SyntheticSpec(
            num_requests=options.num_requests,
            prompt_lengths=Lengths.parse(options.prompt_lengths),
            output_lengths=Lengths.parse(options.output_lengths),
            request_rate=options.request_rate,
            num_prefix_groups=options.num_prefix_groups,
            prefix_length=options.prefix_length,
            vocab_size=vocab_size,
            seed=options.seed,
        )
    )


def print_summary(found: Mapping[str, Any], console: Console | None = None) -> None:
    """The figures of a run (see `summarize`), for people."""
    console = console or Console()
    rates = found["throughput"]
    console.print(
        f"{found['num_requests']} requests in {found['duration_s']:.2f} s, {found['steps']} steps: "
        f"prefill {rates['prefill_tok_s']:,.0f} tok/s, decode {rates['decode_tok_s']:,.0f} tok/s, "
        f"{rates['requests_per_s']:.2f} requests/s; {found['num_cached_tokens']:,} prompt tokens from the cache, "
        f"{found['num_preemptions']} preemptions",
        highlight=False,
    )
    rows = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("ms", "p50", "p90", "p99", "mean"):
        rows.add_column(name, justify="left" if name == "ms" else "right")
    latency: Mapping[str, Mapping[str, float]] = found["latency"]
    for name, of in latency.items():
        cells = (f"{1000 * of[q]:,.2f}" for q in ("p50", "p90", "p99", "mean") if q in of)
        rows.add_row(name.removesuffix("_s").replace("_", " "), *cells)
    own: Mapping[str, Mapping[str, float]] = found["own_time_s"]
    largest = max(own, key=int)
    for size in dict.fromkeys((min(own, key=int), largest)):
        cells = (f"{1000 * own[size][q]:,.2f}" for q in ("p50", "p90", "p99", "mean"))
        rows.add_row(f"engine's own time a step, {size} requests", *cells)
    console.print(rows)
    limits: Mapping[str, float] = found["limited_by"]
    console.print("limited by " + ", ".join(f"{name} {share:.0%}" for name, share in limits.items()), highlight=False)


def _draw(figure: Any, run: Run) -> None:
    series = over_time(run)
    top, bottom = figure.subplots(2, 1, sharex=True)
    top.step(series["end_s"], series["num_seqs"], color=MEASURED, label="running requests", where="post")
    top.step(series["end_s"], series["num_waiting"], color=PREDICTED, label="waiting requests", where="post")
    top.set_ylabel("requests")
    top.legend(fontsize=8, frameon=False)
    begins = [0.0, *series["end_s"]][: len(series["end_s"])]
    widths = [end - begin for begin, end in zip(begins, series["end_s"], strict=True)]
    for limit, colour in _LIMIT_COLOURS.items():
        places = [i for i, name in enumerate(series["limited_by"]) if name == limit]
        if places:
            heights = [series["num_tokens"][i] for i in places]
            lefts, spans = [begins[i] for i in places], [widths[i] for i in places]
            bottom.bar(lefts, heights, spans, align="edge", color=colour, label=f"limited by {limit}")
    bottom.set_ylabel("tokens a step")
    bottom.set_xlabel("seconds")
    bottom.legend(fontsize=8, frameon=False)
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
