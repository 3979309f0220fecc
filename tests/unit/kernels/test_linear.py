"""Linear maps of every backend against float64, and bit for bit against themselves whatever the batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from twostroke.config.load import Kernels
from twostroke.kernels.dispatch import operators_for
from twostroke.kernels.interface import Operators

CPU = torch.device("cpu")
SHAPES = [(1, 1), (1, 64), (15, 2), (16, 3), (17, 31), (63, 64), (64, 65), (65, 100), (100, 70), (192, 257), (330, 128)]
"""(N, K): around vectors of 16, panels of 64, pairs of bfloat16 and the four runs of K."""
DTYPES = [torch.float32, torch.bfloat16]


def random(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def operators(backend: Kernels, dtype: torch.dtype) -> Operators:
    return operators_for(CPU, dtype, backend)


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_equals_float64(n: int, k: int, dtype: torch.dtype, backend: Kernels) -> None:
    weight, bias = random(n, k, dtype=dtype, scale=k**-0.5), random(n, dtype=dtype, seed=1)
    x, residual = random(11, k, dtype=dtype, seed=2), random(11, n, dtype=dtype, seed=3)
    exact = x.double() @ weight.double().T
    plain = operators(backend, dtype).pack_linear(weight, None)
    with_bias = operators(backend, dtype).pack_linear(weight, bias)
    torch.testing.assert_close(plain(x).double(), exact, **tolerance(dtype))
    assert torch.equal(with_bias.in_float32(x), with_bias(x).float())
    torch.testing.assert_close(with_bias(x).double(), exact + bias.double(), **tolerance(dtype))
    torch.testing.assert_close(plain.add_to(residual, x).double(), exact + residual.double(), **tolerance(dtype))
    torch.testing.assert_close(
        with_bias.add_to(residual, x).double(), exact + bias.double() + residual.double(), **tolerance(dtype)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_gated_equals_float64(n: int, k: int, dtype: torch.dtype, backend: Kernels) -> None:
    weight, bias = random(2 * n, k, dtype=dtype, scale=k**-0.5), random(2 * n, dtype=dtype, seed=1)
    x = random(7, k, dtype=dtype, seed=2)
    for given in (None, bias):
        both = F.linear(x.double(), weight.double(), None if given is None else given.double())
        gate, up = both.chunk(2, dim=-1)
        for activation, expected in (
            ("silu", F.silu(gate) * up),
            ("gelu_tanh", F.gelu(gate, approximate="tanh") * up),
            ("clamped_swiglu", _clamped_swiglu(gate, up)),
        ):
            found = operators(backend, dtype).pack_gated(weight, given, activation)(x)
            torch.testing.assert_close(found.double(), expected, **tolerance(dtype))


def _clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    gate = gate.clamp(max=7)
    return gate * torch.sigmoid(1.702 * gate) * (up.clamp(-7, 7) + 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_clamped_swiglu_beyond_its_limits(dtype: torch.dtype, backend: Kernels) -> None:
    weight, x = random(2 * 130, 64, dtype=dtype), random(9, 64, dtype=dtype, seed=2)
    gate, up = F.linear(x.double(), weight.double()).chunk(2, dim=-1)
    assert bool((gate > 7).any() and (gate < -7).any() and (up > 7).any() and (up < -7).any())
    found = operators(backend, dtype).pack_gated(weight, None, "clamped_swiglu")(x)
    torch.testing.assert_close(found.double(), _clamped_swiglu(gate, up), **tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), [(65, 100), (330, 128), (17, 31)])
def test_a_row_is_the_same_alone_and_among_any_others(
    threads: int, n: int, k: int, dtype: torch.dtype, backend: Kernels
) -> None:
    chosen = operators(backend, dtype)
    weight, bias = random(2 * n, k, dtype=dtype), random(2 * n, dtype=dtype, seed=1)
    x, residual = random(131, k, dtype=dtype, seed=2), random(131, 2 * n, dtype=dtype, seed=3)
    linear, gated = chosen.pack_linear(weight, bias), chosen.pack_gated(weight, bias, "gelu_tanh")
    plain, added, activated = linear(x), linear.add_to(residual, x), gated(x)
    for count in (1, 2, 3, 4, 5, 6, 7, 12, 13, 64, 100):
        for begin in (0, 1, 30):
            rows = slice(begin, begin + count)
            assert torch.equal(linear(x[rows]), plain[rows])
            assert torch.equal(linear.add_to(residual[rows], x[rows]), added[rows])
            assert torch.equal(gated(x[rows]), activated[rows])
    assert torch.equal(linear(x.flip(0)), plain.flip(0))


def test_threads_do_not_change_a_bit(backend: Kernels) -> None:
    weight, x = random(330, 128, dtype=torch.bfloat16), random(50, 128, dtype=torch.bfloat16, seed=1)
    found = []
    for threads in (1, 2):
        chosen = operators(backend, torch.bfloat16)
        chosen.set_num_threads(threads)
        found.append(chosen.pack_linear(weight, None)(x))
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1e-20, 1e18])
def test_tiny_and_large_values(scale: float, dtype: torch.dtype, backend: Kernels) -> None:
    weight, x = random(40, 96, dtype=dtype, scale=scale), random(5, 96, dtype=dtype, seed=1, scale=scale**-0.5)
    found = operators(backend, dtype).pack_linear(weight, None)(x)
    exact = x.double() @ weight.double().T
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found.double() / exact.abs().max(), exact / exact.abs().max(), **tolerance(dtype))


def test_zeros_are_zeros_and_an_infinite_row_stays_alone(backend: Kernels) -> None:
    linear = operators(backend, torch.float32).pack_linear(random(33, 20, dtype=torch.float32), None)
    x = random(6, 20, dtype=torch.float32, seed=1)
    expected = linear(x)
    x[2], x[4] = 0.0, float("inf")
    found = linear(x)
    assert not found[2].any()
    assert not torch.isfinite(found[4]).any()
    for row in (0, 1, 3, 5):
        assert torch.equal(found[row], expected[row])


def test_rows_may_lie_apart(backend: Kernels) -> None:
    linear = operators(backend, torch.bfloat16).pack_linear(random(33, 20, dtype=torch.bfloat16), None)
    wide = random(6, 50, dtype=torch.bfloat16, seed=1)
    assert torch.equal(linear(wide[:, 10:30]), linear(wide[:, 10:30].contiguous()))


def test_without_batch_invariance_torch_multiplies_all_rows_at_once() -> None:
    weight, bias = random(64, 96, dtype=torch.float32), random(64, dtype=torch.float32, seed=1)
    x, residual = random(33, 96, dtype=torch.float32, seed=2), random(33, 64, dtype=torch.float32, seed=3)
    free = operators_for(CPU, torch.float32, "reference", batch_invariant=False)
    assert not free.is_batch_invariant
    plain, with_bias = free.pack_linear(weight, None), free.pack_linear(weight, bias)
    assert torch.equal(plain(x), F.linear(x, weight))
    assert torch.equal(with_bias(x), F.linear(x, weight, bias))
    assert torch.equal(plain.add_to(residual, x), torch.addmm(residual, x, weight.t()))
    assert torch.equal(with_bias.add_to(residual, x), residual + F.linear(x, weight, bias))
    gate, up = F.linear(x, weight).double().chunk(2, dim=-1)
    torch.testing.assert_close(
        free.pack_gated(weight, None, "silu")(x).double(), F.silu(gate) * up, rtol=1e-5, atol=1e-5
    )


def test_without_batch_invariance_no_height_is_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(weight: Tensor, bias: Tensor | None) -> tuple[int, ...]:
        raise AssertionError((weight.shape, bias))

    monkeypatch.setattr("twostroke.kernels.reference.linear.linear_heights", refuse)
    weight = random(64, 96, dtype=torch.float32)
    operators_for(CPU, torch.float32, "reference", batch_invariant=False).pack_linear(weight, None)
    with pytest.raises(AssertionError):
        operators_for(CPU, torch.float32, "reference").pack_linear(weight, None)
