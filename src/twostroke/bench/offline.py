"""`twostroke bench offline`: a workload through the engine on this machine, as fast as it goes or as it arrives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from twostroke.bench.command import command_line, settings
from twostroke.bench.drive import Run
from twostroke.bench.figure import MEASURED, PREDICTED, save_figure
from twostroke.bench.lengths import Lengths
from twostroke.bench.model_engine import model_engine
from twostroke.bench.report import DEFAULT_FOLDER, BenchResult, check_folder, save
from twostroke.bench.summary import over_time, summarize
from twostroke.bench.workload import (
    MAX_RATE,
    MIN_RATE,
    SyntheticSpec,
    TraceSpec,
    Workload,
    of_trace,
    read_trace,
    synthetic,
)
from twostroke.config.cache import CacheConfig
from twostroke.config.checks import number, switch, whole_number
from twostroke.config.load import LoadConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.errors import InvalidParameter
from twostroke.model.model_files import find_model

MAX_SEED = 2**32 - 1
MAX_NAME_BYTES = 200
"""Of a result; file systems take 255, and the files are written under longer names first."""

_OF_A_TRACE: dict[str, str] = dict.fromkeys(("trace_divisor", "time_divisor"), "give a --trace.")
_GO_WITHOUT = "leave out --trace."
_OF_A_DRAW = {
    "prompt_lengths": _GO_WITHOUT,
    "output_lengths": _GO_WITHOUT,
    "request_rate": "scale the trace's own times with --time-divisor.",
    "num_prefix_groups": _GO_WITHOUT,
    "prefix_length": _GO_WITHOUT,
    "seed": _GO_WITHOUT,
}
"""Options that only one of the two kinds of workload has, and what to do instead of giving them with the other."""

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
        """Checks what needs no model; every option changes something, or is refused."""
        whole_number("num_requests", self.num_requests, 1)
        whole_number("warmup", self.warmup, 0)
        whole_number("seed", self.seed, 0, MAX_SEED)
        if self.time_divisor != 0:
            number("time_divisor", self.time_divisor, MIN_RATE, MAX_RATE, f"0, or {MIN_RATE:g} to {MAX_RATE:g}")
        switch("plots", self.plots)
        _check_name(self.name)
        others = _OF_A_TRACE if self.trace is None else _OF_A_DRAW
        defaults = {field.name: field.default for field in fields(self)}
        for name in others:
            value = getattr(self, name)
            if value != defaults[name]:
                limit = "changes nothing without a trace" if self.trace is None else "changes nothing beside a trace"
                raise InvalidParameter(name, value, limit, "Leave it out, or " + others[name])
        if self.trace is None:
            self.spec(vocab_size=4096)  # any: this only refuses what cannot be drawn

    def spec(self, vocab_size: int) -> SyntheticSpec:
        """What is drawn when no trace is run."""
        return SyntheticSpec(
            num_requests=self.num_requests,
            prompt_lengths=Lengths.parse(self.prompt_lengths, "prompt_lengths"),
            output_lengths=Lengths.parse(self.output_lengths, "output_lengths"),
            request_rate=self.request_rate,
            num_prefix_groups=self.num_prefix_groups,
            prefix_length=self.prefix_length,
            vocab_size=vocab_size,
            seed=self.seed,
        )


def run_offline(
    options: OfflineOptions | None = None,
    load: LoadConfig | None = None,
    scheduler: SchedulerConfig | None = None,
    cache: CacheConfig | None = None,
) -> BenchResult:
    """Loads the model, runs the workload, saves JSON and PNG.

    Raises:
        InvalidParameter: a trace that cannot be read, no request that fits, a folder that results cannot be written to.
        SetupError: the model cannot be loaded, or matplotlib is missing while plots are wanted.
    """
    options, load = options or OfflineOptions(), load or LoadConfig()
    scheduler, cache = scheduler or SchedulerConfig(), cache or CacheConfig()
    check_folder(options.results)
    model = find_model(load.model).config()
    context = min(load.max_model_len or model.max_context, model.max_context)
    workload = offline_workload(options, model.vocab_size).fitting(context)
    if not len(workload):
        name, value = "prompt_lengths", options.prompt_lengths
        if options.trace is not None:
            name, value = "trace", str(options.trace)
        raise InvalidParameter(name, value, f"no request fits a context of {context} tokens", "Make them shorter.")
    engine = model_engine(load, scheduler, cache)
    for i in range(options.warmup):
        # other tokens than the workload's: a warm-up must not fill the prefix cache with what is measured
        engine.run(synthetic(SyntheticSpec(num_requests=4, vocab_size=model.vocab_size, seed=options.seed + 10**9 + i)))
    run = engine.run(workload, progress=options.name)
    engine.close()
    result = BenchResult.now(
        options.name,
        command_line("twostroke bench offline", options, load, scheduler, cache),
        config={"load": settings(load), "scheduler": settings(scheduler), "cache": settings(cache)},
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
    return synthetic(options.spec(vocab_size))


def _check_name(name: object) -> None:
    limit = f"must be a file name without folders, not hidden, of at most {MAX_NAME_BYTES} bytes"
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name.encode()) <= MAX_NAME_BYTES:
        raise InvalidParameter("name", name, limit)
    if Path(name).name != name or name.startswith("."):
        raise InvalidParameter("name", name, limit, "The folder is --results.")


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
