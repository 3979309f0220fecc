"""Weights of 2 to 8 bits: exactly what their definition says, and bit for bit the same whatever the batch."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import Tensor

from twostroke.config.layer_spec import Activation
from twostroke.config.load import ActivationQuantization, Kernels
from twostroke.kernels import native
from twostroke.kernels.dispatch import operators_for
from twostroke.kernels.quantized_weight import CodeTable, QuantizedWeight, quantize_in_groups, quantize_per_channel

CPU = torch.device("cpu")
SHAPES = [(1, 16), (17, 32), (64, 64), (70, 96), (130, 256), (33, 200), (5, 37)]
Form = tuple[int, int, bool, CodeTable | None]
"""Bits, group, whether there are mins, and a table of codes."""
FORMATS: list[Form] = [
    *((bits, group, has_min, None) for bits in (8, 4) for group in (16, 32, 64, 128) for has_min in (False, True)),
    (5, 32, False, None),
    (5, 32, True, None),
    (4, 32, False, "iq4"),
    (4, 32, False, "fp4"),
    (4, 16, False, "fp4"),
]
K_TYPES: list[Form] = [
    (2, 16, True, None),
    (3, 16, False, None),
    (4, 32, True, None),
    (5, 32, True, None),
    (6, 16, False, None),
    (4, 32, False, "iq4"),
]
"""Of those with super-blocks."""
K_SHAPES = [(1, 256), (70, 512), (33, 1280)]


def random(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def shapes_of(form: Form) -> list[tuple[int, int]]:
    """Rows of codes in a table are of whole groups."""
    return [(n, k) for n, k in SHAPES if form[3] is None or k % form[1] == 0]


def weight_of(n: int, k: int, form: Form, dtype: torch.dtype, seed: int = 0) -> QuantizedWeight:
    bits, group, has_min, table = form
    generator = torch.Generator().manual_seed(seed)
    groups = -(-k // group)
    codes = torch.randint(0, 2**bits, (n, k), generator=generator, dtype=torch.uint8)
    scales = (torch.rand(n, groups, generator=generator) * 0.02 + 1e-5).half()
    mins = (torch.randn(n, groups, generator=generator) * 0.05).half() if has_min else None
    return QuantizedWeight(codes, scales, mins, bits, group, dtype, table=table)


def k_type_of(n: int, k: int, form: Form, dtype: torch.dtype) -> QuantizedWeight:
    bits, group, has_min, table = form
    generator = torch.Generator().manual_seed(n)
    codes = torch.randint(0, 2**bits, (n, k), generator=generator, dtype=torch.uint8)
    least, most = (0, 16 if bits == 2 else 64) if has_min else (-128, 128) if bits == 6 else (-32, 32)
    scales = torch.randint(least, most, (n, k // group), generator=generator, dtype=torch.int8)
    mins = torch.randint(0, most, (n, k // group), generator=generator, dtype=torch.int8) if has_min else None
    super_scales, super_mins = (torch.randn(2, n, k // 256, generator=generator) * 2e-4).half()
    return QuantizedWeight(
        codes,
        scales,
        mins,
        bits,
        group,
        dtype,
        super_scales=super_scales,
        super_mins=super_mins if has_min else None,
        table=table,
    )


def quantized(x: Tensor, weight_group: int) -> Tensor:
    """Inputs as the kernels see them: 8 bits, symmetric, in groups as large as the weight's but at least 32. float64"""
    (num_rows, k), group = x.shape, max(weight_group, 32)
    padded = torch.nn.functional.pad(x.float(), (0, -k % group)).view(num_rows, -1, group)
    largest = padded.abs().amax(-1, keepdim=True)
    codes = torch.where(largest > 0, padded * (127 / largest), 0.0).round()
    return (codes.double() * (largest / 127).double()).view(num_rows, -1)[:, :k]


