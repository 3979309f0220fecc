"""`python -m benchmarks prediction`: errors of predictions, on workloads that no fit has seen.

    for each model and precision
        calibrate     its steps, as `twostroke calibrate` does                      ──► StepTimeModel
        each point    prompts of L tokens, B requests at once, really served        ──► TTFT, TPOT, tokens/s measured
                      the same requests through the simulation                      ──► predicted

The prompt lengths and batches of the points differ from those of the calibration. A machine's clock may change over
hours and would spoil both. So a model's calibration runs right before its points, and each point runs several times.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from tqdm.auto import tqdm

from benchmarks.alternating import medians
from benchmarks.goals import PREDICTION_MEDIAN, PREDICTION_P95
from twostroke.config.cache import CacheConfig
from twostroke.config.checks import check_int, parse_ints
from twostroke.config.load import LoadConfig, QuantizationOnLoad
from twostroke.config.scheduler import SchedulerConfig
from twostroke.cost.step_fit import fit_step_model
from twostroke.errors import InvalidParameter
from twostroke.events import Event
from twostroke.measure.from_log import run_from_log
from twostroke.measure.model_engine import model_engine
from twostroke.measure.report import (
    DEFAULT_FOLDER,
    check_folder,
    model_name,
    percentiles,
    record,
)
from twostroke.measure.steps import measure_steps
from twostroke.measure.workload import SMALL_VOCAB_SIZE, workload_of_lengths
from twostroke.planner.replay import figures as figures_of
from twostroke.simulation.requests import read_recording
from twostroke.simulation.simulate import simulate
from twostroke.tables import plain_table, print_table

COMPARED = ("ttft_p50", "tpot_p50", "output_tok_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionOptions:
    """Grid of the measured points, and the result's place."""

    models: str = "embedded"
    """Model folders, GGUF files, hub ids or 'embedded', separated by commas."""
    precisions: str = "none,int8,int4"
    """Quantizations of the weights, separated by commas; 'none' leaves them as they are."""
    prompts: str = "24,100,400,900"
    """Prompt tokens of a request, separated by commas."""
    batches: str = "1,3,10,40"
    """Simultaneous requests, separated by commas."""
    output_tokens: int = 24
    """Output tokens of each request."""
    repeats: int = 3
    """Repetitions of each point; results are medians."""
    most_prompt_tokens: int = 12_000
    """Most prompt tokens of a point; points with more would take minutes and are skipped."""
    name: str = "prediction"
    """Name of the written file."""
    results: Path = DEFAULT_FOLDER
    """Folder for the result."""

    def __post_init__(self) -> None:
        """Check what needs no model."""
        for precision in self.precisions.split(","):
            known = ("none", *get_args(QuantizationOnLoad))
            if precision not in known:
                limit = f"names {precision!r}; known: {', '.join(known)}"
                raise InvalidParameter("precisions", self.precisions, limit)
        parse_ints("prompts", self.prompts, 1, 1 << 20)
        parse_ints("batches", self.batches, 1, 1 << 12)
        for name in ("output_tokens", "repeats", "most_prompt_tokens"):
            check_int(name, getattr(self, name), 1)

    @property
    def points(self) -> tuple[tuple[int, int], ...]:
        """Prompt tokens and requests of each point."""
        return tuple(
            (prompt, batch)
            for prompt in parse_ints("prompts", self.prompts, 1, 1 << 20)
            for batch in parse_ints("batches", self.batches, 1, 1 << 12)
            if prompt * batch <= self.most_prompt_tokens
        )


