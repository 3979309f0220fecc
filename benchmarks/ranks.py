"""`python -m benchmarks ranks`: the time of gathers between two ranks, and the speed of two ranks on a machine's cores.

Both communicators gather alternately, A B A B, between this process and another one. Then one engine of two threads and
one of two ranks with a thread each compute a prompt and decode the same requests, also alternately; their tokens are
equal. For a model with experts, a third engine has whole experts on each rank (`--enable-expert-parallel`).
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.alternating import alternate
from twostroke.client.input_processor import Prompt
from twostroke.communicator.interface import Communicator
from twostroke.communicator.rendezvous import await_ranks, join, listen
from twostroke.config.checks import check_int
from twostroke.llm import LLM
from twostroke.measure.report import DEFAULT_FOLDER, check_folder, median, percentiles, record
from twostroke.model.model_files import find_model
from twostroke.sampling_params import SamplingParams
from twostroke.startup.ranks import connect
from twostroke.tables import plain_table, print_table

SIZES = (512, 4 << 10, 32 << 10, 256 << 10, 2 << 20)
"""Bytes of each rank's part: from a decoded token of a small model to a chunk of a prompt."""
_WARMUP = 20
_PROMPT = list(range(32, 96))


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksOptions:
    """Options of the measurement, and the result's place."""

    model: str = "embedded"
    """A model folder, a GGUF file, a hub id, or 'embedded'; with an even number of query heads."""
    gathers: int = 400
    """Gathers of each size, in each of two turns of each communicator."""
    batch: int = 4
    """Simultaneous requests."""
    output_tokens: int = 128
    """Output tokens of each request."""
    long_prompt: int = 512
    """Tokens of the prompt that is computed alone."""
    repeats: int = 3
    """Repetitions with each engine."""
    name: str = "ranks"
    """Name of the written file."""
    results: Path = DEFAULT_FOLDER
    """Folder for the result."""

    def __post_init__(self) -> None:
        for name in ("gathers", "batch", "output_tokens", "long_prompt", "repeats"):
            check_int(name, getattr(self, name), 1)


def run_ranks(options: RanksOptions) -> dict[str, Any]:
    """Measure gathers and engines, and save JSON.

    Raises:
        SetupError: the model cannot be loaded, or cannot be split over two ranks.
    """
    check_folder(options.results)
    gathers = alternate(2, ("shared memory", "sockets"), lambda name, _: _gather_times(name, options.gathers))
    engines: dict[str, dict[str, Any]] = {
        "1 rank, 2 threads": {"threads": 2},
        "2 ranks, 1 thread each": {"threads": 1, "tensor_parallel_size": 2},
    }
    if _has_experts(options.model):
        dealt = {"enable_expert_parallel": True, **engines["2 ranks, 1 thread each"]}
        engines["2 ranks, whole experts on each"] = dealt
    found = alternate(options.repeats, engines, lambda name, _: _run(options, engines[name]))
    results = {
        "all_gather_us": {name: _by_size([times for turn in of for times in turn]) for name, of in gathers.items()},
        "output_tokens_per_s": _medians({name: [run.output_rate for run in runs] for name, runs in found.items()}),
        "prompt_tokens_per_s": _medians({name: [run.prompt_rate for run in runs] for name, runs in found.items()}),
        "tokens_are_equal": len({run.token_ids for runs in found.values() for run in runs}) == 1,
    }
    record(
        "python -m benchmarks ranks",
        options,
        workload={
            "bytes_of_a_part": list(SIZES),
            "prompt_tokens": len(_PROMPT),
            "long_prompt_tokens": options.long_prompt,
        },
        results=results,
        warmup=_WARMUP,
        repeats=options.repeats,
    )
    return results


def print_ranks(results: dict[str, Any], console: Console | None = None) -> None:
    """Print the two tables."""
    out = console or Console()
    times = (f"{backend} us, median (p99)" for backend in results["all_gather_us"])
    gathers = plain_table((), ("bytes of a part", *times))
    for size in SIZES:
        found = [of[str(size)] for of in results["all_gather_us"].values()]
        gathers.add_row(f"{size:,}", *(f"{of['median']:.1f} ({of['p99']:.1f})" for of in found))
    print_table(gathers, out)
    for name, rates in results["output_tokens_per_s"].items():
        prompt = results["prompt_tokens_per_s"][name]["median"]
        out.print(f"{name}: {rates['median']:.1f} output tokens/s, {prompt:.1f} prompt tokens/s")


