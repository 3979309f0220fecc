"""Timing of each operator on each backend, after its result was compared with the reference's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from rich.console import Console
from torch import Tensor
from tqdm.auto import tqdm

from twostroke.config.checks import check_bool, check_choice, check_int, check_text
from twostroke.config.load import MAX_THREADS, Kernels
from twostroke.config.model import ModelConfig
from twostroke.hardware import Hardware
from twostroke.kernels import native
from twostroke.kernels.dispatch import operators_for
from twostroke.measure.limits import MachineRates, format_limits, measure_limits
from twostroke.measure.operators.subjects import (
    Subject,
    attention_subjects,
    linear_subjects,
    norm_subjects,
    rotate_subjects,
    sampling_subjects,
)
from twostroke.measure.report import DEFAULT_FOLDER, BenchResult, check_folder, median, model_name, record
from twostroke.model.model_files import find_model
from twostroke.tables import plain_table, print_table


class _Subjects(Protocol):
    def __call__(self, config: ModelConfig, *, quick: bool) -> Iterator[Subject]: ...


OPERATORS: Mapping[str, _Subjects] = {
    "linear": linear_subjects,
    "attention": attention_subjects,
    "rms_norm": norm_subjects,
    "rotate": rotate_subjects,
    "sampling": sampling_subjects,
}
"""Functions that yield the subjects of each operator, by name."""

_COLD_BYTES = 600 << 20
"""Bytes read between two runs on the same copy of a constant: twice the largest shared caches."""
_MAX_COPIES = 256
_LEAST_S, _LEAST_REPEATS, _MAX_REPEATS = 0.2, 3, 200


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelOptions:
    """Options: the operators and backends to measure, and the result file."""

    model: str = "embedded"
    """Model whose shapes are used: a model folder, a GGUF file, a hub id, or 'embedded'. Its weights are not read."""
    operator: str = "all"
    """linear, attention, rms_norm, rotate, sampling, or all."""
    backend: str = "auto"
    """'auto' measures the reference and the best level of this processor, 'all' every level; or the name of one."""
    quick: bool = False
    """Fewer shapes and a single copy of each weight, which caches may hold; saved under a name of its own."""
    threads: int | None = None
    """Threads of every operator; default: the processors available to this process."""
    results: Path = DEFAULT_FOLDER
    """Folder of the JSON file."""

    def __post_init__(self) -> None:
        """Check what needs no model; raise if the processor does not support the backend."""
        check_text("model", self.model)
        check_choice("operator", self.operator, (*OPERATORS, "all"))
        check_choice("backend", self.backend, ("auto", "all", "reference", *native.levels()))
        check_bool("quick", self.quick)
        check_int("threads", 1 if self.threads is None else self.threads, 1, MAX_THREADS)

    @property
    def backends(self) -> tuple[str, ...]:
        """Backend names as `operators_for` takes them, the reference first."""
        levels = native.levels()
        if self.backend == "auto":
            return ("reference", *levels[-1:])
        return ("reference", *levels) if self.backend == "all" else (self.backend,)


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurement of one operator at one size on one backend."""

    operator: str
    kind: str
    backend: str
    shape: str
    error: float
    """Error against the reference; see `Subject.error`."""
    is_right: bool
    """Whether the error is within the tolerance; a wrong result is not timed."""
    seconds: float | None
    gb_s: float | None
    gflop_s: float | None
    share_of_limit: float | None
    """Least time that the machine's limits allow, divided by the time taken; None if caches hold the data."""


def run_kernels(options: KernelOptions | None = None) -> BenchResult:
    """Check and time the operators, and save the table as JSON.

    Raises:
        InvalidParameter: results cannot be written.
        SetupError: the model's config cannot be read.
    """
    options = options or KernelOptions()
    check_folder(options.results)
    config = find_model(options.model).config()
    threads = options.threads or Hardware.of_this_machine().cores
    limits = measure_limits(operators_for(torch.device("cpu"), torch.bfloat16), threads)
    with torch.inference_mode():
        found = list(_measure_all(config, options, limits, threads))
    name = f"kernels-{Path(model_name(options.model)).name}{'-quick' if options.quick else ''}"
    return record(
        "twostroke bench kernels",
        options,
        name=name,
        config={"threads": threads, "backends": options.backends},
        workload={"model": model_name(options.model), "operator": options.operator, "quick": options.quick},
        results={"limits": limits.as_json(), "kernels": [asdict(one) for one in found]},
        warmup=1,
    )


