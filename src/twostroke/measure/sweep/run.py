"""Sweep of one engine over prompt lengths, contexts and batch sizes, compared with the machine's limits.

The floor of a step is the longer of its arithmetic and its memory traffic (cost/step_cost.py), at the limits
measured before and after the sweep on the same threads. Only what must be read and written at least once counts as
traffic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from twostroke.config.cache import CacheConfig
from twostroke.config.checks import check_bool, check_int, parse_ints
from twostroke.config.load import LoadConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.cost.price import check_price_per_hour, cost_per_million_tokens
from twostroke.cost.step_cost import MachineLimits
from twostroke.errors import InvalidParameter
from twostroke.events import EventRing
from twostroke.hardware import Hardware
from twostroke.kernels.dispatch import operators_for
from twostroke.measure.figure import MEASURED, PREDICTED, save_figure, style_axes
from twostroke.measure.limits import format_limits, measure_limits
from twostroke.measure.model_engine import ModelEngine, model_engine
from twostroke.measure.report import DEFAULT_FOLDER, BenchResult, check_folder, model_name, record, settings
from twostroke.measure.sweep.points import (
    DecodePoint,
    PrefillPoint,
    QuadraticFit,
    fit_quadratic,
    measure_decode,
    measure_prefill,
    output_length,
)
from twostroke.model.model_files import find_model_of, weights_of
from twostroke.tables import plain_table, print_table


def print_sweep(results: Mapping[str, Any], console: Console | None = None) -> None:
    """Print every point, the fit, and the derived figures."""
    console = console or Console()

    def print_points(title: str, columns: Mapping[str, str], points: Sequence[Mapping[str, float]]) -> None:
        print_table(_table(title, {**columns, "tok/s": "tok_s", "floor": "floor_s"}, points), console)

    print_points("TTFT", {"prompt": "prompt_length", "ms": "ttft_s", "fitted": "fitted_s"}, results["ttft"])
    fit = results["fit"]
    console.print(
        f"TTFT(n) = {1e3 * fit['a']:.3g} ms + {1e6 * fit['b']:.3g} us n + {1e9 * fit['c']:.3g} ns n^2, "
        f"R^2 = {fit['r_squared']:.5f}\n",
        highlight=False,
    )
    print_points("TPOT over context", {"context": "context", "ms": "tpot_s"}, results["tpot_by_context"])
    print_points("Batch", {"requests": "num_requests", "ms": "tpot_s"}, results["by_batch"])
    for title, name in (
        ("prefill / decode, tokens per second", "prefill_to_decode"),
        ("device-seconds per 1,000 tokens", "device_seconds_per_1k_tokens"),
        ("cost of a million tokens", "cost_per_million_tokens"),
    ):
        if results[name] is None:
            continue
        parts = ", ".join(f"{key.replace('_', ' ')} {value:,.4g}" for key, value in results[name].items())
        console.print(f"{title}: {parts}", highlight=False)
    console.print(
        f"a prompt of 1,000 tokens takes as long as {decode_steps_per_1k_prompt(results):,.3g} decode steps "
        "of one request",
        highlight=False,
    )
    console.print(format_limits(results["limits"]), highlight=False)
    raised = results.get("raised")
    if raised:
        rates = f"{raised['flops_per_s'] / 1e9:,.4g} GFLOP/s, {raised['bytes_per_s'] / 1e9:,.4g} GB/s"
        console.print(f"points were faster than these limits; floors use raised limits: {rates}", highlight=False)


def _table(title: str, columns: Mapping[str, str], points: Sequence[Mapping[str, float]]) -> Table:
    rows = plain_table((), (*columns, "of floor"), title)
    for point in points:
        # seconds are shown as milliseconds
        values = (1e3 * point[key] if key.endswith("_s") and key != "tok_s" else point[key] for key in columns.values())
        rows.add_row(*(f"{value:,.4g}" for value in values), f"{point['share_of_floor']:.0%}")
    return rows


def draw(figure: Any, results: Mapping[str, Any]) -> None:
    """Draw TTFT with its fit, TPOT over context and throughput over batch size, each with its limit."""
    ttft, tpot, batch = figure.subplots(1, 3)
    fit = results["fit"]
    prompts, by_context, by_batch = results["ttft"], results["tpot_by_context"], results["by_batch"]
    _beside_limit(ttft, [(p["prompt_length"], 1e3 * p["ttft_s"], 1e3 * p["floor_s"]) for p in prompts])
    smooth = np.linspace(0, prompts[-1]["prompt_length"], 100)
    curve = 1e3 * (fit["a"] + fit["b"] * smooth + fit["c"] * smooth**2)
    ttft.plot(smooth, curve, color=MEASURED, linewidth=1, label=f"fit, R² = {fit['r_squared']:.4f}")
    _beside_limit(tpot, [(p["context"], 1e3 * p["tpot_s"], 1e3 * p["floor_s"]) for p in by_context])
    tpot.set_ylim(bottom=0)
    _beside_limit(batch, [(p["num_requests"], p["tok_s"], p["num_requests"] / p["floor_s"]) for p in by_batch])
    labels = (("prompt tokens", "TTFT, ms"), ("context", "TPOT, ms"), ("requests at once", "output tokens per second"))
    for axes, (x, y) in zip((ttft, tpot, batch), labels, strict=True):
        style_axes(axes, xlabel=x, ylabel=y)


def _beside_limit(axes: Any, points: Sequence[tuple[float, float, float]]) -> None:
    """Draw points given as (x, measured value, limit)."""
    x, measured, limit = zip(*points, strict=True)
    axes.plot(x, measured, "o", color=MEASURED, label="measured")
    axes.plot(x, limit, "--", color=PREDICTED, label="limit of this machine")


def decode_steps_per_1k_prompt(results: Mapping[str, Any]) -> float:
    """Return how many decode steps of one request take as long as a prompt of 1,000 tokens, by the fitted curve."""
    fit = results["fit"]
    prompt_s = fit["a"] + 1e3 * fit["b"] + 1e6 * fit["c"]
    return prompt_s / (results["device_seconds_per_1k_tokens"]["output_alone"] / 1000)


_WARM_UP = (32, 8)
"""Prompt and output tokens of the warm-up."""
_MAX_SIZE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """Options: the ranges to sweep, and the result files."""

    prompt_lengths: str = "16,32,64,128,256,512,1024,2048"
    """Prompts whose TTFT is measured and fitted; three or more."""
    contexts: str = "64,256,512,1024,2048"
    """Prompt lengths after which one request decodes, for TPOT over context."""
    batch_sizes: str = "1,2,4,8,16,32"
    """Numbers of requests that decode at once, for tokens per second over batch size."""
    batch_context: int = 128
    """Prompt length of these requests."""
    steps: int = 24
    """Decode steps at each point; their median counts."""
    repeats: int = 3
    """Prompts of each length; the median counts."""
    price_per_hour: float | None = None
    """Price of this machine per hour, in any currency: adds the cost per million input and output tokens."""
    name: str = ""
    """Name of the result files; default: sweep-MODEL, with the quantization."""
    results: Path = DEFAULT_FOLDER
    """Folder of the result files."""
    plots: bool = True
    """Draw a PNG beside the JSON (needs the extra 'bench')."""

    def __post_init__(self) -> None:
        """Check what needs no model."""
        for name in ("batch_context", "steps", "repeats"):
            check_int(name, getattr(self, name), 1, _MAX_SIZE)
        check_bool("plots", self.plots)
        check_price_per_hour(self.price_per_hour)
        if Path(self.name).name != self.name or self.name.startswith("."):
            raise InvalidParameter("name", self.name, "must be a file name without folders", "The folder is --results.")
        fit_quadratic(self.lengths("prompt_lengths"), [0.0] * len(self.lengths("prompt_lengths")))
        assert self.lengths("contexts")
        assert self.lengths("batch_sizes")

    def lengths(self, name: str) -> tuple[int, ...]:
        """Return one of the lists as increasing numbers without duplicates.

        Raises:
            InvalidParameter: the text is not such a list.
        """
        return parse_ints(name, getattr(self, name), 1, _MAX_SIZE)


@dataclass(frozen=True, slots=True)
class Sweep:
    """All measured points, and the fit."""

    prefill: tuple[PrefillPoint, ...]
    fit: QuadraticFit
    """Fit of TTFT over prompt length."""
    by_context: tuple[DecodePoint, ...]
    by_batch: tuple[DecodePoint, ...]

    def raised(self, machine: MachineLimits) -> MachineLimits:
        """Return limits at which no point is faster than its floor; unchanged if none is."""
        for prompt in self.prefill:
            machine = prompt.raised(machine)
        for point in (*self.by_context, *self.by_batch):
            machine = machine.raised_by(point.cost, point.tpot_s)
        return machine

    def as_json(self, machine: MachineLimits, price_per_hour: float | None = None) -> dict[str, Any]:
        """Return times in seconds, rates in tokens per second, and shares of the floor, at most 1 (see `raised`).

        Args:
            machine: the limits of the machine.
            price_per_hour: price of the machine per hour; None leaves out the cost.
        """
        decode_alone, decode_full = self.by_batch[0], self.by_batch[-1]
        fastest = max(self.prefill, key=lambda point: point.tok_s)
        rates = {
            "input": fastest.tok_s,
            "output_alone": decode_alone.tok_s,
            "output_in_the_largest_batch": decode_full.tok_s,
        }
        cost = None
        if price_per_hour is not None:
            cost = {name: cost_per_million_tokens(price_per_hour, tok_s) for name, tok_s in rates.items()}
        return {
            "machine": asdict(machine),
            "ttft": [
                {
                    "prompt_length": point.prompt_length,
                    "ttft_s": point.ttft_s,
                    "fitted_s": self.fit.at(point.prompt_length),
                    "tok_s": point.tok_s,
                    "floor_s": point.floor_s(machine),
                    "share_of_floor": point.floor_s(machine) / point.ttft_s,
                }
                for point in self.prefill
            ],
            "fit": asdict(self.fit),
            "tpot_by_context": [_decode_json(point, machine) for point in self.by_context],
            "by_batch": [_decode_json(point, machine) for point in self.by_batch],
            "prefill_to_decode": {
                "of_one_request": fastest.tok_s / decode_alone.tok_s,
                "of_the_largest_batch": fastest.tok_s / decode_full.tok_s,
            },
            "device_seconds_per_1k_tokens": {name: 1000 / tok_s for name, tok_s in rates.items()},
            "cost_per_million_tokens": cost,
        }


def _decode_json(point: DecodePoint, machine: MachineLimits) -> dict[str, float]:
    floor_s = point.floor_s(machine)
    return {
        "num_requests": point.num_requests,
        "context": point.context,
        "tpot_s": point.tpot_s,
        "tok_s": point.tok_s,
        "floor_s": floor_s,
        "share_of_floor": floor_s / point.tpot_s,
    }


def run_sweep(
    options: SweepOptions | None = None, load: LoadConfig | None = None, cache: CacheConfig | None = None
) -> BenchResult:
    """Load the model, measure every point, and save JSON and PNG.

    Args:
        options: the ranges to sweep.
        load: the model.
        cache: settings of its KV cache; the prefix cache is always off, because every prompt must be computed.

    Raises:
        InvalidParameter: a length exceeds the model's context, or results cannot be written.
        SetupError: the model cannot be loaded, or matplotlib is missing although plots are requested.
    """
    options, load = options or SweepOptions(), load or LoadConfig()
    cache = replace(cache or CacheConfig(), enable_prefix_caching=False)
    check_folder(options.results)
    if load.device != "cpu":
        limit = "the limits for comparison are measured only on CPUs"
        raise InvalidParameter("device", load.device, limit, "`python -m benchmarks reproduce card` measures a GPU.")
    files = find_model_of(load)
    model = files.config()
    is_quantized = (
        load.quantization is not None
        or weights_of(files, model, load, torch.device(load.device)).quantization is not None
    )
    dtype = model.dtype if load.dtype == "auto" else load.dtype
    threads = load.threads or Hardware.of_this_machine().cores
    operators = operators_for(
        torch.device(load.device),
        getattr(torch, dtype),
        load.kernels,
        load.activation_quantization,
        batch_invariant=load.batch_invariant,
    )
    before = measure_limits(operators, threads)
    sweep = measure_sweep(options, load, cache, model.max_context)
    after = measure_limits(operators, threads)
    limits = before.best_of(after)
    in_int8 = is_quantized and operators.keeps_quantized and load.activation_quantization != "none"
    measured = limits.of("int8" if in_int8 else dtype)
    machine = sweep.raised(measured)
    suffix = f"-{load.quantization}" if load.quantization else ""
    suffix += "" if load.load_format == "auto" else f"-{load.load_format}"
    suffix += "" if load.batch_invariant else "-not-batch-invariant"
    name = options.name or f"sweep-{Path(model_name(load.model)).name}{suffix}"
    result = record(
        "twostroke bench sweep",
        options,
        load,
        cache,
        name=name,
        config={"load": settings(load), "cache": settings(cache), "threads": threads},
        workload={key: getattr(options, key) for key in ("prompt_lengths", "contexts", "batch_sizes", "batch_context")},
        results={
            "limits": limits.as_json(),
            "raised": None if machine == measured else asdict(machine),
            **sweep.as_json(machine, options.price_per_hour),
        },
        warmup=1,
        repeats=options.repeats,
    )
    if options.plots:
        save_figure(lambda figure: draw(figure, result.results), options.results / f"{name}.png", size=(11, 4))
    return result


def measure_sweep(options: SweepOptions, load: LoadConfig, cache: CacheConfig, max_context: int) -> Sweep:
    """Measure every point on one engine with the scheduler's defaults.

    Raises:
        InvalidParameter: a length exceeds the model's context.
    """
    prompts, contexts, batches = (options.lengths(name) for name in ("prompt_lengths", "contexts", "batch_sizes"))
    scheduler = SchedulerConfig(max_num_seqs=batches[-1])
    budget, steps = scheduler.max_num_batched_tokens, options.steps
    in_batch = {n: output_length(n, options.batch_context, steps, budget) for n in batches}
    longest = max(
        sum(_WARM_UP),
        prompts[-1] + 1,
        contexts[-1] + output_length(1, contexts[-1], steps, budget),
        options.batch_context + max(in_batch.values()),
    )
    if longest > max_context:
        limit = f"the longest request would be {longest} tokens; the model's context is {max_context}"
        raise InvalidParameter("prompt_lengths and contexts", f"{prompts[-1]}, {contexts[-1]}", limit, "Shorten them.")
    cache = _with_kv_blocks(cache, longest, batches[-1] * (options.batch_context + in_batch[batches[-1]]), batches[-1])
    costed = EventRing(1)  # the journal computes costs only if there is a listener
    engine = model_engine(replace(load, max_model_len=longest), scheduler, cache, [costed])
    try:
        return _measure(options, engine, in_batch, budget)
    finally:
        engine.close()


def _measure(options: SweepOptions, engine: ModelEngine, in_batch: Mapping[int, int], budget: int) -> Sweep:
    prompts, contexts = options.lengths("prompt_lengths"), options.lengths("contexts")
    measure_decode(engine, 1, *_WARM_UP, progress="sweep, warm-up")
    prefill = tuple(measure_prefill(engine, n, options.repeats, f"sweep, prompt of {n}") for n in prompts)
    by_context = [
        measure_decode(engine, 1, n, output_length(1, n, options.steps, budget), f"sweep, context {n}")
        for n in contexts
    ]
    by_batch = [
        measure_decode(engine, n, options.batch_context, outputs, f"sweep, batch {n}")
        for n, outputs in in_batch.items()
    ]
    fit = fit_quadratic([point.prompt_length for point in prefill], [point.ttft_s for point in prefill])
    return Sweep(prefill, fit, tuple(by_context), tuple(by_batch))


def _with_kv_blocks(cache: CacheConfig, longest: int, in_batch: int, num_requests: int) -> CacheConfig:
    """Return the cache settings with room for the longest request alone and for the largest batch.

    The two never run at once, so this is less than room for both.
    """
    if cache.num_kv_blocks is not None or cache.kv_cache_memory is not None:
        return cache
    tokens = max(longest, in_batch + num_requests * cache.block_size)
    return replace(cache, num_kv_blocks=-(-tokens // cache.block_size) + 1)
