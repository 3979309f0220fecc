"""Weights of floats: the reference's product, and a row's bits are its own; without that promise, cuBLAS's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from triton_device import device
from twostroke.kernels import cuda
from twostroke.kernels.cuda import float_linear, linear
from twostroke.kernels.reference.elementwise import gate_and_mul
from twostroke.kernels.reference.linear import PlainLinear
from twostroke.kernels.streamed_weight import StreamedWeight

DEVICE = device()
N, K = 150, 300  # no multiple of a tile, of a span or of a run


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def weight_of(n: int = N, k: int = K, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return numbers(n, k, seed=1, dtype=dtype)


WAYS = {
    "high tiles": (1, 70, (128, False)),
    "high tiles, runs apart": (1000, 70, (128, True)),
    "low tiles": (3, 3, (64, False)),
    "low tiles for a single row, on a small card": (1, 1, (64, False)),
    "runs apart": (1000, 3, (64, True)),
}
"""The processors of a card, the rows of a product, and the tile's height and whether runs are apart."""


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return how a product is cut, from its rows and the size of the card."""
    monkeypatch.setattr(float_linear, "num_multiprocessors", lambda device: WAYS[request.param][0])
    return request.param


@pytest.mark.parametrize("k", [K, 20, 128], ids=lambda k: f"{k} inputs")
def test_equals_torch(way: str, k: int) -> None:
    num_rows = WAYS[way][1]
    weight, bias, x = weight_of(k=k), torch.linspace(-1, 1, N, device=DEVICE), numbers(num_rows, k, seed=3)
    packed = linear.pack_linear(weight, bias)
    torch.testing.assert_close(packed(x), F.linear(x, weight, bias), rtol=1e-5, atol=1e-4)
    residual = numbers(num_rows, N, seed=4)
    assert torch.equal(packed.add_to(residual, x), residual + packed(x))
    assert torch.equal(packed.in_float32(x), packed(x).float())
    assert torch.equal(packed.rows(torch.tensor([5, 149, 5], device=DEVICE)), weight[[5, 149, 5]])
    assert packed(x[:0]).shape == (0, N)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_types(dtype: torch.dtype) -> None:
    weight, x = weight_of(dtype=dtype), numbers(4, K, seed=3, dtype=dtype)
    expected = F.linear(x.float(), weight.float())
    torch.testing.assert_close(linear.pack_linear(weight, None)(x).float(), expected, rtol=1e-2, atol=0.1)


def test_a_row_is_the_same_alone_and_among_any_others_however_the_product_is_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over the borders of both sizes of tiles, of bands of tiles, and of who adds the runs."""
    weight, bias, x = weight_of(), torch.linspace(-1, 1, N, device=DEVICE), numbers(200, K, seed=3)
    monkeypatch.setattr(float_linear, "_BAND", 2)
    found = []
    for processors in (1, 5, 1000):
        monkeypatch.setattr(float_linear, "num_multiprocessors", lambda device, processors=processors: processors)
        packed = linear.pack_linear(weight, bias)
        assert isinstance(packed, float_linear.FloatLinear)
        found.append(packed(x))
        for start, stop in ((0, 1), (199, 200), (60, 70), (3, 150)):
            assert torch.equal(packed(x[start:stop]), found[-1][start:stop])
    assert all(torch.equal(other, found[0]) for other in found)


def test_every_way_is_taken(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    tiled = float_linear.FloatLinear._tiled

    def watched(
        self: float_linear.FloatLinear,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        tile: float_linear.Tile,
        *,
        apart: bool,
    ) -> torch.Tensor:
        seen.append((tile.height, apart))
        return tiled(self, x, residual, tile, apart=apart)

    packed = linear.pack_linear(weight_of(), None)
    monkeypatch.setattr(float_linear.FloatLinear, "_tiled", watched)
    _, num_rows, expected = WAYS[way]
    packed(numbers(num_rows, K, seed=3))
    assert seen == [expected]


def test_the_copy_engine_gives_the_bits_of_low_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the borders of tiles, with bias and residual; rows that it cannot read go another way."""
    monkeypatch.setattr(float_linear, "num_multiprocessors", lambda device: 1)
    monkeypatch.setattr(float_linear, "has_tma", lambda device: True)
    # in the interpreter, each product adds up a span by itself
    monkeypatch.setattr(float_linear, "_TMA_SPAN", 64)
    described = 0
    made = float_linear.as_tensor_descriptor

    def counted(matrix: torch.Tensor, block: tuple[int, int]) -> Any:
        nonlocal described
        described += 1
        return made(matrix, block)

    dtype = torch.bfloat16
    packed = linear.pack_linear(weight_of(k=500, dtype=dtype), None)
    monkeypatch.setattr(float_linear, "as_tensor_descriptor", counted)
    packed(numbers(70, 500, seed=3, dtype=dtype))  # inputs of no whole vectors
    assert not described
    packed = linear.pack_linear(weight_of(k=1024, dtype=dtype), torch.linspace(-1, 1, N, device=DEVICE, dtype=dtype))
    described = 0
    x, residual = numbers(130, 1032, seed=3, dtype=dtype), numbers(130, N, seed=4, dtype=dtype)
    found = packed.add_to(residual, x[:, :1024])
    assert described == 2
    assert torch.equal(packed.add_to(residual[:3], x[:3, :1024].contiguous()), found[:3])
    assert torch.equal(packed.add_to(residual[66:], x[66:, :1024]), found[66:])
    assert described == 2
    off = torch.cat([torch.zeros_like(x[:, :1]), x], 1)[:, 1:1025]  # whose rows begin between vectors
    assert torch.equal(packed.add_to(residual, off), found)
    assert described == 2


def test_a_share_of_the_outputs_has_the_bits_of_all() -> None:
    """Ranks that share a weight's rows rely on this."""
    weight, x = weight_of(), numbers(2, K, seed=3)
    whole = linear.pack_linear(weight, None)(x)
    parts = [linear.pack_linear(part, None)(x) for part in weight.split([40, 110])]
    assert torch.equal(torch.cat(parts, dim=1), whole)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy's, of the interpreter
def test_both_factors_of_a_gated_map() -> None:
    weight, x = weight_of(), numbers(3, K, seed=3)
    for activation in ("silu", "gelu_tanh", "clamped_swiglu"):
        expected = gate_and_mul(F.linear(x, weight), activation)
        torch.testing.assert_close(linear.pack_gated(weight, None, activation)(x), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_streamed_weights(batch_invariant: bool) -> None:
    pack = cuda.operators(batch_invariant=batch_invariant).pack_linear
    weight, x = weight_of(), numbers(3, K, seed=3)
    streamed = StreamedWeight((N, K), torch.float32, lambda begin, end: weight[begin:end])
    assert torch.equal(pack(streamed, None)(x), pack(weight, None)(x))


def test_without_the_promise_torch_multiplies_all_rows_at_once() -> None:
    packed = cuda.operators(batch_invariant=False).pack_linear(weight_of(), None)
    x = numbers(33, K, seed=3)
    assert isinstance(packed, PlainLinear)
    assert torch.equal(packed(x), F.linear(x, weight_of()))
