"""Limits of a machine, measured in the run whose figures are compared with them: memory reads and matrix products.

The engine's own measurement (runner/machine_limits.py) takes a fraction of a second at start-up. Benchmarks can take
longer: they use more memory than caches hold, several ways to read it and several product sizes. The best of each
counts, because a limit that a kernel exceeds is not a limit. Reads before and after the products that do not agree
show other work that processor times do not. Torch's products do not use every processor's best instructions. The
backend's own products therefore count too, and where bfloat16 products are faster, those are the limit of int8. In the
same way float32 products are the limit of bfloat16: without bfloat16 instructions torch takes a hundred times as long,
and kernels that widen to float32 do not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from twostroke.cost.step_cost import MachineLimits
from twostroke.kernels.interface import Operators
from twostroke.kernels.memory import large_pages
from twostroke.runner.contention import ContentionMeter
from twostroke.runner.machine_limits import AGREEMENT, int8_rate

_STREAM_BYTES = 1 << 29
_SIDES = (1024, 2048)
_COLUMNS = 4096
_MAX_PRODUCT_S = 1.0
"""Limit for the seconds spent on one kind of product; a product this slow is never the limit."""


@dataclass(frozen=True, slots=True)
class MachineRates:
    """Best rates of all measurements."""

    bytes_per_s: float
    """Bytes read from memory per second."""
    operations_per_s: Mapping[str, float]
    """Operations per second of a product of square matrices, by the type of the factors: float32, bfloat16, int8."""
    is_estimate: bool = False
    """Whether other work disturbed the measurement, as processor times and reads that disagree show: the machine may be
    faster."""

    def of(self, product: str) -> MachineLimits:
        """Return the limits for products of one type, as cost models take them.

        Args:
            product: type of the factors; 4-bit weights are multiplied as int8.
        """
        rates = self.operations_per_s
        rate = max(rates["int8"], rates["bfloat16"]) if product == "int8" else rates[product]
        return MachineLimits(rate, self.bytes_per_s, self.is_estimate)

    def best_of(self, other: MachineRates) -> MachineRates:
        """Return the better rate of two measurements of one machine: other processes can only lower a rate."""
        rates = {name: max(rate, other.operations_per_s[name]) for name, rate in self.operations_per_s.items()}
        is_estimate = self.is_estimate and other.is_estimate
        return MachineRates(max(self.bytes_per_s, other.bytes_per_s), rates, is_estimate)

    def as_json(self) -> dict[str, float | bool]:
        """Return GB/s, GFLOP/s (or GOP/s), and whether they are an estimate."""
        rates = {f"{name}_gflop_s": rate / 1e9 for name, rate in self.operations_per_s.items()}
        return {"read_gb_s": self.bytes_per_s / 1e9, **rates, "is_estimate": self.is_estimate}


def format_limits(limits: Mapping[str, float | bool], form: str = ",.4g") -> str:
    """Return the figures of `Limits.as_json` as one readable line."""
    rates = ", ".join(
        f"{name.replace('_', ' ')} {rate:{form}}" for name, rate in limits.items() if name != "is_estimate"
    )
    if limits.get("is_estimate"):
        return f"limits of this machine, an estimate (other processes were active, or rates varied): {rates}"
    return f"limits of this machine: {rates}"


def measure_limits(operators: Operators, num_threads: int, *, repeats: int = 5) -> MachineRates:
    """Measure the machine's limits on `num_threads` threads; torch's thread count is restored.

    Args:
        operators: the backend whose matrix-vector product is one of the ways to read, and whose products count.
        num_threads: threads of torch and of the backend.
        repeats: repeats of each measurement; the best counts.
    """
    meter = ContentionMeter(num_threads)
    begin = meter.read()
    before = torch.get_num_threads()
    operators.set_num_threads(num_threads)
    torch.set_num_threads(num_threads)
    try:
        first = _read_s(operators, repeats)
        kinds = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
        rates = {name: _rate(_product_of(dtype), repeats) for name, dtype in kinds.items()}
        for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
            rates[name] = max(rates[name], _rate(_linear_of(operators, dtype), repeats))
        rates["bfloat16"] = max(rates["bfloat16"], rates["float32"])
        if operators.keeps_quantized:
            own = max(int8_rate(operators, torch.bfloat16, torch.device("cpu"), side) for side in _SIDES)
            rates["int8"] = max(rates["int8"], own)
        last = _read_s(operators, repeats)
    finally:
        torch.set_num_threads(before)
    is_estimate = meter.was_contended(begin, meter.read()) or min(first, last) < AGREEMENT * max(first, last)
    return MachineRates(_STREAM_BYTES / min(first, last), rates, is_estimate)


def _read_s(operators: Operators, repeats: int) -> float:
    """Return the least seconds of reading `_STREAM_BYTES`, by the backend's kernels and by torch."""
    weight = torch.zeros(_STREAM_BYTES // 2 // _COLUMNS, _COLUMNS, dtype=torch.bfloat16)
    packed, row = operators.pack_linear(weight, None), torch.zeros(1, _COLUMNS, dtype=torch.bfloat16)
    del weight
    ways: list[Callable[[], object]] = [lambda: packed(row)]
    stream = large_pages(_STREAM_BYTES).zero_().view(torch.float32)
    ways += [stream.sum, stream.amax]
    if operators.read_stream is not None:
        ways.append(partial(operators.read_stream, stream))
    return min(_best_of(way, repeats) for way in ways)


def _rate(work: Callable[[int], Callable[[], object]], repeats: int) -> float:
    """Return operations per second at the best size of a product; larger sizes are skipped if it is slow."""
    best, begin_s = 0.0, time.perf_counter()
    for side in _SIDES:
        if time.perf_counter() - begin_s > _MAX_PRODUCT_S:
            break
        best = max(best, 2 * side**3 / _best_of(work(side), repeats))
    return best


def _product_of(dtype: torch.dtype) -> Callable[[int], Callable[[], object]]:
    """Return a function that prepares a product of square matrices of a given side."""

    def product(side: int) -> Callable[[], object]:
        if dtype is torch.int8:
            a = torch.randint(-128, 128, (side, side), dtype=dtype)
            return lambda: torch._int_mm(a, a)  # pyright: ignore[reportPrivateUsage]  (it has no public name)
        a = torch.randn(side, side).to(dtype)
        return lambda: a @ a

    return product


def _linear_of(operators: Operators, dtype: torch.dtype) -> Callable[[int], Callable[[], object]]:
    """Return a function that prepares the backend's own product of square matrices of a given side."""

    def product(side: int) -> Callable[[], object]:
        square = torch.randn(side, side).to(dtype)
        packed = operators.pack_linear(square, None)
        return lambda: packed(square)

    return product


def _best_of(work: Callable[[], object], repeats: int) -> float:
    """Return the seconds of the fastest run; slow work is not repeated for longer than `_MAX_PRODUCT_S`."""
    best, spent_s = float("inf"), 0.0
    for _ in range(repeats):
        begin_s = time.perf_counter()
        work()
        seconds = time.perf_counter() - begin_s
        best, spent_s = min(best, seconds), spent_s + seconds
        if spent_s > _MAX_PRODUCT_S:
            break
    return best
