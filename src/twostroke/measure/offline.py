"""`twostroke bench offline`: run a workload through the engine on this machine, saturated or at its arrival times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from twostroke.config.cache import CacheConfig
from twostroke.config.checks import check_bool, check_int
from twostroke.config.load import LoadConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.cost.price import RunCost, check_price_per_hour
from twostroke.errors import InvalidParameter
from twostroke.measure.figure import MEASURED, PREDICTED, save_figure, style_axes
from twostroke.measure.model_engine import model_engine
from twostroke.measure.report import DEFAULT_FOLDER, BenchResult, check_folder, record, settings
from twostroke.measure.summary import over_time, summarize
from twostroke.measure.workload import SyntheticSpec, synthetic
from twostroke.measure.workload_options import WorkloadOptions, check_name
from twostroke.model.model_files import find_model_of
from twostroke.served_run import Run
from twostroke.tables import plain_table, print_table

_LIMIT_COLOURS = {"tokens": "#3b6ea5", "seqs": "#7a9e3f", "kv": "#c2410c", "none": "#d5dbe1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineOptions(WorkloadOptions):
    """Options: the workload, and the result files."""

    warmup: int = 1
    """Small runs before the one that counts."""
    name: str = "offline"
    """Name of the result files."""
    results: Path = DEFAULT_FOLDER
    """Folder of the result files."""
    plots: bool = True
    """Draw a PNG beside the JSON (needs the extra 'bench')."""
    price_per_hour: float | None = None
    """Price of this machine per hour, in any currency: adds the cost per million tokens."""

    def __post_init__(self) -> None:
        """Check what needs no model; raise if an option has no effect."""
        WorkloadOptions.__post_init__(self)  # super() without arguments fails: slots=True creates another class
        check_int("warmup", self.warmup, 0)
        check_bool("plots", self.plots)
        check_name(self.name)
        check_price_per_hour(self.price_per_hour)


def run_offline(
    options: OfflineOptions | None = None,
    load: LoadConfig | None = None,
    scheduler: SchedulerConfig | None = None,
    cache: CacheConfig | None = None,
) -> BenchResult:
    """Load the model, run the workload, and save JSON and PNG.

    Raises:
        InvalidParameter: the trace cannot be read, no request fits, or the results folder is not writable.
        SetupError: the model cannot be loaded, or matplotlib is missing although plots are requested.
    """
    options, load = options or OfflineOptions(), load or LoadConfig()
    scheduler, cache = scheduler or SchedulerConfig(), cache or CacheConfig()
    check_folder(options.results)
    model = find_model_of(load).config()
    context = min(load.max_model_len or model.max_context, model.max_context)
    workload = options.workload(model.vocab_size).within_context(context)
    if not len(workload):
        name, value = "prompt_lengths", options.prompt_lengths
        if options.trace is not None:
            name, value = "trace", str(options.trace)
        raise InvalidParameter(name, value, f"no request fits a context of {context} tokens", "Make them shorter.")
    engine = model_engine(load, scheduler, cache)
    for i in range(options.warmup):
        # tokens that the workload does not use, so that the warm-up fills the prefix cache with none of its prompts
        engine.run(synthetic(SyntheticSpec(num_requests=4, vocab_size=model.vocab_size, seed=options.seed + 10**9 + i)))
    run = engine.run(workload, progress=options.name)
    engine.close()
    result = record(
        "twostroke bench offline",
        options,
        load,
        scheduler,
        cache,
        config={"load": settings(load), "scheduler": settings(scheduler), "cache": settings(cache)},
        workload={**workload.description, "prompt_tokens": workload.num_prompt_tokens},
        results={
            **summarize(run),
            "cost": run_cost(run, options.price_per_hour, workload.num_prompt_tokens),
            "startup": engine.startup_lines,
        },
        warmup=options.warmup,
    )
    if options.plots:
        save_figure(lambda figure: _draw(figure, run), options.results / f"{options.name}.png", size=(8, 5))
    return result


def print_summary(found: Mapping[str, Any], console: Console | None = None) -> None:
    """Print the figures of a run (see `summarize`)."""
    console = console or Console()
    rates = found["throughput"]
    console.print(
        f"{found['num_requests']} requests in {found['duration_s']:.2f} s, {found['steps']} steps: "
        f"prefill {rates['prefill_tok_s']:,.0f} tok/s, decode {rates['decode_tok_s']:,.0f} tok/s, "
        f"{rates['requests_per_s']:.2f} requests/s; {found['num_cached_tokens']:,} prompt tokens from the cache, "
        f"{found['num_preemptions']} preemptions",
        highlight=False,
    )
    if found.get("cost") is not None:
        console.print(cost_line(found["cost"]), highlight=False)
    quantiles = ("p50", "p90", "p99", "mean")
    rows = plain_table(("ms",), quantiles)
    latency: Mapping[str, Mapping[str, float]] = found["latency"]
    for name, of in latency.items():
        cells = (f"{1000 * of[q]:,.2f}" for q in quantiles if q in of)
        rows.add_row(name.removesuffix("_s").replace("_", " "), *cells)
    own: Mapping[str, Mapping[str, float]] = found["own_time_s"]
    largest = max(own, key=int)
    for size in dict.fromkeys((min(own, key=int), largest)):
        cells = (f"{1000 * own[size][q]:,.2f}" for q in quantiles)
        rows.add_row(f"engine's own time per step, {size} requests", *cells)
    print_table(rows, console)
    limits: Mapping[str, float] = found["limited_by"]
    console.print("limited by " + ", ".join(f"{name} {share:.0%}" for name, share in limits.items()), highlight=False)


def run_cost(run: Run, price_per_hour: float | None, num_prompt_tokens: int | None = None) -> dict[str, Any] | None:
    """Return the cost of a run (see `RunCost`); None without a price.

    Args:
        run: the workload's run through an engine.
        price_per_hour: price of the machine per hour.
        num_prompt_tokens: sum over all requests; None: unknown, and the cost per token of prompts and output is left
        out.
    """
    if price_per_hour is None:
        return None
    return asdict(
        RunCost.of(
            price_per_hour, run.duration_s, num_prompt_tokens=num_prompt_tokens, num_output_tokens=run.num_output_tokens
        )
    )


def cost_line(cost: Mapping[str, Any]) -> str:
    """Return the cost of a run (see `RunCost`) as text."""
    parts = {
        "output tokens": cost["per_million_output_tokens"],
        "prompt and output tokens": cost["per_million_tokens"],
    }
    known = [f"{value:,.4g} per million {of_what}" for of_what, value in parts.items() if value is not None]
    bill = ", ".join([f"{cost['total']:,.4g} in total", *known])
    return f"cost: {bill} (at {cost['price_per_hour']:g} per hour)"


def _draw(figure: Any, run: Run) -> None:
    series = over_time(run)
    top, bottom = figure.subplots(2, 1, sharex=True)
    top.step(series["end_s"], series["num_seqs"], color=MEASURED, label="running requests", where="post")
    top.step(series["end_s"], series["num_waiting"], color=PREDICTED, label="waiting requests", where="post")
    style_axes(top, ylabel="requests")
    begins = [0.0, *series["end_s"]][: len(series["end_s"])]
    widths = [end - begin for begin, end in zip(begins, series["end_s"], strict=True)]
    for limit, colour in _LIMIT_COLOURS.items():
        places = [i for i, name in enumerate(series["limited_by"]) if name == limit]
        if places:
            heights = [series["num_tokens"][i] for i in places]
            lefts, spans = [begins[i] for i in places], [widths[i] for i in places]
            bottom.bar(lefts, heights, spans, align="edge", color=colour, label=f"limited by {limit}")
    style_axes(bottom, xlabel="seconds", ylabel="tokens per step")
