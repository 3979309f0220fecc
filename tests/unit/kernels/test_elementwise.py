"""Norm, rotation and activation: what they compute, and that a row's bits are its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from twostroke.config.load import Kernels
from twostroke.kernels import native
from twostroke.kernels.dispatch import Operators, operators_for
from twostroke.kernels.reference.elementwise import rms_norm, silu_and_mul

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
    "activation": lambda _, x: silu_and_mul(x),
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
@pytest.mark.parametrize("operator", ["norm", "norm over heads", "rotation"])
@pytest.mark.parametrize("level", native.levels())
def test_native_equals_the_reference(level: Kernels, operator: str, dtype: torch.dtype) -> None:
    x = (torch.randn(50, 96, generator=torch.Generator().manual_seed(3)) * 3).to(dtype)
    found, expected = (OPERATORS[operator](operators_for(CPU, dtype, kernels), x) for kernels in (level, "reference"))
    bounds = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(found, expected, **bounds)


@pytest.mark.parametrize("width", [1, 7, 63, 100, 1000])
def test_odd_widths(width: int) -> None:
    x = torch.randn(37, 2 * width, generator=torch.Generator().manual_seed(2))
    assert torch.equal(silu_and_mul(x)[5:6], silu_and_mul(x[5:6]))
    weight = torch.ones(2 * width)
    assert torch.equal(rms_norm(x, weight, 1e-6)[36:], rms_norm(x[36:], weight, 1e-6))


def test_activation_equals_torch() -> None:
    x = torch.tensor([[-200.0, -30.0, -1.0, 0.0, 2.0, 90.0] + [1.0] * 6])
    torch.testing.assert_close(silu_and_mul(x), F.silu(x[:, :6]))


def test_norm_equals_torch() -> None:
    x = torch.randn(5, 96)
    torch.testing.assert_close(rms_norm(x, WEIGHT, 1e-5), F.rms_norm(x, (96,), WEIGHT, 1e-5))
