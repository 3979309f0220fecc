"""MemoryProbe: what a device holds at rest, and how much more while something runs."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReading:
    """The memory of one device, in bytes: measured, or predicted by a plan."""

    total_bytes: int
    others_bytes: int
    """In use, and not by this process's tensors."""
    held_bytes: int
    """By this process's tensors, before the work and after it."""
    peak_bytes: int
    """By them while it ran, at most, beyond what was held."""


class MemoryProbe(Protocol):
    """Looks at the memory of the device that a model runs on."""

    def around(self, work: Callable[[], object]) -> MemoryReading:
        """Runs `work`, which is to leave nothing behind, and measures."""
        ...


class CudaProbe:
    """What the driver and torch's allocator say.

    The allocator takes memory in segments and keeps them. What it has reserved is what others cannot have, and holds
    the gaps between tensors, so that is what counts, not what tensors take.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def around(self, work: Callable[[], object]) -> MemoryReading:
        """See MemoryProbe. Others may come and go while it runs; they are counted as they are afterwards, when CUDA
        has loaded the code that the work needed."""
        self._let_go()
        torch.cuda.reset_peak_memory_stats(self._device)
        held = torch.cuda.memory_reserved(self._device)
        work()
        torch.cuda.synchronize(self._device)
        peak = torch.cuda.max_memory_reserved(self._device)
        self._let_go()
        free, total = torch.cuda.mem_get_info(self._device)
        others = total - free - torch.cuda.memory_reserved(self._device)
        return MemoryReading(
            total_bytes=total, others_bytes=max(0, others), held_bytes=held, peak_bytes=max(0, peak - held)
        )

    def _let_go(self) -> None:
        """Of segments in which nothing is left."""
        torch.cuda.synchronize(self._device)
        gc.collect()
        torch.cuda.empty_cache()


def probe_of(device: torch.device) -> MemoryProbe | None:
    """Who can measure it; None of a host, whose memory belongs to everybody and is shared out by prediction."""
    return CudaProbe(device) if device.type == "cuda" else None
