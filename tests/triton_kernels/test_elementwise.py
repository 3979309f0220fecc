"""Norm, rotation and activation: the reference's numbers, and a row's bits are its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import pytest
import torch
from torch import Tensor

from triton_device import device
from twostroke.config.layer_spec import Activation
from twostroke.kernels.cuda import elementwise
from twostroke.kernels.reference import elementwise as reference

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy's, of the interpreter
DEVICE = device()
WEIGHT = torch.linspace(0.3, 2.0, 96)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def rotated(backend: object, x: Tensor) -> Tensor:
    """Heads of 24 out of rows of 96, each row by its own angle."""
    angles = x[:, :1].float() * torch.arange(1, 13, device=x.device)
    cos, sin = angles.cos(), angles.sin()
    heads = x.view(len(x), 4, 24).clone()
    cos, signed_sin = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
    backend.rotate_heads_(heads[:, :3], cos.to(x.dtype).unsqueeze(1), signed_sin.to(x.dtype).unsqueeze(1))
    return heads.flatten(1)


def normed_heads(backend: object, x: Tensor) -> Tensor:
    """Two of four heads of 24, in place."""
    heads = x.view(len(x), 4, 24).clone()
    backend.rms_norm_(heads[:, 1:3], WEIGHT.view(4, 24)[1:3].contiguous().to(x), 1e-6)
    return heads.flatten(1)


OPERATORS: dict[str, Callable[[object, Tensor], Tensor]] = {
    "norm": lambda backend, x: backend.rms_norm(x, WEIGHT.to(x), 1e-6),
    "norm over heads": normed_heads,
    "wide norm": lambda backend, x: backend.rms_norm(x, WEIGHT.to(x.device), 1e-6),
    "silu": lambda backend, x: backend.gate_and_mul(x, "silu"),
    "gelu": lambda backend, x: backend.gate_and_mul(x, "gelu_tanh"),
    "clamped swiglu": lambda backend, x: backend.gate_and_mul(x, "clamped_swiglu"),
    "rotation": rotated,
}
BOUNDS = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-6},
    torch.float16: {"rtol": 2e-3, "atol": 1e-4},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1e-4},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_equals_the_reference_and_a_row_is_its_own(name: str, dtype: torch.dtype) -> None:
    compute = OPERATORS[name]
    x = (torch.randn(11, 96, generator=torch.Generator().manual_seed(1)) * 3).to(DEVICE, dtype)
    found = compute(elementwise, x)
    torch.testing.assert_close(found, compute(reference, x), **BOUNDS[dtype])
    for start, stop in ((0, 1), (10, 11), (3, 8)):
        assert torch.equal(compute(elementwise, x[start:stop]), found[start:stop])
    assert compute(elementwise, x[:0]).shape == found[:0].shape


def test_rotation_is_the_references_to_the_bit() -> None:
    """Products are rounded one by one, so the results are equal to the bit."""
    for dtype in (torch.float16, torch.bfloat16):
        x = (torch.randn(5, 96, generator=torch.Generator().manual_seed(1)) * 3).to(DEVICE, dtype)
        assert torch.equal(rotated(elementwise, x), rotated(reference, x))


@pytest.mark.parametrize("width", [1, 7, 64, 100, 1030])
def test_odd_widths(width: int) -> None:
    x = torch.randn(3, 2 * width, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    for activation in get_args(Activation):
        torch.testing.assert_close(elementwise.gate_and_mul(x, activation), reference.gate_and_mul(x, activation))
    weight = torch.linspace(-1, 1, 2 * width, device=DEVICE)
    torch.testing.assert_close(elementwise.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))


def test_extremes_of_the_activation() -> None:
    x = torch.tensor([[-200.0, -30.0, -0.0, 0.0, 2.0, 90.0] + [1.0] * 6], device=DEVICE)
    for activation in get_args(Activation):
        torch.testing.assert_close(elementwise.gate_and_mul(x, activation), reference.gate_and_mul(x, activation))
