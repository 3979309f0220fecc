"""What a machine can do at best, measured in the run whose figures are held against it: reading memory, products.

The engine's own look (runner/machine_limits.py) takes a fraction of a second at start-up. Benchmarks can wait: more
memory than caches hold, several ways to read it and several sizes of product, and the best of each counts, because a
limit that a kernel passes is none. Torch's int8 products do not use every processor's best instructions: the backend's
own count too, and where bfloat16 products are faster, those are the limit of int8. In the same way those of float32 are
the limit of bfloat16: without instructions for it torch takes a hundred times as long, and kernels that widen do not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from twostroke.cost.step_cost import MachineLimits
from twostroke.kernels.interface import Operators
from twostroke.kernels.memory import large_pages
from twostroke.runner.contention import Meter
from twostroke.runner.machine_limits import int8_rate

_STREAM_BYTES = 1 << 29
_SIDES = (1024, 2048)
_COLUMNS = 4096
_LONGEST_S = 1.0
"""For all runs of one kind of product: where it is as slow as that, it is no limit of anything."""


@dataclass(frozen=True, slots=True)
class MachineRates:
    """The best of everything that was tried."""

    bytes_per_s: float
    """Reading memory."""
    operations_per_s: Mapping[str, float]
    """Of a product of square matrices, by the type of the factors: float32, bfloat16, int8."""
    is_estimate: bool = False
    """Whether other processes were at work during the measurement: the machine may then do better."""

    def of(self, product: str) -> MachineLimits:
        """As costs want them.

        Args:
            product: type of the factors; 4-bit weights are multiplied as int8.
        """
        rates = self.operations_per_s
        rate = max(rates["int8"], rates["bfloat16"]) if product == "int8" else rates[product]
        return MachineLimits(rate, self.bytes_per_s, self.is_estimate)

    def best_of(self, other: MachineRates) -> MachineRates:
        """Of two looks at the same machine: a neighbour's work can only lower what is seen."""
        rates = {name: max(rate, other.operations_per_s[name]) for name, rate in self.operations_per_s.items()}
        is_estimate = self.is_estimate and other.is_estimate
        return MachineRates(max(self.bytes_per_s, other.bytes_per_s), rates, is_estimate)

    def as_json(self) -> dict[str, float | bool]:
        """Return GB/s, GFLOP/s (or GOP/s), and whether they are an estimate."""
        rates = {f"{name}_gflop_s": rate / 1e9 for name, rate in self.operations_per_s.items()}
        return {"read_gb_s": self.bytes_per_s / 1e9, **rates, "is_estimate": self.is_estimate}


def words_of_limits(limits: Mapping[str, float | bool], form: str = ",.4g") -> str:
    """Return the figures of `Limits.as_json` as one readable line."""
    rates = ", ".join(
        f"{name.replace('_', ' ')} {rate:{form}}" for name, rate in limits.items() if name != "is_estimate"
    )
    if limits.get("is_estimate"):
        return f"limits of this machine, an estimate (others were at work): {rates}"
    return f"limits of this machine: {rates}"


def measure_limits(operators: Operators, num_threads: int, *, repeats: int = 5) -> MachineRates:
    """Measures on `num_threads` threads; torch has as many, and is left as it was found.

    Args:
        operators: the backend whose matrix-times-vector is one of the ways to read, and whose products of 8 bits count.
        num_threads: of both.
        repeats: of each way; the best counts.
    """
    meter = Meter(num_threads)
    meter.begin()
    before = torch.get_num_threads()
    operators.set_num_threads(num_threads)
    weight = torch.zeros(_STREAM_BYTES // 2 // _COLUMNS, _COLUMNS, dtype=torch.bfloat16)
    packed = operators.pack_linear(weight, None)
    row = torch.zeros(1, _COLUMNS, dtype=torch.bfloat16)
    native_s = _best_of(lambda: packed(row), repeats)
    del weight
    torch.set_num_threads(num_threads)
    try:
        stream = large_pages(_STREAM_BYTES).zero_().view(torch.float32)
        read_s = min(native_s, *(_best_of(way, repeats) for way in (stream.sum, stream.amax)))
        del stream
        kinds = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
        rates = {name: _rate(_product_of(dtype), repeats) for name, dtype in kinds.items()}
        rates["bfloat16"] = max(rates["bfloat16"], rates["float32"])
        if operators.keeps_quantized:
            own = max(int8_rate(operators, torch.bfloat16, torch.device("cpu"), side) for side in _SIDES)
            rates["int8"] = max(rates["int8"], own)
    finally:
        torch.set_num_threads(before)
    return MachineRates(_STREAM_BYTES / read_s, rates, meter.is_contended())


def _rate(work: Callable[[int], Callable[[], object]], repeats: int) -> float:
    """Return operations per second at the size that suits a product; where it is slow, larger ones are left out."""
    best, begin_s = 0.0, time.perf_counter()
    for side in _SIDES:
        if time.perf_counter() - begin_s > _LONGEST_S:
            break
        best = max(best, 2 * side**3 / _best_of(work(side), repeats))
    return best


def _product_of(dtype: torch.dtype) -> Callable[[int], Callable[[], object]]:
    """Return what makes a product of square matrices, by their side."""

    def product(side: int) -> Callable[[], object]:
        if dtype is torch.int8:
            a = torch.randint(-128, 128, (side, side), dtype=dtype)
            return lambda: torch._int_mm(a, a)  # pyright: ignore[reportPrivateUsage]  (it has no public name)
        a = torch.randn(side, side).to(dtype)
        return lambda: a @ a

    return product


def _best_of(work: Callable[[], object], repeats: int) -> float:
    """Return the seconds of the fastest run; slow ones are not repeated for longer than _LONGEST_S."""
    best, spent_s = float("inf"), 0.0
    for _ in range(repeats):
        begin_s = time.perf_counter()
        work()
        seconds = time.perf_counter() - begin_s
        best, spent_s = min(best, seconds), spent_s + seconds
        if spent_s > _LONGEST_S:
            break
    return best
