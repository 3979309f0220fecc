"""What this machine can do at best: matrix rate and memory bandwidth, measured in a fraction of a second.

Every step record says whether compute or memory binds; that needs the machine's own limits, not a data sheet's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import torch

from twostroke.cost.step_cost import MachineLimits

_MATRIX_SIDE = 1024
_STREAM_BYTES = 1 << 27  # well beyond any cache
_REPEATS = 4


def measure_machine_limits(dtype: torch.dtype, device: torch.device, num_threads: int) -> MachineLimits:
    """Measures torch's products and sums on the threads that the engine will use; best of a few runs, once per process.

    Args:
        dtype: type of the weights; the matrix rate depends on it.
        device: where the model runs.
        num_threads: the engine's; torch's own number may be lower beside native kernels, and is left as it was.

    Returns:
        Operations per second of a square matrix product, bytes per second of reading memory.
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
    a = torch.ones(_MATRIX_SIDE, _MATRIX_SIDE, dtype=dtype, device=device)
    matrix_s = _best_of(lambda: a @ a, device)
    stream = torch.ones(_STREAM_BYTES // 4, dtype=torch.float32, device=device)
    stream_s = _best_of(stream.sum, device)
    return MachineLimits(flops_per_s=2 * _MATRIX_SIDE**3 / matrix_s, bytes_per_s=_STREAM_BYTES / stream_s)


def _best_of(work: Callable[[], torch.Tensor], device: torch.device) -> float:
    best = float("inf")
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - begin)
    return best
