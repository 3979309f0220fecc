"""The KV self-check: a cached block is computed again and compared with what is stored. What is asked, and the verdict.

Rows do not know each other, so computing the same tokens over the same context gives the same bits: `exact` is the
rule. What differs is one of two things, and the size tells which. Another order of summation, or another kernel, moves
a number by a few roundings (`numerics`); memory that lost a bit, or a block that somebody else wrote to, moves some
numbers by about as much as they are large, or makes them NaN (`corruption`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from twostroke.config.kv_format import KVFormat, is_quantized, levels_of


class Verdict(StrEnum):
    """What a comparison says."""

    EXACT = "exact"  # the same bytes
    NUMERICS = "numerics"  # within what roundings can do
    CORRUPTION = "corruption"  # beyond that


@dataclass(frozen=True, slots=True)
class KVCheck:
    """A page of a cached prefix that is to be computed again."""

    request_id: str
    """Whose prefix it was found for, and whose tokens are in it."""
    entry: int
    """Which page: it holds the tokens from entry x block_size on."""
    block_ids: tuple[int | None, ...]
    """One per KV group, which holds the page; None where the group has it no longer (a window has passed it)."""
    context: tuple[tuple[int, ...], ...]
    """Per KV group the blocks of the pages before it, from the first on; any id where the page's tokens do not look."""


@dataclass(frozen=True, slots=True)
class KVDifference:
    """K, or V, of one layer of a block that is not as it was computed again."""

    group_id: int
    layer_id: int
    num_numbers: int
    """That differ."""
    largest: float
    """Over the vectors (a token's K or V in one head): the largest difference of a number, by the largest number of the
    vector. Infinite where either side is not finite."""


@dataclass(frozen=True, slots=True)
class Suspects:
    """Who may have read a corrupt block, by what became of them."""

    started_over: tuple[str, ...] = ()
    """They had no output yet."""
    ended: tuple[str, ...] = ()
    """With an error: their output may be wrong."""


NO_SUSPECTS = Suspects()


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check has come to."""

    request_id: str
    """Whose cached prefix it was about."""
    entry: int
    """Of the block that is meant: where something is quarantined, the first bad one of the prefix."""
    verdict: Verdict
    differences: tuple[KVDifference, ...] = ()
    """Of that block."""
    quarantined: tuple[int | None, ...] = ()
    """Per KV group, where the verdict is corruption; None for a group whose block is sound."""
    suspects: Suspects = NO_SUSPECTS

    @property
    def largest(self) -> float:
        """Of the differences; 0 without any."""
        return largest_of(self.differences)


_FORMAT_STEPS: dict[KVFormat, float] = {"f32": 2.0**-23, "f16": 2.0**-10, "bf16": 2.0**-7, "fp8": 2.0**-3}
"""One unit in the last place, by the number."""
_LAYER_NOISE = {"float32": 2.0**-18, "float16": 3 * 2.0**-11, "bfloat16": 3 * 2.0**-8}
"""What another order of summation does to a layer's output: the roundings of attention, MLP and norm to a type of few
digits; in float32 that of a sum over thousands."""


def tolerance(kv_format: KVFormat, dtype: str, num_layers: int) -> float:
    """The largest difference, in the measure of KVDifference.largest, that still counts as numerics.

    Two steps of the format (codes off by one, a number rounded the other way), and the noise of the layers before,
    which adds up like a random walk; a coarse format adds to it by what the layers read. docs/decisions/019 holds the
    bound against what two backends really differ by.

    >>> [round(tolerance(*of, num_layers=16), 4) for of in (("bf16", "bfloat16"), ("int8", "bfloat16"))]
    [0.0625, 0.0626]
    """
    # a range of codes spans from -x to x at most, so that a step is at most 2 / levels of the largest number
    step = 2.0 / levels_of(kv_format) if is_quantized(kv_format) else _FORMAT_STEPS[kv_format]
    return 2.0 * step + max(_LAYER_NOISE[dtype], step / 4) * math.sqrt(num_layers)


def verdict_of(differences: Sequence[KVDifference], limit: float) -> Verdict:
    """What these differences, all that there are, come from.

    >>> verdict_of([], 0.1), verdict_of([KVDifference(0, 3, 1, 0.02), KVDifference(0, 4, 1, float("inf"))], 0.1)
    (<Verdict.EXACT: 'exact'>, <Verdict.CORRUPTION: 'corruption'>)
    """
    if not differences:
        return Verdict.EXACT
    return Verdict.NUMERICS if largest_of(differences) <= limit else Verdict.CORRUPTION


def largest_of(differences: Sequence[KVDifference]) -> float:
    """The largest of all; 0 without any."""
    return max((difference.largest for difference in differences), default=0.0)
