"""Matrix products whose rows do not depend on the number of rows.

A GEMM library picks its inner loop by the number of rows M, and different loops add in different orders: a row gets
other bits alone than among others. Measured with torch 2.13 on one CPU, float32 agrees with itself for every M that is
a multiple of 4 and differs at M = 1, 2, 3, 5; bfloat16 agrees from M = 2 on. That is an observation on one machine, so
nothing is assumed: a height is used only after a proof on the machine it will run on.

    M = 71 rows, admitted heights 4 8 16 32 64:      | 64 ......................... | 4 | 3+1 |
                                                        one GEMM of a proven height     padded with a zero row

The proof multiplies fingerprint matrices, in which every product appears once with each sign. The exact result is 0.
The computed result is the rounding error of the additions alone, so two orders of addition practically never agree.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from twostroke.log import get_logger

log = get_logger(__name__)

BASE_HEIGHT = 16
HEIGHTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
ROW_BY_ROW = (1,)
"""Heights where not even the base height passes: one row a call, slow and exact."""

_LARGE_WEIGHT = 1 << 25
"""Elements above which each product of a proof takes tens of milliseconds, as for the head of a large vocabulary. Then
fewer heights are tried, with the model's own weight instead of a second matrix of that size."""
_LARGE_HEIGHTS = (4, 16, 64, 256)
_LARGE_PRODUCT = 1 << 35
"""Multiply-adds of the largest product of such a proof; a head of 151,936 x 1,024 stops at 64 rows."""


@dataclass(frozen=True, slots=True)
class Proof:
    """Heights admitted for one product, and the time of the proof, for the start-up report."""

    name: str
    heights: tuple[int, ...]
    """Admitted numbers of rows, rising."""
    time_s: float


_proofs: dict[tuple[object, ...], Proof] = {}


def proofs() -> tuple[Proof, ...]:
    """Return every proof this process has made, in order."""
    return tuple(_proofs.values())


def prove_once(key: tuple[object, ...], prove: Callable[[], tuple[int, ...]], name: str) -> tuple[int, ...]:
    """Run a proof once per key and process, log the admitted heights and return them."""
    if key not in _proofs:
        start_s = time.perf_counter()
        heights = prove()
        proof = _proofs[key] = Proof(name, heights, time.perf_counter() - start_s)
        level = log.warning if heights == ROW_BY_ROW else log.info
        level("%s: rows are independent at heights %s (proved in %.3f s)", name, heights, proof.time_s)
    return _proofs[key].heights


