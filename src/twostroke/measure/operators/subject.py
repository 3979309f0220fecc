"""Subject: one operator with its constants (a weight, a cache), to be run at several sizes on any backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from twostroke.kernels.dispatch import Operators


@dataclass(frozen=True, slots=True)
class Point:
    """One size, and what it asks of the machine."""

    shape: str
    num_bytes: float
    """Read and written at least once: weights or KV as they are stored, inputs, results."""
    operations: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One operator."""

    operator: str
    kind: str
    """What of it: the type of the weights, or what it works on."""
    points: tuple[Point, ...]
    constant_bytes: int
    """Of what a run reads again each time: so large are the copies that keep it out of the caches."""
    product: str
    """Whose rate limits it: float32, bfloat16 or int8."""
    build: Callable[[Operators], Callable[[int], Tensor]]
    """A copy of the constants on a backend; what is returned runs the point of that index."""
    error: Callable[[int, Tensor], float]
    """How wrong a point's result is; see `relative_error`."""
    tolerance: float
    """Largest error that is rounding."""


def relative_error(found: Tensor, expected: Tensor) -> float:
    """|found - expected| / |expected| over all elements, infinite when anything is not a number.

    >>> import torch
    >>> relative_error(torch.tensor([3.0, 4.4]), torch.tensor([3.0, 4.0]))
    0.08
    """
    if found.shape != expected.shape or not bool(found.isfinite().all()):
        return float("inf")
    wide = expected.double()
    return round(float((found.double() - wide).norm() / wide.norm().clamp_min(1e-30)), 7)


def against_reference(
    build: Callable[[Operators], Callable[[int], Tensor]], operators: Operators
) -> Callable[[int, Tensor], float]:
    """The error against the reference backend, which is built when first asked, and each point of it run once."""
    built: list[Callable[[int], Tensor]] = []
    expected: dict[int, Tensor] = {}

    def error(point: int, found: Tensor) -> float:
        if not built:
            built.append(build(operators))
        if point not in expected:
            expected[point] = built[0](point)
        return relative_error(found, expected[point])

    return error
