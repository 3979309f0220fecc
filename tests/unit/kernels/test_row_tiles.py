"""A row's bits do not depend on the rows around it, nor on how many there are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tiers import examples
from twostroke.kernels.reference import row_tiles
from twostroke.kernels.reference.linear import PackedLinear

LADDERS = [(1,), (4,), (4, 8, 16, 32, 64), (8, 64, 512), (16,)]


@given(num_rows=st.integers(0, 1500), ladder=st.sampled_from(LADDERS))
def test_tiles_cover_the_rows_without_much_waste(num_rows: int, ladder: tuple[int, ...]) -> None:
    tiles = row_tiles.tile_heights(num_rows, ladder)
    assert set(tiles) <= set(ladder)
    assert sum(tiles) >= num_rows > sum(tiles[:-1]) or not tiles
    waste = sum(tiles) - num_rows
    assert waste < max(ladder[0], tiles[-1] // 4 + 1 if tiles else 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("num_inputs", "num_outputs", "has_bias"),
    [(64, 199, True), (256, 1280, False), (640, 256, False), (3072, 96, True), (24, 7, False)],
)
def test_a_linear_row_is_the_same_in_every_batch(
    threads: int, dtype: torch.dtype, num_inputs: int, num_outputs: int, has_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(num_outputs, num_inputs, generator=generator).to(dtype)
    bias = torch.randn(num_outputs, generator=generator).to(dtype) if has_bias else None
    linear = PackedLinear(weight, bias)
    x = torch.randn(600, num_inputs, generator=generator).to(dtype)
    alone = torch.cat([linear(row[None]) for row in x[:40]])
    exact = x[:40].double() @ weight.double().T + (0 if bias is None else bias.double())
    torch.testing.assert_close(alone.double(), exact, rtol=2e-2, atol=2e-5 * num_inputs**0.5 * 64)
    for num_rows, start in ((2, 1), (3, 0), (5, 13), (7, 2), (16, 5), (23, 3), (31, 7), (39, 1)):
        stop = start + num_rows
        assert torch.equal(linear(x[start:stop]), alone[start:stop]), (num_rows, start)
    everything = linear(x)
    assert torch.equal(everything[:40], alone)
    for num_rows in (63, 64, 65, 100, 149, 513):
        assert torch.equal(linear(x[-num_rows:]), everything[-num_rows:])
    order = torch.randperm(600, generator=generator)
    assert torch.equal(linear(x[order]), everything[order])


def test_a_head_of_151936_columns(threads: int) -> None:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(151_936, 32, generator=generator).bfloat16()
    head = PackedLinear(weight, None)
    x = torch.randn(70, 32, generator=generator).bfloat16()
    everything = head(x)
    for rows in (slice(0, 1), slice(69, 70), slice(3, 8), slice(1, 70)):
        assert torch.equal(head(x[rows]), everything[rows])


@settings(max_examples=examples(25), deadline=None)
@given(data=st.data())
def test_any_rows_in_any_order(data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(40, 96, generator=generator)
    linear = PackedLinear(torch.randn(64, 96, generator=generator), None)
    chosen = data.draw(st.lists(st.integers(0, 39), min_size=1, max_size=90))
    assert torch.equal(linear(x[chosen]), linear(x)[chosen])


def test_fingerprints_show_the_order_of_additions() -> None:
    x, w = row_tiles.fingerprint(32, 48, 256, torch.empty(0))
    forwards = sum((x[:, k, None] * w[None, :, k] for k in range(256)), torch.zeros(32, 48))
    backwards = sum((x[:, k, None] * w[None, :, k] for k in reversed(range(256))), torch.zeros(32, 48))
    assert (forwards != backwards).float().mean() > 0.9
    assert forwards.abs().max() < 1e-2


def test_a_height_that_changes_bits_is_refused() -> None:
    rows, matrix = row_tiles.fingerprint(80, 64, 64, torch.empty(0))

    def product(x: torch.Tensor) -> torch.Tensor:
        exact = (x.double() @ matrix.double().T).float()
        return exact + 1e-7 if len(x) == 32 else exact

    assert row_tiles.admitted_heights(product, rows, (4, 8, 16, 32, 64)) == (4, 8, 16, 64)


def test_without_a_sound_base_it_goes_row_by_row() -> None:
    rows, matrix = row_tiles.fingerprint(80, 64, 64, torch.empty(0))

    def product(x: torch.Tensor) -> torch.Tensor:
        place = torch.arange(len(x))[:, None] * 1e-6  # a row's result depends on its position
        return (x.double() @ matrix.double().T).float() + place

    heights = row_tiles.admitted_heights(product, rows, (4, 8, 16, 32, 64))
    assert heights == row_tiles.ROW_BY_ROW
    found = row_tiles.in_row_tiles(product, rows[:5], heights)
    assert torch.equal(found, torch.cat([product(row[None]) for row in rows[:5]]))


def test_a_proof_is_made_once_and_kept_for_the_report() -> None:
    weight = torch.randn(56, 40)
    PackedLinear(weight, None)
    number = len(row_tiles.proofs())
    PackedLinear(weight.clone(), None)
    assert len(row_tiles.proofs()) == number
    assert any(proof.name == "linear 40 -> 56 float32" and proof.heights for proof in row_tiles.proofs())