def _by_size(times: list[list[float]]) -> dict[str, dict[str, float]]:
    """Return median and p99 by size, from two turns that each have a list of times per size."""
    found: dict[str, dict[str, float]] = {}
    for i, size in enumerate(SIZES):
        all_us = percentiles([1e6 * time_s for of_size in times[i :: len(SIZES)] for time_s in of_size])
        found[str(size)] = {"median": all_us["p50"], "p99": all_us["p99"]}
    return found


def _gather_times(backend: str, num_gathers: int) -> list[list[float]]:
    """Return the seconds of each gather, for each size."""
    with tempfile.TemporaryDirectory() as folder, listen(f"{folder}/0") as listener:
        command = [sys.executable, "-m", "benchmarks.ranks", f"{folder}/0", backend, str(num_gathers)]
        with subprocess.Popen(command) as process:
            sockets = await_ranks(listener, 2, 60, lambda: None if process.poll() is None else "it has ended")
            communicator = connect(0, sockets, shares_memory=backend == "shared memory")
            times = _gather(communicator, num_gathers)
            communicator.close()
    return times


def _gather(communicator: Communicator, num_gathers: int) -> list[list[float]]:
    found: list[list[float]] = []
    for size in SIZES:
        widths = [size] * communicator.size
        local, out = torch.ones(size, dtype=torch.uint8), torch.ones(sum(widths), dtype=torch.uint8)
        communicator.barrier()
        times: list[float] = []
        for _ in range(_WARMUP + num_gathers):
            begin_s = time.perf_counter()
            communicator.all_gather(local, out, widths)
            times.append(time.perf_counter() - begin_s)
        found.append(times[_WARMUP:])
    communicator.barrier()
    return found


@dataclass(frozen=True, slots=True)
class _Run:
    """Measurements of one engine."""

    output_rate: float
    """Output tokens per second, of all requests together; their prompts come from the cache."""
    prompt_rate: float
    """Prompt tokens per second of one long prompt."""
    token_ids: tuple[int, ...]


def _run(options: RanksOptions, settings: Mapping[str, Any]) -> _Run:
    """Start an engine, compute a long prompt, and decode."""
    params = SamplingParams(max_tokens=options.output_tokens, temperature=0, ignore_eos=True)
    few, one = (SamplingParams(max_tokens=num, temperature=0, ignore_eos=True) for num in (8, 1))
    prompts: list[Prompt] = [{"prompt_token_ids": [*_PROMPT, 32 + i]} for i in range(options.batch)]
    long: Prompt = {"prompt_token_ids": [32 + i % 64 for i in range(1, 1 + options.long_prompt)]}
    with LLM(model=options.model, max_num_batched_tokens=max(512, options.long_prompt), **settings) as llm:
        llm.generate(prompts, few)
        begin_s = time.perf_counter()
        of_long = llm.generate([long], one)
        prompt_s = time.perf_counter() - begin_s
        begin_s = time.perf_counter()
        outputs = llm.generate(prompts, params)
        time_s = time.perf_counter() - begin_s
    made = tuple(token for output in outputs for token in output.outputs[0].token_ids)
    return _Run(len(made) / time_s, options.long_prompt / prompt_s, (*made, *of_long[0].outputs[0].token_ids))


def _has_experts(model: str) -> bool:
    return any(layer.experts is not None for layer in find_model(model).config().kinds)


def _medians(rates: Mapping[str, list[float]]) -> dict[str, dict[str, Any]]:
    return {name: {"median": median(runs), "runs": runs} for name, runs in rates.items()}


def _other_rank() -> None:
    """Run rank 1."""
    address, backend, num_gathers = sys.argv[1:]
    communicator = connect(1, join(address, 1, 2, 60), shares_memory=backend == "shared memory")
    _gather(communicator, int(num_gathers))
    communicator.close()


if __name__ == "__main__":
    _other_rank()
