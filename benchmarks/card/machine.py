"""Where is measured: a card, or the processors in its place. All that talks to CUDA is here, and thin.

Some steps of a run that are alike, in its middle, can be traced there.
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
from benchmarks.claim import NotOnThisMachine
from twostroke.batch import ScheduledBatch
from twostroke.config.load import Device
from twostroke.cost.step_cost import MachineLimits
from twostroke.errors import SetupError
from twostroke.hardware import Hardware
from twostroke.runner.machine_limits import seconds_on_card
from twostroke.startup.cuda_device import REMEDY, CudaFacts, check_cuda, cuda_facts

_REPEATS = 12


class Processors:
    """The processors, measured in place of a card; their figures say nothing about one."""

    device: Device = "cpu"
    name = "no card: the processors in its place"
    """For people."""
    traced = frozenset({"cpu_op"})
    """Categories of a trace that are work of the device."""
    copy_bytes = 1 << 26
    """Of a copy that caches do not hold."""
    matrix_sides: tuple[int, ...] = (256,)
    """Of products that are tried."""

    def hardware(self) -> Hardware:
        """For the result."""
        return Hardware.of_this_machine()

    def best_s(self, work: Callable[[], object], repeats: int) -> float:
        """Seconds that the device takes for some work; the fastest of some runs behind two that warm up."""
        for _ in range(2):
            work()
        return min(self._seconds(work) for _ in range(repeats))

    def _seconds(self, work: Callable[[], object]) -> float:
        begin_s = time.perf_counter()
        work()
        return time.perf_counter() - begin_s

    def synchronize(self) -> None:
        """Waits until the device has done all that it was given; a processor computes while it is asked."""

    def give_back(self) -> None:
        """Frees memory that nobody holds any more."""
        gc.collect()


class Card(Processors):
    """The first NVIDIA GPU that this process may use."""

    device: Device = "cuda"
    traced = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
    copy_bytes = 1 << 31
    matrix_sides: tuple[int, ...] = (4096, 8192, 16384)

    def __init__(self, facts: CudaFacts) -> None:
        """Facts: of a card that `check_cuda` has nothing against."""
        self.name = facts.name
        self._built_for = facts.built_for

    def hardware(self) -> Hardware:
        return Hardware.of_this_machine().with_card(self.name, self._built_for)

    def _seconds(self, work: Callable[[], object]) -> float:
        return seconds_on_card(work)  # by events on the device, so that the host's part does not count

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def give_back(self) -> None:
        super().give_back()
        torch.cuda.empty_cache()


def find_machine(*, needs_card: bool, facts: CudaFacts | None = None) -> Processors:
    """The card, or without one the processors.

    Args:
        needs_card: without one, refuse.
        facts: what PyTorch says of CUDA; None: it is asked, which starts CUDA.

    Raises:
        NotOnThisMachine: there is no card that PyTorch can compute on, and one is needed.
    """
    facts = facts or cuda_facts()
    try:
        check_cuda(facts)
    except SetupError as error:
        if not needs_card:
            return Processors()
        missing = str(error).replace(f", {REMEDY}", "")
        raise NotOnThisMachine(
            f"--full measures an NVIDIA GPU, and none can be used. {missing} Without --full, a tiny shape runs here."
        ) from error
    return Card(facts)


def measure_limits(machine: Processors, dtype: torch.dtype) -> MachineLimits:
    """The rates that claims are held against, measured where and when the claims are.

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
    # random numbers: of zeros a card takes less power, and so runs faster than it ever does
    a, b = torch.randn(2, side, side, device=machine.device).to(dtype)
    product = torch.empty_like(a)

    def multiply() -> Tensor:
        return torch.matmul(a, b, out=product)

    return 2 * side**3 / machine.best_s(multiply, _REPEATS)


class Tracer:
    """Writes down what the device does between `start` and `stop`, by torch's profiler.

    It is made before anything is recorded into a graph: what the profiler listens to is set up once, and kernels of
    graphs that were there before may not be seen.

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
        """From here on; waits for the device first, so that nothing older is seen."""
        self._machine.synchronize()
        self._profile = torch.profiler.profile(activities=[self._activity])
        self._profile.start()

    def stop(self) -> list[Interval]:
        """Waits for the device; returns the work that it has done since."""
        self._machine.synchronize()
        self._profile.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            trace = json.loads(path.read_text(encoding="utf-8"))
        self._profile = None
        return work_in(trace, self._machine.traced)


def work_in(trace: Mapping[str, Any], categories: frozenset[str]) -> list[Interval]:
    """The events of a Chrome trace that are of these categories; its times are microseconds.

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
"""Steps like it that run first: the second records passes and starts to run ahead."""


class TracedSteps:
    """Watches batches before they are computed; between two of them the tracer starts, and stops between two others.

    Then everything of the batches before has been enqueued, draws included, and the tracer waits for it: it sees the
    work of whole steps.

    Args:
        tracer: writes the work down.
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._num_decodes = self._num_steps = self._num_seen = 0
        self._work: list[Interval] | None = None

    @staticmethod
    def num_outputs(num_steps: int) -> int:
        """Steps of decodes alone that a run needs, to have so many traced; one stops the tracer."""
        return _STEPS_BEFORE + num_steps + 1

    def arm(self, num_decodes: int, num_steps: int) -> None:
        """From now on: the next steps of so many decodes and nothing else are traced."""
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
        """What was traced; None where nothing was seen to work. Nothing more is traced then."""
        num_steps, self._num_steps = self._num_steps, 0
        if self._work is None and self._num_seen > _STEPS_BEFORE:  # the run has ended too early
            self._tracer.stop()
        return None if self._work is None else Busy.of(self._work, num_steps)
