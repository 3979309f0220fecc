"""Norm, rotation and activation: what they compute, and that a row's bits are its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from twostroke.config.layer_spec import Activation
from twostroke.config.load import Kernels
from twostroke.kernels import native
from twostroke.kernels.activation import activated
from twostroke.kernels.dispatch import operators_for
from twostroke.kernels.interface import Operators
from twostroke.kernels.reference.elementwise import gate_and_mul, rms_norm
from twostroke.kernels.soft_cap import soft_cap

CPU = torch.device("cpu")
WEIGHT = torch.linspace(0.3, 2.0, 96)


def rotated(operators: Operators, x: Tensor) -> Tensor:
    """Heads of 24 out of rows of 96, each row by its own angle."""
    angles = x[:, :1].float() * torch.arange(1, 13)
    cos, sin = angles.cos(), angles.sin()
    heads = x.view(len(x), 4, 24).clone()
    cos, signed_sin = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
    operators.rotate_heads_(heads, cos.to(x.dtype).unsqueeze(1), signed_sin.to(x.dtype).unsqueeze(1))
    return heads.flatten(1)


def normed_heads(operators: Operators, x: Tensor) -> Tensor:
    """Two of four heads of 24, in place."""
    heads = x.view(len(x), 4, 24).clone()
    operators.rms_norm_(heads[:, 1:3], WEIGHT.view(4, 24)[1:3].contiguous().to(x.dtype), 1e-6)
    return heads.flatten(1)


OPERATORS: dict[str, Callable[[Operators, Tensor], Tensor]] = {
    "norm": lambda operators, x: operators.rms_norm(x, WEIGHT.to(x.dtype), 1e-6),
    "norm over heads": normed_heads,
    "wide norm": lambda operators, x: operators.rms_norm(x, WEIGHT, 1e-6),
    "silu": lambda _, x: gate_and_mul(x, "silu"),
    "gelu": lambda _, x: gate_and_mul(x, "gelu_tanh"),
    "clamped swiglu": lambda _, x: gate_and_mul(x, "clamped_swiglu"),
    "exact gelu": lambda _, x: activated(x.float(), "gelu").to(x.dtype),
    "squared relu": lambda _, x: activated(x.float(), "relu2").to(x.dtype),
    "expm1": lambda _, x: x.float().expm1_().to(x.dtype),
    "rotation": rotated,
}


COMPUTED = [("reference", torch.float16)]
COMPUTED += [(kernels, dtype) for kernels in ("reference", *native.levels()) for dtype in native.DTYPES]


@pytest.mark.parametrize(("kernels", "dtype"), COMPUTED, ids=str)
@pytest.mark.parametrize("operator", OPERATORS)
def test_a_row_is_the_same_alone_and_among_any_others(
    threads: int, operator: str, kernels: Kernels, dtype: torch.dtype
) -> None:
    operators, compute = operators_for(CPU, dtype, kernels), OPERATORS[operator]
    x = (torch.randn(701, 96, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    everything = compute(operators, x)
    for i in (*range(20), 350, 699, 700):
        assert torch.equal(everything[i], compute(operators, x[i : i + 1])[0])
    for start, stop in ((0, 3), (5, 6), (1, 700), (13, 44), (350, 701)):
        assert torch.equal(compute(operators, x[start:stop]), everything[start:stop])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("operator", ["norm", "wide norm", "norm over heads", "rotation"])
@pytest.mark.parametrize("level", native.levels())
def test_native_equals_the_reference(level: Kernels, operator: str, dtype: torch.dtype) -> None:
    x = (torch.randn(50, 96, generator=torch.Generator().manual_seed(3)) * 3).to(dtype)
    found, expected = (OPERATORS[operator](operators_for(CPU, dtype, kernels), x) for kernels in (level, "reference"))
    bounds = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(found, expected, **bounds)


@pytest.mark.parametrize("width", [1, 7, 63, 100, 1000])
def test_odd_widths(width: int) -> None:
    x = torch.randn(37, 2 * width, generator=torch.Generator().manual_seed(2))
    for activation in get_args(Activation):
        assert torch.equal(gate_and_mul(x, activation)[5:6], gate_and_mul(x[5:6], activation))
    for plain in ("gelu", "relu", "relu2"):
        assert torch.equal(activated(x, plain)[5:6], activated(x[5:6], plain))
    weight = torch.ones(2 * width)
    assert torch.equal(rms_norm(x, weight, 1e-6)[36:], rms_norm(x[36:], weight, 1e-6))


def test_activations_equal_torchs() -> None:
    x = torch.tensor([[-1e6, -200.0, -30.0, -1.0, 0.0, 0.3, 2.0, 90.0, 1e6] + [1.0] * 9])
    torch.testing.assert_close(gate_and_mul(x, "silu"), F.silu(x[:, :9]))
    torch.testing.assert_close(gate_and_mul(x, "gelu_tanh"), F.gelu(x[:, :9], approximate="tanh"))
    torch.testing.assert_close(gate_and_mul(x, "clamped_swiglu"), 2 * _clamped(x[:, :9]))
    ups = torch.cat([torch.full_like(x[:, :9], 6.5), x[:, :9]], dim=1)
    torch.testing.assert_close(gate_and_mul(ups, "clamped_swiglu"), _clamped(ups[:, :9]) * (1 + x[:, :9].clamp(-7, 7)))
    torch.testing.assert_close(activated(x, "gelu"), F.gelu(x))
    assert torch.equal(activated(x, "relu"), F.relu(x))
    torch.testing.assert_close(activated(x, "relu2"), x.clamp(min=0).square())


def _clamped(gate: Tensor) -> Tensor:
    return gate.clamp(max=7) * torch.sigmoid(1.702 * gate.clamp(max=7))


def test_soft_caps_equal_torchs_tanh_and_do_not_know_their_place() -> None:
    x = torch.cat([torch.tensor([-1e30, -200.0, -1.0, 0.0, 1e-3, 2.0, 90.0, 1e30]), torch.randn(91) * 30])
    torch.testing.assert_close(soft_cap(x, 30.0), 30 * torch.tanh(x / 30), rtol=1e-6, atol=1e-5)
    assert torch.equal(soft_cap(x, 30.0)[5:], soft_cap(x[5:].clone(), 30.0))


def test_a_norm_with_a_wide_weight_rounds_once() -> None:
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(4)).bfloat16()
    expected = F.rms_norm(x.float(), (96,), WEIGHT, 1e-5).bfloat16()
    assert torch.equal(rms_norm(x, WEIGHT, 1e-5), expected)
    assert not torch.equal(rms_norm(x, WEIGHT.bfloat16(), 1e-5), expected)


def test_norm_equals_torch() -> None:
    x = torch.randn(5, 96)
    torch.testing.assert_close(rms_norm(x, WEIGHT, 1e-5), F.rms_norm(x, (96,), WEIGHT, 1e-5))
