"""Native quantizing is its definition in torch's operators, bit for bit, on every level."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from twostroke.kernels import native
from twostroke.kernels.quantized_weight import QuantizedWeight, quantize_in_groups, quantize_per_channel

SCALES = (1e-9, 1e-6, 1e-4, 0.02, 1.0, 1e4, 1e6, 1e9, 1e37)
"""Scales vanish in float16, are subnormal, normal, and beyond its largest."""


def adversarial(k: int, scale: float, dtype: torch.dtype) -> Tensor:
    """Random rows; and zeros, half a row of them, equal numbers, extremes of both signs, negative zeros."""
    weight = torch.randn(13, k, generator=torch.Generator().manual_seed(k)) * scale
    weight[1] = 0.0
    weight[2, : k // 2] = 0.0
    weight[3] = weight[3, 0]
    weight[4, 1] = -weight[4].abs().max()
    weight[4, 2] = weight[4].abs().max()
    weight[5] = -0.0
    weight[6] = weight[6].abs()
    weight[7] = -weight[7].abs()
    return weight.to(dtype)


def assert_same_bits(found: QuantizedWeight, expected: QuantizedWeight) -> None:
    assert torch.equal(found.codes, expected.codes)
    assert torch.equal(found.scales.view(torch.int16), expected.scales.view(torch.int16))
    assert (found.bits, found.group_size, found.dtype) == (expected.bits, expected.group_size, expected.dtype)


GROUP_SIZES = (32, 64, 128)


@cache
def defined(threads: int, k: int, dtype: torch.dtype) -> list[tuple[Tensor, QuantizedWeight, list[QuantizedWeight]]]:
    """Weights of every scale and what the definition makes of them: slow, and the same for every level."""
    weights = [adversarial(max(k, 3), scale, dtype)[:, :k] for scale in SCALES]
    return [
        (weight, quantize_per_channel(weight), [quantize_in_groups(weight, size) for size in GROUP_SIZES])
        for weight in weights
    ]


@pytest.mark.parametrize("dtype", native.DTYPES, ids=str)
@pytest.mark.parametrize("k", [1, 32, 37, 200, 256])
@pytest.mark.parametrize("level", native.levels())
def test_native_is_the_definition(threads: int, level: str, k: int, dtype: torch.dtype) -> None:
    operators = native.operators(level)
    for weight, per_channel, in_groups in defined(threads, k, dtype):
        assert_same_bits(operators.quantize_per_channel(weight), per_channel)
        for group_size, expected in zip(GROUP_SIZES, in_groups, strict=True):
            assert_same_bits(operators.quantize_in_groups(weight, group_size), expected)


@pytest.mark.parametrize("quantize", [quantize_per_channel, quantize_in_groups])
def test_a_weight_whose_scale_float16_cannot_hold_saturates(quantize: object) -> None:
    weight = torch.tensor([[1e9, -1e9, 0.0, 1e30]])
    made = quantize(weight)  # type: ignore[operator]
    assert torch.isfinite(made.dequantize()).all()
    top = made.dequantize().abs().max()
    assert top == 65504 * (127 if made.bits == 8 else 8) or top == 65504 * (7 if made.bits == 4 else 128)
    assert made.dequantize()[0, 2] == 0


def test_no_single_scale_of_those_tried_is_better() -> None:
    """The search bites: the error is below that of the scale that just holds the extreme, by what was measured."""
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    groups = weight.view(64, 8, 32)
    extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    scale = (extreme / -8).half().float()
    plain = (((groups / scale).round().clamp(-8, 7) * scale - groups).square() * groups.abs()).sum()
    searched = ((quantize_in_groups(weight).dequantize() - weight).square() * weight.abs()).sum()
    assert searched < 0.93 * plain, searched / plain