def _measure_all(config: ModelConfig, options: KernelOptions, limits: MachineRates, threads: int) -> Iterator[Measured]:
    chosen = OPERATORS if options.operator == "all" else {options.operator: OPERATORS[options.operator]}
    subjects = [subject for subjects in chosen.values() for subject in subjects(config, quick=options.quick)]
    cold_bytes = 0 if options.quick else _COLD_BYTES
    with tqdm(subjects, unit="operator", disable=None, leave=False) as bar:
        for subject in bar:
            for backend in options.backends:
                bar.set_description(f"{subject.operator} {subject.kind}, {backend}")
                yield from measure(subject, backend, limits, threads, cold_bytes)


def measure(subject: Subject, backend: str, limits: MachineRates, threads: int, cold_bytes: int) -> Iterator[Measured]:
    """Measure one subject at all of its sizes on one backend.

    Args:
        subject: the operator.
        backend: name of the backend.
        limits: limits of this machine.
        threads: threads that compute.
        cold_bytes: bytes to read between two runs on the same memory.
    """
    operators = operators_for(torch.device("cpu"), subject.dtype, cast(Kernels, backend))
    operators.set_num_threads(threads)
    copies = [subject.build(operators) for _ in range(num_copies(subject.constant_bytes, cold_bytes))]
    limit = limits.of(subject.product)
    is_cold = len(copies) > 1
    for index, point in enumerate(subject.points):
        error = subject.error(index, copies[0](index).clone())
        operators.set_num_threads(threads)  # computing the reference may have changed torch's threads
        is_right = error <= subject.tolerance
        seconds = time_of([partial(copy, index) for copy in copies]) if is_right else None
        memory_s, arithmetic_s = point.num_bytes / limit.bytes_per_s, point.operations / limit.flops_per_s
        least_s, is_bound_by_arithmetic = max(memory_s, arithmetic_s), arithmetic_s > memory_s
        yield Measured(
            operator=subject.operator,
            kind=subject.kind,
            backend=backend,
            shape=point.shape,
            error=error,
            is_right=is_right,
            seconds=seconds,
            gb_s=seconds and point.num_bytes / seconds / 1e9,
            gflop_s=seconds and point.operations / seconds / 1e9,
            share_of_limit=seconds and least_s / seconds if is_cold or is_bound_by_arithmetic else None,
        )


def num_copies(constant_bytes: int, cold_bytes: int) -> int:
    """Return how many copies of a constant, used in rotation, keep each out of the caches between uses.

    >>> num_copies(6 << 20, 600 << 20), num_copies(0, 600 << 20), num_copies(311 << 20, 600 << 20)
    (101, 1, 3)
    """
    if not constant_bytes or not cold_bytes:
        return 1
    return min(_MAX_COPIES, cold_bytes // constant_bytes + 2 - (cold_bytes % constant_bytes == 0))


def time_of(copies: Sequence[Callable[[], Tensor]]) -> float:
    """Return the median seconds of a run; copies are used in rotation, so that no constants are in a cache."""
    taken: list[float] = []
    began_s = time.perf_counter()
    while len(taken) < _MAX_REPEATS:
        begin_s = time.perf_counter()
        if len(taken) >= max(_LEAST_REPEATS, 1) and begin_s - began_s > _LEAST_S:
            break
        copies[(len(taken) + 1) % len(copies)]()
        taken.append(time.perf_counter() - begin_s)
    return median(taken)


def print_kernels(results: Mapping[str, Any], console: Console | None = None) -> None:
    """Print the table, followed by the machine's limits."""
    console = console or Console()
    rows = plain_table(("operator", "backend", "shape"), ("error", "us", "GB/s", "GFLOP/s", "of limit"))
    for one in results["kernels"]:
        head = (f"{one['operator']} {one['kind']}", one["backend"], one["shape"], f"{one['error']:.1e}")
        if one["is_right"]:
            share = one["share_of_limit"]
            rates = (f"{one['gb_s']:,.1f}", f"{one['gflop_s']:,.0f}", "-" if share is None else f"{share:.0%}")
            rows.add_row(*head, f"{1e6 * one['seconds']:,.0f}", *rates)
        else:
            rows.add_row(*head, "[bold red]WRONG[/]")
    print_table(rows, console)
    console.print(format_limits(results["limits"], ",.1f"))
