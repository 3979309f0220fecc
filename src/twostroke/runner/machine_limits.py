"""Matrix rate and memory bandwidth of this machine at best, measured in a fraction of a second.

Every step record says whether compute or memory binds, which needs the machine's own limits, not a data sheet's. A
measurement beside other processes gives less than the machine can do. So the best of several series counts, and other
workers of this project do not measure at the same time. If other processes were at work in every series, the result is
called an estimate.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from twostroke.cost.step_cost import MachineLimits
from twostroke.kernels.interface import Operators
from twostroke.kernels.quantized_weight import quantize_per_channel
from twostroke.runner.contention import Contention, Meter, one_at_a_time

_MATRIX_SIDE, _SMALL_SIDE = 1024, 256
_LONG_S = 1.2
"""Seconds above which a product is too slow to be the machine's best rate."""
_STREAM_BYTES = 1 << 27  # well beyond any cache
_SIDE_ON_CARD, _STREAM_BYTES_ON_CARD = 4096, 1 << 29
"""Sizes for a GPU: work that keeps a processor busy ends before a GPU reaches full speed."""
_REPEATS = 4
_MOST_SERIES = 3
"""Most series of measurements while other processes are at work; they may pause."""
_PATIENCE_S = 0.5
"""Seconds for which an engine at start-up waits for other processes to pause."""

_Key = tuple[torch.dtype, torch.device, int, str | None]
_measured: dict[_Key, MachineLimits] = {}


def measure_machine_limits(
    dtype: torch.dtype, device: torch.device, num_threads: int, int8: Operators | None = None
) -> MachineLimits:
    """Measure products and reads on the threads that the engine will use; the best of a few runs, once per process.

    Args:
        dtype: type of the weights; the matrix rate depends on it.
        device: where the model runs.
        num_threads: the engine's threads; torch's own number may be lower beside native kernels, and is restored.
        int8: operators that multiply in 8 bits, where the model uses them; None for products of floats.

    Returns:
        Operations per second of a square matrix product, bytes per second of reading memory. On a CPU the product is
        that of float32 where it is faster: without instructions for a narrow type torch takes a hundred times as long,
        and kernels that widen the weights do not.
    """
    key = dtype, device, num_threads, None if int8 is None else int8.name
    if key not in _measured:
        before = torch.get_num_threads()
        torch.set_num_threads(num_threads)
        try:
            with one_at_a_time():
                _measured[key] = best_of_series(partial(_measure, dtype, device, int8), Meter(num_threads))
        finally:
            torch.set_num_threads(before)
    return _measured[key]


def best_of_series(
    measure: Callable[[], MachineLimits], meter: Contention, clock: Callable[[], float] = time.perf_counter
) -> MachineLimits:
    """Return the best of several series; stop after one without other processes at work.

    Args:
        measure: one series.
        meter: detects other work during a series.
        clock: seconds; no series begins later than half a second after the first.

    Returns:
        The better rates of all series; an estimate where others were at work in each of them.
    """
    found: MachineLimits | None = None
    begin_s = clock()
    for _ in range(_MOST_SERIES):
        meter.begin()
        seen = measure()
        seen = MachineLimits(seen.flops_per_s, seen.bytes_per_s, is_estimate=meter.is_contended())
        found = seen if found is None else found.best_of(seen)
        if not found.is_estimate or clock() - begin_s > _PATIENCE_S:
            break
    assert found is not None
    return found


def _measure(dtype: torch.dtype, device: torch.device, int8: Operators | None) -> MachineLimits:
    num_bytes = _STREAM_BYTES if device.type == "cpu" else _STREAM_BYTES_ON_CARD
    stream = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    stream_s = _best_of(stream.sum, device)
    flops_per_s = best_matrix_rate(dtype, device)
    if int8 is not None:
        flops_per_s = max(flops_per_s, int8_rate(int8, dtype, device))
    return MachineLimits(flops_per_s=flops_per_s, bytes_per_s=num_bytes / stream_s)


def best_matrix_rate(dtype: torch.dtype, device: torch.device) -> float:
    """Return operations per second of a square product, in this type or the one that kernels widen it to."""
    if device.type == "cuda":
        return _matrix_rate(dtype, device, _SIDE_ON_CARD)
    flops_per_s = _matrix_rate(dtype, device, _SMALL_SIDE)
    if 2 * _MATRIX_SIDE**3 / flops_per_s < _LONG_S:
        flops_per_s = max(flops_per_s, _matrix_rate(dtype, device, _MATRIX_SIDE))
    if device.type == "cpu" and dtype != torch.float32:
        flops_per_s = max(flops_per_s, _matrix_rate(torch.float32, device, _MATRIX_SIDE))
    return flops_per_s


def int8_rate(operators: Operators, dtype: torch.dtype, device: torch.device, side: int = _MATRIX_SIDE) -> float:
    """Return operations per second of the backend's own products of 8-bit weights and activations.

    Args:
        operators: operators that multiply quantized weights in 8 bits.
        dtype: type of the activations before quantization.
        device: device of the products.
        side: size of the square weight, and rows of activations.
    """
    square = torch.ones(side, side, dtype=dtype, device=device)
    packed = operators.pack_linear(quantize_per_channel(square), None)
    return 2 * side**3 / _best_of(lambda: packed(square), device)


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
    """Return seconds of work on this thread's card, by its own clock; launching and waiting may take the host
    longer."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3