@pytest.mark.parametrize("level", native.levels())
@pytest.mark.parametrize("form", FORMATS)
def test_equals_the_definition(form: Form, level: Kernels) -> None:
    for n, k in shapes_of(form):
        weight, bias = weight_of(n, k, form, torch.float32), random(n, dtype=torch.float32, seed=1)
        x, residual = random(9, k, dtype=torch.float32, seed=2), random(9, n, dtype=torch.float32, seed=3)
        linear = operators_for(CPU, torch.float32, level).pack_linear(weight, bias)
        exact = quantized(x, form[1]) @ weight.dequantize().double().T + bias.double()
        torch.testing.assert_close(linear(x).double(), exact, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(linear.add_to(residual, x).double(), exact + residual.double(), rtol=1e-4, atol=1e-4)
        ids = torch.tensor([n - 1, 0, n // 2])
        assert torch.equal(linear.rows(ids), weight.dequantize()[ids])


@pytest.mark.parametrize("dtype", native.DTYPES, ids=str)
@pytest.mark.parametrize(
    "form", [(8, 128, False, None), (4, 32, False, None), (4, 128, True, None), (4, 32, False, "iq4")]
)
@pytest.mark.parametrize("level", native.levels())
def test_a_row_is_the_same_alone_and_among_any_others(
    threads: int, level: Kernels, form: Form, dtype: torch.dtype
) -> None:
    operators = operators_for(CPU, dtype, level)
    k = 300 if form[3] is None else 320
    weight, x = weight_of(140, k, form, dtype), random(150, k, dtype=dtype, seed=2)
    linear, gated = operators.pack_linear(weight, None), operators.pack_gated(weight, None, "gelu_tanh")
    plain, activated = linear(x), gated(x)
    assert torch.equal(linear.in_float32(x), plain.float())
    for count in (1, 2, 3, 5, 6, 7, 13, 40, 130):
        for begin in (0, 1, 20):
            rows = slice(begin, begin + count)
            assert torch.equal(linear(x[rows]), plain[rows])
            assert torch.equal(gated(x[rows]), activated[rows])


@pytest.mark.parametrize("dtype", native.DTYPES, ids=str)
@pytest.mark.parametrize("level", native.levels())
@pytest.mark.parametrize("form", FORMATS)
def test_with_inputs_as_they_are_the_numbers_count_that_the_codes_stand_for(
    form: Form, level: Kernels, dtype: torch.dtype
) -> None:
    """To the bit, at every height: codes are decoded on the way, and nothing else differs from a weight of floats."""
    decoding, plain = operators_for(CPU, dtype, level, "none"), operators_for(CPU, dtype, level)
    for n, k in shapes_of(form):
        weight, bias = weight_of(n, k, form, dtype), random(n, dtype=dtype, seed=1)
        linear, expected = (o.pack_linear(w, bias) for o, w in ((decoding, weight), (plain, weight.dequantize())))
        for num_rows in (1, 2, 7, 16, 33, 150):
            x = random(num_rows, k, dtype=dtype, seed=2)
            assert torch.equal(linear(x), expected(x))
            assert torch.equal(linear.in_float32(x), expected.in_float32(x))
            assert torch.equal(linear.add_to(x[:, :1].expand(-1, n), x), expected.add_to(x[:, :1].expand(-1, n), x))
    weight, x = weight_of(70, 96, form, dtype), random(9, 96, dtype=dtype)
    for activation in get_args(Activation):
        expected = plain.pack_gated(weight.dequantize(), None, activation)(x)
        assert torch.equal(decoding.pack_gated(weight, None, activation)(x), expected)


@pytest.mark.parametrize("dtype", native.DTYPES, ids=str)
@pytest.mark.parametrize("activations", ["int8", "none"])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("level", native.levels())
def test_columns_in_an_order_of_their_own(
    level: Kernels, bits: int, activations: ActivationQuantization, dtype: torch.dtype
) -> None:
    """Bit for bit what a weight without an order gives for inputs that come in that order."""
    for n, k in [(33, 200), (64, 64)]:
        plain, x = weight_of(n, k, (bits, 32, True, None), dtype), random(9, 2 * k, dtype=dtype, seed=2)[:, :k]
        order = torch.randperm(k, generator=torch.Generator().manual_seed(3))
        ordered = replace(plain, order=order)
        assert torch.equal(ordered.dequantize()[:, order], plain.dequantize())
        pack = operators_for(CPU, dtype, level, activations).pack_linear
        linear, ids = pack(ordered, None), torch.tensor([n - 1, 0])
        assert torch.equal(linear(x), pack(plain, None)(x[:, order].contiguous()))
        assert torch.equal(linear.rows(ids), ordered.dequantize()[ids])


@pytest.mark.parametrize("bits", [8, 4])
def test_levels_agree_about_the_integers(bits: int) -> None:
    """Sums inside a group are exact; across groups they are floats, which levels with and without fma round apart."""
    weight, x = weight_of(70, 32, (bits, 32, False, None), torch.float32), random(7, 32, dtype=torch.float32)
    found = [operators_for(CPU, torch.float32, level).pack_linear(weight, None)(x) for level in native.levels()]
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("form", FORMATS)
def test_levels_that_fuse_agree_to_the_bit(form: Form) -> None:
    """Vectors row by row, tiles of sixteen rows: another way to the same integers and the same order of floats."""
    fusing = [level for level in native.levels() if level != "portable"]
    for n, k in shapes_of(form):
        weight = weight_of(n, k, form, torch.bfloat16)
        for num_rows in (1, 5, 16, 21, 150):
            x = random(num_rows, k, dtype=torch.bfloat16, seed=2)
            found = [operators_for(CPU, torch.bfloat16, level).pack_linear(weight, None)(x) for level in fusing]
            assert all(torch.equal(other, found[0]) for other in found)


@pytest.mark.parametrize("level", native.levels())
@pytest.mark.parametrize("form", K_TYPES)
def test_super_blocks_equal_their_definition(form: Form, level: Kernels) -> None:
    for n, k in K_SHAPES:
        weight, x = k_type_of(n, k, form, torch.float32), random(9, k, dtype=torch.float32, seed=2)
        linear = operators_for(CPU, torch.float32, level).pack_linear(weight, None)
        exact = quantized(x, form[1]) @ weight.dequantize().double().T
        torch.testing.assert_close(linear(x).double(), exact, rtol=1e-4, atol=1e-4)
        ids = torch.tensor([n - 1, 0, n // 2])
        assert torch.equal(linear.rows(ids), weight.dequantize()[ids])


@pytest.mark.parametrize("dtype", native.DTYPES, ids=str)
@pytest.mark.parametrize("level", native.levels())
@pytest.mark.parametrize("form", K_TYPES)
def test_rows_against_super_blocks_do_not_know_each_other(
    threads: int, form: Form, level: Kernels, dtype: torch.dtype
) -> None:
    weight, x = k_type_of(140, 768, form, dtype), random(70, 768, dtype=dtype, seed=2)
    operators = operators_for(CPU, dtype, level)
    linear, gated = operators.pack_linear(weight, None), operators.pack_gated(weight, None, "silu")
    plain, activated = linear(x), gated(x)
    for count in (1, 2, 5, 6, 13, 40):
        rows = slice(20, 20 + count)
        assert torch.equal(linear(x[rows]), plain[rows])
        assert torch.equal(gated(x[rows]), activated[rows])
    decoding, of_numbers = (
        operators_for(CPU, dtype, level, activations).pack_linear(numbers, None)
        for activations, numbers in (("none", weight), (None, weight.dequantize()))
    )
    assert torch.equal(decoding(x), of_numbers(x))


@pytest.mark.parametrize("form", K_TYPES)
def test_levels_that_fuse_agree_about_super_blocks_to_the_bit(form: Form) -> None:
    fusing = [level for level in native.levels() if level != "portable"]
    for n, k in K_SHAPES:
        weight = k_type_of(n, k, form, torch.bfloat16)
        for num_rows in (1, 5, 16, 21):
            x = random(num_rows, k, dtype=torch.bfloat16, seed=2)
            found = [operators_for(CPU, torch.bfloat16, level).pack_linear(weight, None)(x) for level in fusing]
            assert all(torch.equal(other, found[0]) for other in found)


@pytest.mark.parametrize("form", [*K_TYPES, (5, 32, True, None)])
def test_plain_formats_stand_for_nearly_the_same_numbers(form: Form) -> None:
    """Off by the rounding of scales and mins to float16, in whole parts of the largest number of a group."""
    weight = k_type_of(33, 512, form, torch.float32)
    plain = weight.plain()
    assert plain.format == weight.format.plain
    assert plain.bits in (4, 8)
    largest = weight.dequantize().abs().amax()
    torch.testing.assert_close(plain.dequantize(), weight.dequantize(), rtol=0, atol=float(largest) * 2**-10)
    assert plain.plain() is plain


@pytest.mark.parametrize("form", [form for form in FORMATS if form[3] is not None])
def test_tables_become_numbers_of_8_bits(form: Form) -> None:
    weight = weight_of(33, 64, form, torch.float32)
    plain = weight.plain()
    assert plain.format == weight.format.plain
    assert (plain.bits, plain.table) == (8, None)
    assert torch.equal(plain.dequantize(), weight.dequantize())
    assert not plain.has_same_format(replace(weight, bits=8))


def test_quantizing_keeps_the_weight() -> None:
    weight = random(64, 256, dtype=torch.bfloat16, scale=0.03)
    for made, bound in ((quantize_per_channel(weight), 0.01), (quantize_in_groups(weight), 0.11)):
        error = (made.dequantize().float() - weight.float()).norm() / weight.float().norm()
        assert error < bound, error
        assert made.shape == weight.shape


def test_zeros_and_odd_widths_survive_quantizing() -> None:
    weight = torch.zeros(5, 37)
    weight[1, 3] = 2.0
    for made in (quantize_per_channel(weight), quantize_in_groups(weight)):
        torch.testing.assert_close(made.dequantize(), weight, rtol=1e-2, atol=1e-6)


def test_without_native_kernels_the_numbers_are_multiplied_that_the_codes_stand_for() -> None:
    weight, x = weight_of(33, 64, (4, 32, True, None), torch.float32), random(5, 64, dtype=torch.float32)
    linear = operators_for(CPU, torch.float32, "reference").pack_linear(weight, None)
    torch.testing.assert_close(linear(x), x @ weight.dequantize().T, rtol=1e-5, atol=1e-5)
