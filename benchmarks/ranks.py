"""`python -m benchmarks ranks`: what gathering between two ranks takes, and what two ranks make of a machine's cores.

Both communicators gather in turn, A B A B, between this process and one of its own kind. Then one engine of two threads
and one of two ranks with a thread each decode the same requests, in turn as well; their tokens are equal.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.side_by_side import in_turn
from twostroke.client.input_processor import Prompt
from twostroke.communicator.interface import Communicator
from twostroke.communicator.rendezvous import await_ranks, join, listen
from twostroke.config.checks import whole_number
from twostroke.llm import LLM
from twostroke.measure.report import DEFAULT_FOLDER, check_folder, median, percentiles, record
from twostroke.sampling_params import SamplingParams
from twostroke.startup.ranks import connect
from twostroke.tables import plain_table, print_table

SIZES = (512, 4 << 10, 32 << 10, 256 << 10, 2 << 20)
"""Bytes of each rank's part: from a decoded token of a small model to a chunk of a prompt."""
_WARMUP = 20
_PROMPT = list(range(32, 96))


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksOptions:
    """What is measured, and where the result goes."""

    model: str = "embedded"
    """A model folder, a GGUF file, a hub id, or 'embedded'; with an even number of query heads."""
    gathers: int = 400
    """Of each size, in each of two turns of each communicator."""
    batch: int = 4
    """Requests at once."""
    output_tokens: int = 128
    """Of each request."""
    repeats: int = 3
    """Of each engine."""
    name: str = "ranks"
    """Of the file that is written."""
    results: Path = DEFAULT_FOLDER
    """Where it goes."""

    def __post_init__(self) -> None:
        """Checks ranges."""
        for name in ("gathers", "batch", "output_tokens", "repeats"):
            whole_number(name, getattr(self, name), 1)


def run_ranks(options: RanksOptions) -> dict[str, Any]:
    """Measures, and saves JSON.

    Raises:
        SetupError: the model cannot be loaded, or not by two ranks.
    """
    check_folder(options.results)
    gathers = in_turn(2, ("shared memory", "sockets"), lambda name, _: _gather_times(name, options.gathers))
    engines = {"1 rank, 2 threads": (1, 2), "2 ranks, 1 thread each": (2, 1)}
    found = in_turn(options.repeats, engines, lambda name, _: _decode(options, *engines[name]))
    rates = {name: [rate for rate, _ in runs] for name, runs in found.items()}
    results = {
        "all_gather_us": {name: _by_size([times for turn in of for times in turn]) for name, of in gathers.items()},
        "output_tokens_per_s": {name: {"median": median(of), "runs": of} for name, of in rates.items()},
        "tokens_are_equal": len({tuple(made) for runs in found.values() for _, made in runs}) == 1,
    }
    record(
        "python -m benchmarks ranks",
        options,
        workload={"bytes_of_a_part": list(SIZES), "prompt_tokens": len(_PROMPT)},
        results=results,
        warmup=_WARMUP,
        repeats=options.repeats,
    )
    return results


def print_ranks(results: dict[str, Any], console: Console | None = None) -> None:
    """The two tables, for people."""
    out = console or Console()
    times = (f"{backend} us, median (p99)" for backend in results["all_gather_us"])
    gathers = plain_table((), ("bytes of a part", *times))
    for size in SIZES:
        found = [of[str(size)] for of in results["all_gather_us"].values()]
        gathers.add_row(f"{size:,}", *(f"{of['median']:.1f} ({of['p99']:.1f})" for of in found))
    print_table(gathers, out)
    for name, rates in results["output_tokens_per_s"].items():
        out.print(f"{name}: {rates['median']:.1f} output tokens/s")


def _by_size(times: list[list[float]]) -> dict[str, dict[str, float]]:
    """Of two turns, each with a list of times for each size."""
    found: dict[str, dict[str, float]] = {}
    for i, size in enumerate(SIZES):
        all_us = percentiles([1e6 * time_s for of_size in times[i :: len(SIZES)] for time_s in of_size])
        found[str(size)] = {"median": all_us["p50"], "p99": all_us["p99"]}
    return found


def _gather_times(backend: str, num_gathers: int) -> list[list[float]]:
    """Seconds of each gather, for each size."""
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


def _decode(options: RanksOptions, size: int, threads: int) -> tuple[float, list[int]]:
    """Output tokens a second, and the tokens; prompts are computed before, and come from the cache."""
    params = SamplingParams(max_tokens=options.output_tokens, temperature=0, ignore_eos=True)
    first = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    prompts: list[Prompt] = [{"prompt_token_ids": [*_PROMPT, 32 + i]} for i in range(options.batch)]
    with LLM(model=options.model, threads=threads, tensor_parallel_size=size) as llm:
        llm.generate(prompts, first)
        begin_s = time.perf_counter()
        outputs = llm.generate(prompts, params)
        time_s = time.perf_counter() - begin_s
    made = [token for output in outputs for token in output.outputs[0].token_ids]
    return len(made) / time_s, made


def _other_rank() -> None:
    """Rank 1's process."""
    address, backend, num_gathers = sys.argv[1:]
    communicator = connect(1, join(address, 1, 2, 60), shares_memory=backend == "shared memory")
    _gather(communicator, int(num_gathers))
    communicator.close()


if __name__ == "__main__":
    _other_rank()
