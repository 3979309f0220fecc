"""The measured machine: a card, or the processors in its place. It contains all code that calls CUDA.

It can trace some equal steps in the middle of a run.
"""

from __future__ import annotations

import gc
import json
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.card.arithmetic import Busy, Interval
from benchmarks.claim import MissingHardware
from twostroke.batch import ScheduledBatch
from twostroke.config.load import Device
from twostroke.cost.step_cost import MachineLimits
from twostroke.errors import SetupError
from twostroke.hardware import Hardware
from twostroke.runner.machine_limits import gpu_seconds
from twostroke.startup.cuda_device import REMEDY, CudaFacts, check_cuda, cuda_facts

_REPEATS = 12


class Processors:
    """The processors, measured in place of a card; their figures are not a card's."""

    device: Device = "cpu"
    name = "no card: the processors in its place"
    """Display name of the machine."""
    traced = frozenset({"cpu_op"})
    """Categories of a trace that are work of the device."""
    copy_bytes = 1 << 26
    """Bytes of a copy that exceeds the caches."""
    matrix_sides: tuple[int, ...] = (256,)
    """Sides of the matrix products that are tried."""

    def hardware(self) -> Hardware:
        """Return the hardware description for the result."""
        return Hardware.of_this_machine()

    def best_s(self, work: Callable[[], object], repeats: int) -> float:
        """Return the device's seconds for some work: the fastest of `repeats` runs, after two that warm up."""
        for _ in range(2):
            work()
        return min(self._seconds(work) for _ in range(repeats))

    def _seconds(self, work: Callable[[], object]) -> float:
        begin_s = time.perf_counter()
        work()
        return time.perf_counter() - begin_s

    def synchronize(self) -> None:
        """Wait until the device has done all its work; a processor has none pending."""

    def give_back(self) -> None:
        """Free memory that is no longer used."""
        gc.collect()


class Card(Processors):
    """The first NVIDIA GPU that this process may use."""

    device: Device = "cuda"
    traced = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
    copy_bytes = 1 << 31
    matrix_sides: tuple[int, ...] = (4096, 8192, 16384)

    def __init__(self, facts: CudaFacts) -> None:
        """Take the facts of a card that passed `check_cuda`."""
        self.name = facts.name
        self._built_for = facts.built_for

    def hardware(self) -> Hardware:
        return Hardware.of_this_machine().with_card(self.name, self._built_for)

    def _seconds(self, work: Callable[[], object]) -> float:
        return gpu_seconds(work)  # by events on the device, without the host's time

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def give_back(self) -> None:
        super().give_back()
        torch.cuda.empty_cache()


def find_machine(*, needs_card: bool, facts: CudaFacts | None = None) -> Processors:
    """Return the card, or the processors if there is none.

    Args:
        needs_card: refuse if there is no card.
        facts: PyTorch's facts about CUDA; None: query them, which initializes CUDA.

    Raises:
        MissingHardware: there is no card that PyTorch can use, and one is needed.
    """
    facts = facts or cuda_facts()
    try:
        check_cuda(facts)
    except SetupError as error:
        if not needs_card:
            return Processors()
        missing = str(error).replace(f", {REMEDY}", "")
        raise MissingHardware(
            f"--full measures an NVIDIA GPU, and none can be used. {missing} Without --full, a tiny shape runs here."
        ) from error
    return Card(facts)


def measure_limits(machine: Processors, dtype: torch.dtype) -> MachineLimits:
    """Measure the rates that claims are compared with, at the place and time of the claims.

    Args:
        machine: measured on.
        dtype: of the matrices.

    Returns:
        Operations per second of the fastest product of square matrices, and bytes per second, read and written, of a
        large copy.
    """
    bytes_per_s = _copy_rate(machine)
    flops_per_s = max(_matrix_rate(machine, side, dtype) for side in machine.matrix_sides)
    machine.give_back()
    return MachineLimits(flops_per_s, bytes_per_s)