def linear_heights(weight: Tensor, bias: Tensor | None) -> tuple[int, ...]:
    """Return the heights at which `x @ weight.T + bias` gives each row the same bits at every position.

    Args:
        weight: [N, K].
        bias: [N] or None.

    Returns:
        Admitted heights, rising; ROW_BY_ROW when the base height itself fails.
    """
    num_outputs, num_inputs = weight.shape
    key = (num_inputs, num_outputs, bias is not None, weight.dtype, weight.device, torch.get_num_threads())

    def prove() -> tuple[int, ...]:
        if weight.numel() > _LARGE_WEIGHT:
            candidates = [height for height in _LARGE_HEIGHTS if height * weight.numel() <= _LARGE_PRODUCT] or [4]
            rows, _ = fingerprint(max(candidates[-1], BASE_HEIGHT) + BASE_HEIGHT, 1, num_inputs, weight)
            return admitted_heights(lambda x: F.linear(x, weight, bias), rows, candidates, starts=(7,))
        rows, matrix = fingerprint(HEIGHTS[-1] + BASE_HEIGHT, min(num_outputs, 1024), num_inputs, weight)
        matrix = matrix.repeat(-(-num_outputs // len(matrix)), 1)[:num_outputs]
        faint = None if bias is None else bias * 2.0**-20  # the bias at full size would hide the rounding errors
        return admitted_heights(lambda x: F.linear(x, matrix, faint), rows, HEIGHTS)

    return prove_once(key, prove, f"linear {num_inputs} -> {num_outputs} {str(weight.dtype).removeprefix('torch.')}")


def fingerprint(num_rows: int, num_outputs: int, num_inputs: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return matrices x [num_rows, num_inputs] and w [num_outputs, num_inputs] with x @ w.T == 0 up to rounding."""
    generator = torch.Generator().manual_seed(20_24)
    half = -(-num_inputs // 2)
    order = torch.randperm(num_inputs, generator=generator)

    def spread(rows: int) -> Tensor:
        scale = torch.exp2(torch.randint(-3, 4, (rows, half), generator=generator).float())
        return (torch.randn(rows, half, generator=generator) * scale).to(like.dtype)

    a, b = spread(num_rows), spread(num_outputs)
    x, w = torch.cat([a, -a], 1)[:, order], torch.cat([b, b], 1)[:, order]
    return x.contiguous().to(like.device), w.contiguous().to(like.device)


def admitted_heights(
    multiply: Callable[[Tensor], Tensor], rows: Tensor, candidates: Iterable[int], *, starts: tuple[int, ...] = (0, 7)
) -> tuple[int, ...]:
    """Return the heights that give every row the same bits as the base height.

    Args:
        multiply: [h, K] -> [h, N].
        rows: [num_rows, K] with at least the highest candidate plus BASE_HEIGHT rows, a multiple of BASE_HEIGHT.
        candidates: heights to try.
        starts: where the tested tiles begin; each start puts other rows into every position of a tile.
    """

    def in_tiles(start: int, stop: int, height: int) -> Tensor:
        return torch.cat([multiply(rows[i : i + height]) for i in range(start, stop, height)])

    expected = in_tiles(0, len(rows), BASE_HEIGHT)
    # at the base height a row's position must not matter: shift the grid by five rows, and reverse it
    if not torch.equal(in_tiles(5, 5 + BASE_HEIGHT, BASE_HEIGHT), expected[5 : 5 + BASE_HEIGHT]):
        return ROW_BY_ROW
    if not torch.equal(multiply(rows[:BASE_HEIGHT].flip(0)).flip(0), expected[:BASE_HEIGHT]):
        return ROW_BY_ROW

    def holds(height: int) -> bool:
        if height == BASE_HEIGHT:
            return True
        span = max(height, BASE_HEIGHT)
        return all(
            torch.equal(in_tiles(start, start + span, height), expected[start : start + span]) for start in starts
        )

    return tuple(height for height in sorted(candidates) if holds(height))


def tile_heights(num_rows: int, heights: tuple[int, ...]) -> list[int]:
    """Return heights of tiles that cover `num_rows` rows; only the last may be larger than needed.

    A tile that is at least three quarters full is cheaper than two smaller ones.

    >>> tile_heights(71, (4, 8, 16, 32, 64)), tile_heights(60, (4, 8, 16, 32, 64)), tile_heights(1, (4, 8))
    ([64, 8], [64], [4])
    """
    tiles: list[int] = []
    left = num_rows
    while left > 0:
        below = [height for height in heights if height <= left]
        above = [height for height in heights if height >= left]
        fits = bool(above) and (not below or 4 * left >= 3 * above[0])
        tiles.append(above[0] if fits else below[-1])
        left -= tiles[-1]
    return tiles


def in_row_tiles(multiply: Callable[[Tensor], Tensor], x: Tensor, heights: tuple[int, ...]) -> Tensor:
    """Multiply x [num_rows, K] in tiles of admitted heights; return [num_rows, N]."""
    num_rows = len(x)
    if num_rows in heights:
        return multiply(x)
    tiles = tile_heights(num_rows, heights)
    missing = sum(tiles) - num_rows
    if missing:
        x = F.pad(x, (0, 0, 0, missing))
    if len(tiles) == 1:
        return multiply(x)[:num_rows]
    return torch.cat([multiply(part) for part in x.split(tiles)])[:num_rows]
