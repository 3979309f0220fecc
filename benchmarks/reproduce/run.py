"""Reproduction of results of the field: each is predicted, then measured, then saved as JSON and PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.claim import MissingHardware, ReproduceOptions, Reproduction, table
from twostroke.errors import InvalidParameter
from twostroke.kernels.dispatch import operators_for
from twostroke.measure.figure import save_figure
from twostroke.measure.report import BenchResult, check_folder, command_line, save
from twostroke.tables import print_table


@dataclass(frozen=True, slots=True)
class Study:
    """A result of the field, and the function that reproduces it."""

    module: str
    """Module in this package."""
    title: str
    needs_model: str = ""
    """Reason why nothing runs without a model; empty: a part of it runs."""
    function: str = "reproduce"
    """Function in the module."""


_MODEL = "this needs a model: nothing was run"

RESULTS: Mapping[str, Study] = {
    "r1": Study("r1_batching", "R1: continuous against static batching"),
    "occupancy": Study("occupancy", "Slots in use, step by step: static against continuous batching"),
    "r2": Study("r2_hostage", "R2: one long request holds nine short ones hostage"),
    "r3": Study("skewed", "R3: share of allocated KV slots that hold nothing", function="reproduce_waste"),
    "r4": Study("skewed", "R4: requests running at once in equal KV memory", function="reproduce_concurrency"),
    "r5": Study("chunks", "R5: p99 ITL against TTFT, by the budget of a step", _MODEL),
    "r6": Study("chunks", "R6: chunks and mixed batches, each alone and both", _MODEL, "reproduce_ablation"),
    "r7": Study("pools", "R7: goodput with and without disaggregation", _MODEL, "reproduce_disaggregation"),
    "r10": Study("r10_prefix_cache", "R10: prefix-cache hits on request traces"),
    "r11": Study("caches", "R11: the cost of prefix caching without hits", _MODEL),
    "r13": Study("step_times", "R13: decode beside its roofline", _MODEL, "reproduce_roofline"),
    "step-content": Study(
        "step_times", "Time of a decode step over the content of its tokens", _MODEL, "reproduce_content"
    ),
    "paging-price": Study("prices", "The price of paging: steps over scattered blocks beside KV in one piece", _MODEL),
    "r14": Study("caches", "R14: what the KV cache saves", function="reproduce_without"),
    "engine-time": Study("step_times", "The engine's own time per step"),
    "vs-transformers": Study("vs_transformers", "Ours beside transformers.generate", _MODEL),
    "invariance-price": Study("prices", "The price of batch invariance", _MODEL, "reproduce_invariance"),
    "card": Study("card", "A card beside what it can do at best", _MODEL),
    "server-throughput": Study("server_throughput", "The server beside the offline API, 64 streams", _MODEL),
    "overload": Study("overload", "3 times the capacity of a server", _MODEL),
    "two-tenants": Study("overload", "Two tenants, one of which floods the server", _MODEL, "reproduce_two_tenants"),
    "what-if": Study(
        "planner", "What-ifs from one recorded run, and the runs they predict", _MODEL, "reproduce_what_ifs"
    ),
    "doctor": Study("planner", "The doctor's advice, applied", _MODEL, "reproduce_levers"),
    "doctor-loads": Study("planner", "Five loads, and the doctor's verdict on each", _MODEL),
    "background": Study("background", "Background work beside interactive requests", _MODEL),
    "pools": Study("pools", "two pools on one machine beside one process", _MODEL),
    "chaos": Study("chaos", "clients that vanish, and an engine that is killed", _MODEL),
    "hostile-bodies": Study("hostile_bodies", "Bodies that mean harm", _MODEL),
    "schedules": Study("schedules", "Random schedules of every format and router, bit for bit", _MODEL),
    "soak": Study("soak", "An hour of everything", _MODEL),
    "viewers": Study("live_view", "The live view: 2 viewers and none, 64 streams", _MODEL),
    "live-page": Study(
        "live_view", "The live view in a browser: 1,000 requests, 100,000 blocks", _MODEL, "reproduce_page"
    ),
    "stories": Study("stories", "The six prepared experiments of the lab, started by their buttons", _MODEL),
    "hostile-files": Study("hostile_files", "mutated files of every kind that comes from elsewhere", _MODEL),
    "long-prompt": Study("long_prompt", "A prompt of 131,072 tokens beside 8 short requests"),
}
"""Everything that can be reproduced, by name."""


def reproduce(names: Sequence[str], options: ReproduceOptions, console: Console | None = None) -> list[Reproduction]:
    """Reproduce results, print predictions and measurements, and save both.

    Args:
        names: of RESULTS; "all" means all of them.
        options: sizes, model, places.
        console: for tables; default: standard output.

    Returns:
        The reproductions, in the order of RESULTS.

    Raises:
        InvalidParameter: a name is unknown, or results cannot be written to the folder.
        MissingHardware: this machine lacks something for a result that is requested by name.
    """
    console = console or Console()
    chosen = _chosen(names)
    check_folder(options.results)
    found: list[Reproduction] = []
    for name in chosen:
        study = RESULTS[name]
        try:
            reproduction = _reproduced(study, options)
        except MissingHardware as error:
            if name in names:
                raise
            console.print(f"{name}: left out. {error}\n", style="yellow", highlight=False)
            continue
        found.append(reproduction)
        print_table(table(reproduction.title or study.title, reproduction.claims), console)
        for remark in reproduction.remarks:
            console.print(f"  [yellow]{remark}[/]", highlight=False)
        if reproduction.claims:
            _save(name, reproduction, options, console)
        console.print()
    return found


def _reproduced(study: Study, options: ReproduceOptions) -> Reproduction:
    if study.needs_model and not options.with_model:
        return Reproduction(remarks=(study.needs_model,))
    return getattr(import_module(f"benchmarks.reproduce.{study.module}"), study.function)(options)


def _chosen(names: Sequence[str]) -> list[str]:
    for name in names:
        if name != "all" and name not in RESULTS:
            raise InvalidParameter("name", name, f"must be one of {', '.join(RESULTS)}, or all")
    return [name for name in RESULTS if "all" in names or name in names]


def _with_kernels(config: Mapping[str, Any], options: ReproduceOptions) -> Mapping[str, Any]:
    """Add a processor's default operators, if a model runs and the result does not record its operators."""
    if not options.with_model or "kernels" in config:
        return config
    return {"kernels": operators_for(torch.device("cpu"), torch.bfloat16).name, **config}


def _save(name: str, reproduction: Reproduction, options: ReproduceOptions, console: Console) -> None:
    # small runs are a quick look: they never overwrite a result
    label = options.label or ("" if options.model == "embedded" else Path(options.model_name).name)
    model = f"-{label}" if label else ""
    file_name = f"{name}{model}{'' if options.full else '-small'}"
    result = BenchResult.now(
        file_name,
        command_line(f"python -m benchmarks reproduce {name}", options),
        config=_with_kernels(reproduction.config, options),
        workload=reproduction.workload,
        results={
            "title": reproduction.title or RESULTS[name].title,
            "holds": reproduction.holds,
            "claims": [asdict(claim) for claim in reproduction.claims],
            "remarks": reproduction.remarks,
            **reproduction.details,
        },
        warmup=reproduction.warmup,
        repeats=reproduction.repeats,
    )
    if reproduction.hardware is not None:
        result = replace(result, hardware=reproduction.hardware.as_json())
    saved = [save(result, options.results)]
    if options.plots and reproduction.draw is not None:
        saved.append(
            save_figure(reproduction.draw, options.results / f"{file_name}.png", size=reproduction.figure_size)
        )
    console.print("  saved " + ", ".join(str(path) for path in saved), style="dim", highlight=False)
