"""Matrix rate and memory bandwidth of this machine at best, measured in a fraction of a second.

Every step record says whether compute or memory binds, which needs the machine's own limits, not a data sheet's. A
measurement beside other processes gives less than the machine can do. So short series are repeated for a fifth of a
second at least, the best of each rate counts, and other workers of this project do not measure at the same time. If
other processes were at work during the last series, or if these do not agree with the best, more series follow for a
while. If they end so, the result is called an estimate.

A limit that a kernel exceeds is no limit. So memory is read by torch and by the native kernels' own loop, and in
pieces of several sizes: a step of a model that fits into a cache reads faster than memory.

What the operating system does not see cannot be noticed: other guests of a host that keep its memory busy for the whole
measurement. The engine therefore raises its limits when a step is faster than its floor (engine/journal.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from twostroke.cost.step_cost import MachineLimits
from twostroke.kernels.interface import Operators
from twostroke.kernels.memory import large_pages
from twostroke.kernels.quantized_weight import quantize_per_channel
from twostroke.runner.contention import ContentionDetector, ContentionMeter, ContentionReading, measurement_lock

_MATRIX_SIDE, _SMALL_SIDE = 1024, 256
_LEAST_SHARE, _LONG_S = 0.1, 0.02
"""Share of the best rate below which, and seconds above which, a type's products are not measured again: torch takes a
hundred times as long for a type that the processor has no instructions for."""
_STREAM_BYTES = 1 << 27
"""Bytes of the largest piece of memory that is read, well beyond most caches."""
_SMALLER_STREAMS = (1 << 25, 1 << 23, 1 << 21)
_SIDE_ON_CARD, _STREAM_BYTES_ON_CARD = 4096, 1 << 29
"""Sizes for a GPU: work that keeps a processor busy ends before a GPU reaches full speed."""
_REPEATS, _REPEATS_OF_SMALL = 2, 8
"""Repeats of each product and read within one series, and of reading a small piece, which takes microseconds."""
_LEAST_SERIES, _LEAST_S = 3, 0.2
"""Least number of series, and their least seconds together, from which a result counts as quiet."""
AGREEMENT = 0.85
"""Share of the best rate that the median of these series reaches where nothing disturbs them."""
_TIMEOUT_S = 0.7
"""Seconds after which no new series begins: an engine at start-up does not wait longer for others to pause."""


@dataclass(frozen=True, slots=True)
class MachineSeries:
    """Rates of one series of measurements, or the best of several."""

    flops_per_s: float
    """Operations per second of the fastest kind of product."""
    bytes_per_s: tuple[float, ...]
    """Bytes per second of repeated reads of a piece of memory, largest piece first."""

    @property
    def rates(self) -> tuple[float, ...]:
        """All rates."""
        return (self.flops_per_s, *self.bytes_per_s)

    def best_of(self, other: MachineSeries) -> MachineSeries:
        """Return the better rates of two measurements."""
        return MachineSeries(
            max(self.flops_per_s, other.flops_per_s),
            tuple(max(pair) for pair in zip(self.bytes_per_s, other.bytes_per_s, strict=True)),
        )


ReadStream = Callable[[Tensor], object]
"""Reading of a contiguous tensor on all threads (`Operators.read_stream`)."""
_Key = tuple[torch.dtype, torch.device, int, str | None, bool]
_measured: dict[_Key, tuple[MachineSeries, bool]] = {}


def measure_machine_limits(
    dtype: torch.dtype,
    device: torch.device,
    num_threads: int,
    *,
    int8: Operators | None = None,
    read: ReadStream | None = None,
    step_bytes: float | None = None,
) -> MachineLimits:
    """Measure products and reads on the threads that the engine will use; the best of a few runs, once per process.

    Args:
        dtype: type of the weights; the matrix rate depends on it.
        device: where the model runs.
        num_threads: the engine's threads; torch's own number may be lower beside native kernels, and is restored.
        int8: operators that multiply in 8 bits, where the model uses them; None for products of floats.
        read: the backend's own reading of memory on as many threads; None for torch's alone.
        step_bytes: bytes that the smallest step reads; a model that fits into a cache is read from there. None: from
            memory.

    Returns:
        Operations per second of a square matrix product, bytes per second of reading memory. On a CPU the product is
        that of float32 where it is faster: without instructions for a narrow type torch takes a hundred times as long,
        and kernels that widen the weights do not.
    """
    key = dtype, device, num_threads, None if int8 is None else int8.name, read is not None
    if key not in _measured:
        before = torch.get_num_threads()
        torch.set_num_threads(num_threads)
        try:
            with measurement_lock():
                probe = MachineProbe(dtype, device, int8, read)
                meter = ContentionMeter(num_threads) if device.type == "cpu" else _NoMeter()
                _measured[key] = best_of_series(probe.measure, meter)
        finally:
            torch.set_num_threads(before)
    series, is_estimate = _measured[key]
    place = _place_of(step_bytes, len(series.bytes_per_s))
    return MachineLimits(series.flops_per_s, series.bytes_per_s[place], is_estimate)


def _place_of(step_bytes: float | None, num_pieces: int) -> int:
    """Return the place of the largest measured piece of memory that is not above the bytes of a step."""
    if step_bytes is None or step_bytes >= _STREAM_BYTES or num_pieces == 1:
        return 0
    fitting = (place for place, num_bytes in enumerate(_SMALLER_STREAMS, 1) if num_bytes <= step_bytes)
    return next(fitting, num_pieces - 1)


def best_of_series(measure: Callable[[], MachineSeries], meter: ContentionDetector) -> tuple[MachineSeries, bool]:
    """Return the best of several series; stop after some in a row that were quiet.

    Args:
        measure: one series.
        meter: detects other work during a series.

    Returns:
        The better rates of all series, and whether they are an estimate: in the last of them others were at work, or
        the rates did not agree.
    """
    readings = [meter.read()]
    series: list[MachineSeries] = []
    best: MachineSeries | None = None
    while True:
        series.append(measure())
        readings.append(meter.read())
        best = series[-1] if best is None else best.best_of(series[-1])
        first = _begin_of_last(readings)
        is_contended = meter.was_contended(readings[first or 0], readings[-1])
        if first is not None and not is_contended and _agree(series[first:], best):
            return best, False
        is_late = readings[-1].wall_s - readings[0].wall_s > _TIMEOUT_S
        if is_late and (is_contended or len(series) >= _LEAST_SERIES):
            return best, True


def _begin_of_last(readings: Sequence[ContentionReading]) -> int | None:
    """Return the place of the reading before the last series that are enough for a result; None if there are not."""
    for first in range(len(readings) - 1 - _LEAST_SERIES, -1, -1):
        if readings[-1].wall_s - readings[first].wall_s >= _LEAST_S:
            return first
    return None


def _agree(series: Sequence[MachineSeries], best: MachineSeries) -> bool:
    """Return whether at least half of the series come close to each of the best rates."""
    of_each = zip(*(one.rates for one in series), strict=True)
    return all(median(rates) >= AGREEMENT * peak for rates, peak in zip(of_each, best.rates, strict=True))


class _NoMeter:
    """The meter of a card, whose use by other processes does not show in processor times: only agreement counts."""

    def read(self) -> ContentionReading:
        return ContentionReading(time.perf_counter(), 0.0, None)

    def was_contended(self, before: ContentionReading, after: ContentionReading) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class _Product:
    """One kind of product of square matrices."""

    kind: str
    """Kinds that are slow are left out of later series."""
    operations: float
    work: Callable[[], Tensor]


class MachineProbe:
    """Everything that is measured, with its memory made beforehand.

    Args:
        dtype: type of the weights.
        device: where the model runs.
        int8: operators that multiply in 8 bits; None for products of floats.
        read: the backend's own reading of memory; None for torch's alone.
    """

    def __init__(
        self, dtype: torch.dtype, device: torch.device, int8: Operators | None = None, read: ReadStream | None = None
    ) -> None:
        self._device = device
        self._products = products_of(dtype, device, int8)
        self._slow: set[str] = set()
        self._read = read
        if device.type == "cpu":
            stream = large_pages(_STREAM_BYTES).fill_(1).view(torch.float32)
            self._pieces = [stream, *(stream[: size // 4] for size in _SMALLER_STREAMS)]
        else:
            self._pieces = [torch.ones(_STREAM_BYTES_ON_CARD // 4, device=device)]

    def measure(self) -> MachineSeries:
        """Return the rates of one series: a few products and reads of each kind."""
        flops_per_s = 0.0
        for product in self._products:
            if product.kind in self._slow:
                continue
            seconds = _best_of(product.work, self._device)
            rate = product.operations / seconds
            if seconds > _LONG_S and rate < _LEAST_SHARE * flops_per_s:
                self._slow.add(product.kind)
            flops_per_s = max(flops_per_s, rate)
        return MachineSeries(flops_per_s, tuple(self._bytes_per_s(piece) for piece in self._pieces))

    def _bytes_per_s(self, piece: Tensor) -> float:
        repeats = _REPEATS if piece is self._pieces[0] else _REPEATS_OF_SMALL
        seconds = _best_of(piece.sum, self._device, repeats)
        if self._read is not None:
            read = self._read
            seconds = min(seconds, _best_of(lambda: read(piece), self._device, repeats))
        return piece.nbytes / seconds


def products_of(dtype: torch.dtype, device: torch.device, int8: Operators | None) -> list[_Product]:
    """Return the products that a model of this type may compute with, those that are never slow first.

    Args:
        dtype: type of the weights.
        device: where the model runs.
        int8: operators that multiply in 8 bits; None for products of floats.
    """
    if device.type == "cuda":
        return [_square_product(dtype, device, _SIDE_ON_CARD)]
    found = [_square_product(torch.float32, device, _MATRIX_SIDE), _square_product(dtype, device, _SMALL_SIDE)]
    if dtype != torch.float32:
        found.append(_square_product(dtype, device, _MATRIX_SIDE))
    if int8 is not None:
        found.append(_int8_product(int8, dtype, device, _MATRIX_SIDE))
    return found


def _square_product(dtype: torch.dtype, device: torch.device, side: int) -> _Product:
    square = torch.ones(side, side, dtype=dtype, device=device)
    return _Product(str(dtype), 2.0 * side**3, lambda: square @ square)


def _int8_product(operators: Operators, dtype: torch.dtype, device: torch.device, side: int) -> _Product:
    square = torch.ones(side, side, dtype=dtype, device=device)
    packed = operators.pack_linear(quantize_per_channel(square), None)
    return _Product("int8", 2.0 * side**3, lambda: packed(square))


def int8_rate(operators: Operators, dtype: torch.dtype, device: torch.device, side: int = _MATRIX_SIDE) -> float:
    """Return operations per second of the backend's own products of 8-bit weights and activations.

    Args:
        operators: operators that multiply quantized weights in 8 bits.
        dtype: type of the activations before quantization.
        device: device of the products.
        side: size of the square weight, and rows of activations.
    """
    product = _int8_product(operators, dtype, device, side)
    return product.operations / min(_best_of(product.work, device) for _ in range(2))


def _best_of(work: Callable[[], object], device: torch.device, repeats: int = _REPEATS) -> float:
    if device.type == "cuda":
        return min(gpu_seconds(work) for _ in range(repeats))
    best = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - begin)
    return best


def gpu_seconds(work: Callable[[], object]) -> float:
    """Return seconds of work on this thread's card, by its own clock; launching and waiting may take the host
    longer."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3