def run_prediction(options: PredictionOptions) -> dict[str, Any]:
    """Measure all points, and save JSON.

    Raises:
        SetupError: a model cannot be loaded.
        InvalidParameter: a point exceeds a model's context.
    """
    check_folder(options.results)
    rows = [row for load in _loads(options) for row in _points_of(load, options)]
    off = [abs(row[name]["error"]) for row in rows for name in COMPARED]
    errors = percentiles(off)
    results = {
        "median_error": errors["p50"],
        "p95_error": errors["p95"],
        "holds": errors["p50"] <= PREDICTION_MEDIAN and errors["p95"] <= PREDICTION_P95,
        "by_figure": {name: percentiles([abs(row[name]["error"]) for row in rows]) for name in COMPARED},
        "rows": rows,
    }
    record(
        "python -m benchmarks prediction",
        options,
        workload={"points": options.points},
        results=results,
        warmup=1,
        repeats=options.repeats,
    )
    return results


def print_prediction(results: dict[str, Any], console: Console | None = None) -> None:
    """Print a row for each point."""
    console = console or Console()
    figures = ("prompt", "batch", "TTFT ms", "off", "TPOT ms", "off", "tok/s", "off")
    table = plain_table(("model", "weights"), figures)
    for row in results["rows"]:
        cells = [row["model"], row["precision"], f"{row['prompt']:,}", f"{row['batch']:,}"]
        for name in COMPARED:
            scale = 1.0 if name == "output_tok_s" else 1e3
            cells += [f"{row[name]['measured'] * scale:,.1f}", f"{row[name]['error']:+.1%}"]
        table.add_row(*cells)
    print_table(table, console)
    median, p95 = results["median_error"], results["p95_error"]
    goals = f"goals {PREDICTION_MEDIAN:.0%} and {PREDICTION_P95:.0%}"
    console.print(f"off by {median:.1%} in the median, {p95:.1%} at the 95th percentile ({goals})", highlight=False)


def _loads(options: PredictionOptions) -> Iterator[LoadConfig]:
    for model in options.models.split(","):
        for precision in options.precisions.split(","):
            yield LoadConfig(model=model, quantization=None if precision == "none" else precision)  # pyright: ignore[reportArgumentType]


def _points_of(load: LoadConfig, options: PredictionOptions) -> list[dict[str, Any]]:
    """Calibrate a model, then measure its points."""
    points = options.points
    scheduler = SchedulerConfig(max_num_seqs=max(batch for _, batch in points))
    title = f"{model_name(load.model)} {load.quantization or 'as it is'}"
    step_times = fit_step_model(measure_steps(load, scheduler, CacheConfig(), progress=True).steps)
    most = max(prompt * batch for prompt, batch in points) + max(batch for _, batch in points) * options.output_tokens
    longest = max(prompt for prompt, _ in points) + options.output_tokens
    num_blocks = 4 * (most // CacheConfig().block_size + scheduler.max_num_seqs)
    cache = CacheConfig(enable_prefix_caching=False, num_kv_blocks=num_blocks)
    events: list[Event] = []
    with closing(model_engine(replace(load, max_model_len=longest), scheduler, cache, [events])) as engine:
        engine.run(workload_of_lengths([(16, 4)] * 2, vocab_size=SMALL_VOCAB_SIZE))
        started = events[0]

        def row(prompt: int, batch: int) -> dict[str, Any]:
            measured: list[dict[str, Any]] = []
            predicted: dict[str, Any] = {}
            for i in range(options.repeats):
                events[:] = [started]
                engine.run(
                    workload_of_lengths([(prompt, options.output_tokens)] * batch, vocab_size=SMALL_VOCAB_SIZE, seed=i)
                )
                measured.append(figures_of(run_from_log(events)))
                if not predicted:
                    recording = read_recording(events)
                    predicted = figures_of(simulate(recording.started, recording.requests, step_times))
            precision = load.quantization or "none"
            named = {"model": model_name(load.model), "precision": precision, "prompt": prompt, "batch": batch}
            return named | {
                name: {"measured": value, "predicted": predicted[name], "error": predicted[name] / value - 1}
                for name, value in medians(measured, COMPARED).items()
            }

        return [row(*point) for point in tqdm(points, desc=title, leave=False)]
