"""What this machine can do at best: matrix rate and memory bandwidth, measured in a fraction of a second.

Every step record says whether compute or memory binds; that needs the machine's own limits, not a data sheet's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import torch

from twostroke.cost.step_cost import MachineLimits

_MATRIX_SIDE, _SMALL_SIDE = 1024, 256
_LONG_S = 1.2
"""A product that would take so long is not what the machine does at best."""
_STREAM_BYTES = 1 << 27  # well beyond any cache
_SIDE_ON_CARD, _STREAM_BYTES_ON_CARD = 4096, 1 << 29
"""A GPU has done what keeps a processor busy before it is at its pace."""
_REPEATS = 4


def measure_machine_limits(dtype: torch.dtype, device: torch.device, num_threads: int) -> MachineLimits:
    """Measures torch's products and sums on the threads that the engine will use; best of a few runs, once per process.

    Args:
        dtype: type of the weights; the matrix rate depends on it.
        device: where the model runs.
        num_threads: the engine's; torch's own number may be lower beside native kernels, and is left as it was.

    Returns:
        Operations per second of a square matrix product, bytes per second of reading memory. On a CPU the product is
        that of float32 where it is faster: without instructions for a narrow type torch takes a hundred times as long,
        and kernels that widen the weights do not.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        return _measure(dtype, device, num_threads)
    finally:
        torch.set_num_threads(before)


@cache
def _measure(dtype: torch.dtype, device: torch.device, num_threads: int) -> MachineLimits:
    del num_threads  # part of the key: torch uses as many as were set
    num_bytes = _STREAM_BYTES if device.type == "cpu" else _STREAM_BYTES_ON_CARD
    stream = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    stream_s = _best_of(stream.sum, device)
    return MachineLimits(flops_per_s=best_matrix_rate(dtype, device), bytes_per_s=num_bytes / stream_s)


def best_matrix_rate(dtype: torch.dtype, device: torch.device) -> float:
    """Operations per second of a square product, in this type or the one that kernels widen it to."""
    if device.type == "cuda":
        return _matrix_rate(dtype, device, _SIDE_ON_CARD)
    flops_per_s = _matrix_rate(dtype, device, _SMALL_SIDE)
    if 2 * _MATRIX_SIDE**3 / flops_per_s < _LONG_S:
        flops_per_s = max(flops_per_s, _matrix_rate(dtype, device, _MATRIX_SIDE))
    if device.type == "cpu" and dtype != torch.float32:
        flops_per_s = max(flops_per_s, _matrix_rate(torch.float32, device, _MATRIX_SIDE))
    return flops_per_s


def _matrix_rate(dtype: torch.dtype, device: torch.device, side: int) -> float:
    square = torch.ones(side, side, dtype=dtype, device=device)
    return 2 * side**3 / _best_of(lambda: square @ square, device)


def _best_of(work: Callable[[], torch.Tensor], device: torch.device) -> float:
    if device.type == "cuda":
        return min(seconds_on_card(work) for _ in range(_REPEATS))
    best = float("inf")
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - begin)
    return best


def seconds_on_card(work: Callable[[], object]) -> float:
    """Of this thread's card, by its own clock: launching and waiting may take the host longer than the work takes."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3
