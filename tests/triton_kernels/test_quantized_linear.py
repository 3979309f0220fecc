"""Weights of 8 and 4 bits: the reference's product, and a row's bits are its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from triton_device import device
from twostroke.kernels.cuda import linear
from twostroke.kernels.cuda.sizes import Sizes
from twostroke.kernels.quantized_weight import QuantizedWeight, quantize_fp8, quantize_in_groups, quantize_per_channel
from twostroke.kernels.reference.elementwise import gate_and_mul
from twostroke.kernels.streamed_weight import StreamedWeight

DEVICE = device()
N, K = 70, 320  # no multiple of a tile, of a span of 128, or of a run


def weight_of(kind: str, dtype: torch.dtype = torch.float32, n: int = N) -> QuantizedWeight:
    numbers = torch.randn(n, K, generator=torch.Generator().manual_seed(1)).to(dtype)
    if kind == "int8":
        return quantize_per_channel(numbers).to(DEVICE)
    if kind == "fp8":
        return quantize_fp8(numbers).to(DEVICE)
    weight = quantize_in_groups(numbers, 64 if kind == "groups of 64" else 32)
    if kind == "with mins":
        weight = replace(weight, mins=(weight.scales.float() * 0.3).half())
    if kind == "in another order":
        weight = replace(weight, order=torch.randperm(K, generator=torch.Generator().manual_seed(2)))
    return weight.to(DEVICE)


KINDS = ["int8", "fp8", "int4", "groups of 64", "with mins", "in another order"]


def inputs(num_rows: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(num_rows, K, generator=torch.Generator().manual_seed(3)).to(DEVICE, dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_numbers_that_the_codes_stand_for(kind: str) -> None:
    weight, bias = weight_of(kind), torch.linspace(-1, 1, N, device=DEVICE)
    packed, x = linear.pack_linear(weight, bias), inputs(3)
    expected = F.linear(x, weight.dequantize(), bias)
    torch.testing.assert_close(packed(x), expected, rtol=1e-5, atol=1e-4)
    residual = torch.randn(3, N, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    assert torch.equal(packed.add_to(residual, x), residual + packed(x))
    assert torch.equal(packed.rows(torch.tensor([5, 69, 5], device=DEVICE)), weight.dequantize()[[5, 69, 5]])
    assert packed(x[:0]).shape == (0, N)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_types(dtype: torch.dtype) -> None:
    weight, x = weight_of("int4", dtype), inputs(4, dtype)
    expected = F.linear(x.float(), weight.dequantize().float())
    torch.testing.assert_close(linear.pack_linear(weight, None)(x).float(), expected, rtol=1e-2, atol=0.1)


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
def test_a_row_is_the_same_alone_and_among_any_others(kind: str) -> None:
    """Over the borders of both heights of tiles, and of who adds the runs."""
    packed, x = linear.pack_linear(weight_of(kind), None), inputs(70)
    everything = packed(x)
    for start, stop in ((0, 1), (69, 70), (3, 19), (13, 30), (5, 69)):
        assert torch.equal(packed(x[start:stop]), everything[start:stop])


def test_both_factors_of_a_gated_map() -> None:
    weight, x = weight_of("int4"), inputs(3)
    expected = gate_and_mul(F.linear(x, weight.dequantize()), "silu")
    torch.testing.assert_close(linear.pack_gated(weight, None, "silu")(x), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_are_known_before(kind: str) -> None:
    weight = weight_of(kind)
    packed = linear.pack_linear(weight, None)
    assert isinstance(packed, linear.QuantizedLinear)
    assert Sizes().weight((N, K), weight.format, weight.dtype, gated=False) == packed.nbytes


def test_a_streamed_weight_is_packed_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, asked = weight_of("with mins"), []

    def rows(begin: int, end: int) -> QuantizedWeight:
        asked.append((begin, end))
        return weight.select_rows(slice(begin, end))

    monkeypatch.setattr(linear, "_NUMBERS_PER_CHUNK", 30 * K)
    found, x = linear.pack_linear(StreamedWeight((N, K), torch.float32, rows), None), inputs(2)
    assert torch.equal(found(x), linear.pack_linear(weight, None)(x))
    assert asked == [(0, 1), (0, 30), (30, 60), (60, 70)]
