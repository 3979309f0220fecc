"""What `twostroke replay` is asked of a trace; of an event log everything is in the log."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.config.checks import whole_number
from twostroke.config.sizes import read_sizes
from twostroke.planner.devices import find_device
from twostroke.planner.options import MAX_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """The machine, and how much smaller requests are to be."""

    device_name: str | None = None
    """Of a trace: floors of a GPU whose figures are published, such as H100-SXM, instead of this machine's calibration.
    With tensor_parallel_size each rank has one."""
    memory: int | None = None
    """Of a trace: bytes of memory to plan with, such as 24GB; default: the named device's, or what is free on this
    machine now."""
    trace_divisor: int = 1
    """Of a trace: lengths are divided by this and rounded up, prefixes stay shared; with 64 the block size should be
    8."""

    def __post_init__(self) -> None:
        """Checks what needs no trace."""
        read_sizes(self, "memory")
        if self.device_name is not None:
            find_device(self.device_name)
        if self.memory is not None:
            whole_number("memory", self.memory, 1, MAX_BYTES)
        whole_number("trace_divisor", self.trace_divisor, 1)
