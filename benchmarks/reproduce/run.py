"""Reproduces results of the field: each predicted, then measured, then saved as JSON and PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.reproduce.claim import NotOnThisMachine, ReproduceOptions, Reproduction, table
from twostroke.errors import InvalidParameter
from twostroke.kernels.dispatch import operators_for
from twostroke.measure.figure import save_figure
from twostroke.measure.report import BenchResult, check_folder, command_line, save
from twostroke.tables import print_table

RESULTS = {
    "r1": ("benchmarks.reproduce.r1_batching", "continuous against static batching"),
    "occupancy": ("benchmarks.reproduce.occupancy", "slots in use, step by step"),
    "r2": ("benchmarks.reproduce.r2_hostage", "one long request holds nine short ones hostage"),
    "r3": ("benchmarks.reproduce.r3_kv_waste", "KV memory that holds nothing, paged against contiguous"),
    "r4": ("benchmarks.reproduce.r4_concurrency", "requests at once in equal KV memory"),
    "r5": ("benchmarks.reproduce.r5_chunk_budget", "the budget of a step: ITL against TTFT, and a controller"),
    "r6": ("benchmarks.reproduce.r6_ablation", "chunks and mixed batches, each alone and both"),
    "r7": ("benchmarks.reproduce.r7_disaggregation", "goodput with and without disaggregation"),
    "r10": ("benchmarks.reproduce.r10_prefix_cache", "prefix-cache hits on request traces"),
    "r11": ("benchmarks.reproduce.r11_cache_overhead", "the cost of prefix caching without hits"),
    "r13": ("benchmarks.reproduce.r13_roofline", "decode beside its roofline"),
    "step-content": ("benchmarks.reproduce.step_content", "a step's time over the content of its tokens"),
    "paging-price": ("benchmarks.reproduce.paging_price", "steps over scattered blocks beside KV in one piece"),
    "r14": ("benchmarks.reproduce.r14_no_cache", "what the KV cache saves"),
    "engine-time": ("benchmarks.reproduce.engine_time", "the engine's own time per step"),
    "vs-transformers": ("benchmarks.reproduce.vs_transformers", "throughput beside transformers.generate"),
    "invariance-price": ("benchmarks.reproduce.invariance_price", "operators beside torch's, which promise less"),
    "card": ("benchmarks.reproduce.card", "a GPU beside what it can do at best"),
    "server-throughput": ("benchmarks.reproduce.server_throughput", "the server beside the offline API"),
    "overload": ("benchmarks.reproduce.overload", "three times more than a server can do"),
    "two-tenants": ("benchmarks.reproduce.two_tenants", "one tenant floods, another asks"),
    "what-if": ("benchmarks.reproduce.what_ifs", "other settings, predicted from one recorded run, then run"),
    "doctor": ("benchmarks.reproduce.levers", "the doctor's levers, pulled"),
    "doctor-loads": ("benchmarks.reproduce.loads", "five loads, and the doctor's verdict on each"),
    "background": ("benchmarks.reproduce.background", "work that takes what others leave"),
    "pools": ("benchmarks.reproduce.pools", "two pools on one machine beside one process"),
    "chaos": ("benchmarks.reproduce.chaos", "clients that vanish, an engine that is killed"),
    "hostile-bodies": (
        "benchmarks.reproduce.hostile_bodies",
        "large values of every wrong type in every field, digits, unfinished bodies",
    ),
    "soak": ("benchmarks.reproduce.soak", "an hour of everything: bits, memory, p99"),
    "viewers": ("benchmarks.reproduce.viewers", "what the live view costs"),
    "live-page": ("benchmarks.reproduce.live_page", "the live view in a browser: pictures a second, memory"),
    "stories": ("benchmarks.reproduce.stories", "the switchboard's six stories, told by their buttons"),
    "hostile-files": ("benchmarks.reproduce.hostile_files", "mutated files of models, templates, logs"),
    "long-prompt": ("benchmarks.reproduce.long_prompt", "a 131k prompt in chunks beside short requests"),
}
"""Name to the module that reproduces it, and what it is about."""


def reproduce(names: Sequence[str], options: ReproduceOptions, console: Console | None = None) -> list[Reproduction]:
    """Reproduces results, prints prediction beside measurement, and saves both.

    Args:
        names: of RESULTS; "all" stands for every one.
        options: sizes, model, places.
        console: where tables go; default: standard output.

    Returns:
        What was found, in the order of RESULTS.

    Raises:
        InvalidParameter: an unknown name, or a folder that results cannot be written to.
        NotOnThisMachine: one that is asked for by name needs what this machine lacks.
    """
    console = console or Console()
    chosen = _chosen(names)
    check_folder(options.results)
    found: list[Reproduction] = []
    for name in chosen:
        module = import_module(RESULTS[name][0])
        try:
            reproduction: Reproduction = module.reproduce(options)
        except NotOnThisMachine as error:
            if name in names:
                raise
            console.print(f"{name}: left out. {error}\n", style="yellow", highlight=False)
            continue
        found.append(reproduction)
        print_table(table(reproduction.title, reproduction.claims), console)
        for remark in reproduction.remarks:
            console.print(f"  [yellow]{remark}[/]", highlight=False)
        if reproduction.claims:
            _save(name, reproduction, options, console)
        console.print()
    return found


def _chosen(names: Sequence[str]) -> list[str]:
    for name in names:
        if name != "all" and name not in RESULTS:
            raise InvalidParameter("name", name, f"must be one of {', '.join(RESULTS)}, or all")
    return [name for name in RESULTS if "all" in names or name in names]


def _with_kernels(config: Mapping[str, Any], options: ReproduceOptions) -> Mapping[str, Any]:
    """Add a processor's default operators, where a model runs and the result does not say what served."""
    if not options.with_model or "kernels" in config:
        return config
    return {"kernels": operators_for(torch.device("cpu"), torch.bfloat16).name, **config}


def _save(name: str, reproduction: Reproduction, options: ReproduceOptions, console: Console) -> None:
    # small runs are a look, not a result: they never overwrite one
    label = options.label or ("" if options.model == "embedded" else Path(options.model_name).name)
    model = f"-{label}" if label else ""
    file_name = f"{name}{model}{'' if options.full else '-small'}"
    result = BenchResult.now(
        file_name,
        command_line(f"python -m benchmarks reproduce {name}", options),
        config=_with_kernels(reproduction.config, options),
        workload=reproduction.workload,
        results={
            "title": reproduction.title,
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