def _copy_rate(machine: Processors) -> float:
    source = torch.ones(machine.copy_bytes // 4, dtype=torch.float32, device=machine.device)
    target = torch.empty_like(source)
    return 2 * machine.copy_bytes / machine.best_s(lambda: target.copy_(source), _REPEATS)


def _matrix_rate(machine: Processors, side: int, dtype: torch.dtype) -> float:
    # random numbers: with zeros a card takes less power, and runs faster than in real use
    a, b = torch.randn(2, side, side, device=machine.device).to(dtype)
    product = torch.empty_like(a)

    def multiply() -> Tensor:
        return torch.matmul(a, b, out=product)

    return 2 * side**3 / machine.best_s(multiply, _REPEATS)


class Tracer:
    """Trace of the device's work between `start` and `stop`, by torch's profiler.

    It has to be made before any graph is recorded: the profiler sets up its callbacks once, and may miss kernels of
    graphs that already exist.

    Args:
        machine: what is traced.
    """

    def __init__(self, machine: Processors) -> None:
        self._machine = machine
        activities = torch.profiler.ProfilerActivity
        self._activity = activities.CUDA if machine.device == "cuda" else activities.CPU
        self._profile: Any = None
        self.start()
        torch.ones(8, device=machine.device).sum()
        self.stop()

    def start(self) -> None:
        """Start tracing, after waiting for the device so that no older work is traced."""
        self._machine.synchronize()
        self._profile = torch.profiler.profile(activities=[self._activity])
        self._profile.start()

    def stop(self) -> list[Interval]:
        """Wait for the device; return its work since `start`."""
        self._machine.synchronize()
        self._profile.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            trace = json.loads(path.read_text(encoding="utf-8"))
        self._profile = None
        return work_in(trace, self._machine.traced)


def work_in(trace: Mapping[str, Any], categories: frozenset[str]) -> list[Interval]:
    """Return the events of a Chrome trace in these categories; its times are microseconds.

    >>> event = {"ph": "X", "cat": "kernel", "ts": 10.0, "dur": 5.0}
    >>> work_in({"traceEvents": [event, {**event, "cat": "gpu_user_annotation"}, {"ph": "M"}]}, frozenset({"kernel"}))
    [Interval(begin_s=1e-05, end_s=1.5e-05)]
    """
    return [
        Interval(event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
        for event in trace["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in categories
    ]


_STEPS_BEFORE = 8
"""Equal steps before the trace: the second one records graphs and starts to run ahead."""


class TracedSteps:
    """Observer of batches that starts the tracer between two batches and stops it between two others.

    At these points everything of earlier batches has been enqueued, sampling included, and the tracer waits for it. So
    it traces whole steps.

    Args:
        tracer: records the work.
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._num_decodes = self._num_steps = self._num_seen = 0
        self._work: list[Interval] | None = None

    @staticmethod
    def num_outputs(num_steps: int) -> int:
        """Return the decode-only steps that a run needs to trace `num_steps`; one more stops the tracer."""
        return _STEPS_BEFORE + num_steps + 1

    def arm(self, num_decodes: int, num_steps: int) -> None:
        """Trace the next steps with `num_decodes` decodes and nothing else."""
        self._num_decodes, self._num_steps, self._num_seen, self._work = num_decodes, num_steps, 0, None

    def __call__(self, batch: ScheduledBatch) -> None:
        """Start or end the trace when a batch is submitted (RecordingExecutor)."""
        if not self._num_steps or batch.num_prefill_tokens or batch.num_decode_tokens != self._num_decodes:
            return
        if self._num_seen == _STEPS_BEFORE:
            self._tracer.start()
        elif self._num_seen == _STEPS_BEFORE + self._num_steps:
            self._work = self._tracer.stop()
        self._num_seen += 1

    def take(self) -> Busy | None:
        """Return the traced work, None if there was none, and stop tracing."""
        num_steps, self._num_steps = self._num_steps, 0
        if self._work is None and self._num_seen > _STEPS_BEFORE:  # the run has ended too early
            self._tracer.stop()
        return None if self._work is None else Busy.of(self._work, num_steps)
