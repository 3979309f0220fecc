"""MemoryProbe: the memory in use on a device at rest, and the additional memory during some work."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReading:
    """Memory of one device, in bytes: measured, or predicted by a plan."""

    total_bytes: int
    others_bytes: int
    """Bytes in use by anything but this process's tensors."""
    held_bytes: int
    """Bytes of this process's tensors, before the work and after it."""
    peak_bytes: int
    """Most additional bytes of this process's tensors during the work."""


class MemoryProbe(Protocol):
    """Measurement of the memory of a model's device."""

    def measure(self, work: Callable[[], object]) -> MemoryReading:
        """Run `work`, which must free all it allocates, and measure."""
        ...


class CudaProbe:
    """Figures of the driver and of torch's allocator.

    The allocator takes memory in segments and keeps them. Reserved memory, which includes the gaps between tensors, is
    unavailable to others, so it counts instead of the tensors' sizes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def measure(self, work: Callable[[], object]) -> MemoryReading:
        """Measure around `work`. Other processes' memory may change meanwhile. It is counted afterwards, when CUDA has
        loaded the code that the work needed."""
        self._release_cached()
        torch.cuda.reset_peak_memory_stats(self._device)
        held = torch.cuda.memory_reserved(self._device)
        work()
        torch.cuda.synchronize(self._device)
        peak = torch.cuda.max_memory_reserved(self._device)
        self._release_cached()
        free, total = torch.cuda.mem_get_info(self._device)
        others = total - free - torch.cuda.memory_reserved(self._device)
        return MemoryReading(
            total_bytes=total, others_bytes=max(0, others), held_bytes=held, peak_bytes=max(0, peak - held)
        )

    def _release_cached(self) -> None:
        """Free segments that hold no tensors."""
        torch.cuda.synchronize(self._device)
        gc.collect()
        torch.cuda.empty_cache()


def memory_probe_for(device: torch.device) -> MemoryProbe | None:
    """Return the probe of a device; None for a host, whose memory is shared with other processes and planned by
    prediction."""
    return CudaProbe(device) if device.type == "cuda" else None
