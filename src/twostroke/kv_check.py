"""Types and verdicts of the KV self-check, which recomputes a cached block and compares it with the stored one.

Rows of a batch do not affect each other, so computing the same tokens over the same context gives the same bits:
`exact` is the rule. The size of a difference shows its cause. Another order of summation, or another kernel, changes
a number by a few roundings (`numerics`). Memory that lost a bit, or a block that was overwritten, changes some numbers
by about their own size, or makes them NaN (`corruption`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from twostroke.config.kv_format import KVFormat, is_quantized, levels_of


class Verdict(StrEnum):
    """Result of a comparison."""

    EXACT = "exact"  # the same bytes
    NUMERICS = "numerics"  # within what roundings can do
    CORRUPTION = "corruption"  # beyond that


@dataclass(frozen=True, slots=True)
class KVCheck:
    """A page of a cached prefix that is to be recomputed."""

    request_id: str
    """Id of the request whose prefix and tokens it contains."""
    entry: int
    """Index of the page: it holds the tokens from entry x block_size on."""
    block_ids: tuple[int | None, ...]
    """Block of each KV group that holds the page; None if the group has it no longer (it left a window)."""
    context: tuple[tuple[int, ...], ...]
    """Blocks of the pages before it, from the first on, per KV group; any id for those that the page's tokens do not
    see."""


@dataclass(frozen=True, slots=True)
class KVDifference:
    """Difference between the stored and the recomputed K, or V, of one layer of a block."""

    group_id: int
    layer_id: int
    num_numbers: int
    """Count of numbers that differ."""
    largest: float
    """Largest difference relative to the largest number of its vector (a token's K or V in one head), over all vectors.
    Infinite if either side is not finite."""


@dataclass(frozen=True, slots=True)
class Suspects:
    """Requests that may have read a corrupt block."""

    started_over: tuple[str, ...] = ()
    """Ids of requests that restarted, because they had no output yet."""
    ended: tuple[str, ...] = ()
    """Ids of requests that ended with an error: their output may be wrong."""


NO_SUSPECTS = Suspects()


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of a check."""

    request_id: str
    """Id of the request whose cached prefix was checked."""
    entry: int
    """Index of the block; if blocks are quarantined, the first bad one of the prefix."""
    verdict: Verdict
    differences: tuple[KVDifference, ...] = ()
    """Differences in that block."""
    quarantined: tuple[int | None, ...] = ()
    """Quarantined block per KV group if the verdict is corruption; None for a group whose block is sound."""
    suspects: Suspects = NO_SUSPECTS

    @property
    def largest(self) -> float:
        """Largest of the differences; 0 without any."""
        return largest_of(self.differences)


_FORMAT_STEPS: dict[KVFormat, float] = {"f32": 2.0**-23, "f16": 2.0**-10, "bf16": 2.0**-7, "fp8": 2.0**-3}
"""One unit in the last place, relative to the number."""
_LAYER_NOISE = {"float32": 2.0**-18, "float16": 3 * 2.0**-11, "bfloat16": 3 * 2.0**-8}
"""Relative effect of another order of summation on a layer's output: the roundings of attention, MLP and norm to a
type of few digits; in float32 that of a sum over thousands."""


def tolerance(kv_format: KVFormat, dtype: str, num_layers: int) -> float:
    """Return the largest difference, in the measure of KVDifference.largest, that still counts as numerics.

    It is two steps of the format (codes off by one, a number rounded the other way), plus the noise of the earlier
    layers, which adds up like a random walk; a coarse format adds to it by what the layers read. docs/decisions/019
    compares the bound with the actual differences between two backends.

    >>> [round(tolerance(*of, num_layers=16), 4) for of in (("bf16", "bfloat16"), ("int8", "bfloat16"))]
    [0.0625, 0.0626]
    """
    # a range of codes spans from -x to x at most, so that a step is at most 2 / levels of the largest number
    step = 2.0 / levels_of(kv_format) if is_quantized(kv_format) else _FORMAT_STEPS[kv_format]
    return 2.0 * step + max(_LAYER_NOISE[dtype], step / 4) * math.sqrt(num_layers)


def verdict_of(differences: Sequence[KVDifference], limit: float) -> Verdict:
    """Return the cause of these differences, which are all of a block.

    >>> verdict_of([], 0.1), verdict_of([KVDifference(0, 3, 1, 0.02), KVDifference(0, 4, 1, float("inf"))], 0.1)
    (<Verdict.EXACT: 'exact'>, <Verdict.CORRUPTION: 'corruption'>)
    """
    if not differences:
        return Verdict.EXACT
    return Verdict.NUMERICS if largest_of(differences) <= limit else Verdict.CORRUPTION


def largest_of(differences: Sequence[KVDifference]) -> float:
    """Return the largest of all differences; 0 without any."""
    return max((difference.largest for difference in differences), default=0.0)
