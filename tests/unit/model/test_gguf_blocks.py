"""ggml's blocks against `gguf.quants`, which is the reference implementation: any bytes, and scales at their limits."""

from __future__ import annotations

from importlib.resources import files

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from oracle.gguf_blocks import TYPES_BY_NAME, random_blocks
from twostroke.config.load import Kernels
from twostroke.gguf.container import TYPES
from twostroke.kernels import native
from twostroke.kernels.dispatch import operators_for
from twostroke.model.gguf.blocks import REPACKED, repack

FLOAT32 = torch.float32
ROUNDING = 2**-11
"""Of float16."""


@pytest.mark.parametrize("scales", [(1e-3, 2e-2), (20.0, 30.0)], ids=["usual", "large"])
@pytest.mark.parametrize("name", TYPES_BY_NAME)
def test_a_block_stands_for_the_numbers_of_ggml(name: str, scales: tuple[float, float]) -> None:
    kind, layout = TYPES[TYPES_BY_NAME[name]], REPACKED[name]
    data = random_blocks(kind, scales)
    expected = torch.from_numpy(quants.dequantize(data, GGMLQuantizationType[name]))
    blocks = torch.from_numpy(data).unflatten(-1, (-1, kind.block_bytes))
    weight = layout.repack(blocks, tuple(expected.shape), torch.float32)
    assert (weight.bits, weight.group_size, weight.mins is not None) == (
        layout.bits,
        layout.group_size,
        layout.has_minima,
    )
    # float16 x integer is exact in float32; two products are subtracted in one rounding or another
    numbers = layout.numbers(blocks, tuple(expected.shape))
    assert torch.allclose(numbers, expected, rtol=0, atol=2**-22 * float(expected.abs().max()))
    found = weight.dequantize()
    if layout.has_super_blocks:
        assert torch.equal(found, numbers)
        weight = weight.plain()
        found = weight.dequantize()
    elif layout.is_exact:
        assert torch.equal(found, expected)
    # of the parts of a number: its scaled code, and the group's minimum seen from the middle code
    codes = (weight.codes.float() - 2 ** (weight.bits - 1)) * in_columns(weight.scales, weight.group_size)
    minima = torch.zeros_like(codes) if weight.mins is None else in_columns(weight.mins, weight.group_size)
    bound = ROUNDING * (codes.abs() + minima.abs()) + 256 * 2.0**-25
    assert ((found - expected).abs() <= bound).all()
    assert expected.abs().max() >= scales[0]


@pytest.mark.parametrize("name", native.block_types())
def test_the_native_module_takes_blocks_apart_alike(name: str) -> None:
    """To the bit, whatever the bytes: scales that are infinite or no number, too."""
    kind, layout = TYPES[TYPES_BY_NAME[name]], REPACKED[name]
    generator = np.random.default_rng(7)
    for scales in ((1e-3, 2e-2), (3e4, 6.5e4), None):
        data = (
            random_blocks(kind, scales) if scales else generator.integers(0, 256, (33, 3 * kind.block_bytes), np.uint8)
        )
        blocks = torch.from_numpy(data).unflatten(-1, (-1, kind.block_bytes))
        shape = (len(blocks), blocks.shape[1] * kind.block_size)
        expected, found = layout.repack(blocks, shape, torch.float32), repack(name, blocks, shape, torch.float32)
        assert found.format == expected.format
        for part in ("codes", "scales", "mins", "super_scales", "super_mins"):
            ours, theirs = getattr(found, part), getattr(expected, part)
            assert (ours is None) == (theirs is None), part
            if ours is not None:
                assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0)), part
        assert found.is_finite == expected.is_finite


BITS = {
    "Q4_0": 4.5, "Q4_1": 5, "Q5_0": 5.5, "Q5_1": 6, "Q8_0": 8.5, "Q2_K": 2.625, "Q3_K": 3.5625, "Q4_K": 4.625,
    "Q5_K": 5.625, "Q6_K": 6.5625, "IQ4_NL": 4.5, "IQ4_XS": 4.3125, "MXFP4": 4.5, "NVFP4": 5,
}  # fmt: skip
"""Of a weight in the native kernels' panels (docs/decisions/046)."""


@pytest.mark.parametrize("level", native.levels())
@pytest.mark.parametrize("name", BITS)
def test_the_native_kernels_multiply_the_numbers_of_ggml(name: str, level: Kernels) -> None:
    """With inputs that rounding to 8 bits leaves alone, so that nothing hides an error."""
    kind = TYPES[TYPES_BY_NAME[name]]
    data = np.tile(random_blocks(kind, (1e-3, 2e-2)), (14, 256 // kind.block_size))
    expected = torch.from_numpy(quants.dequantize(data, GGMLQuantizationType[name])).double()
    weight = repack(name, torch.from_numpy(data).unflatten(-1, (-1, kind.block_bytes)), tuple(expected.shape), FLOAT32)
    linear = operators_for(torch.device("cpu"), FLOAT32, level).pack_linear(weight, None)
    x = torch.from_numpy(np.random.default_rng(0).integers(-127, 128, (21, weight.shape[1]))).float()
    x[:, ::32] = 127
    products, bound = x.double() @ expected.T, 1e-5 if REPACKED[name].is_exact else 1e-3
    for num_rows in (1, 3, 21):
        assert (linear(x[:num_rows]).double() - products[:num_rows]).abs().max() < bound * products.abs().max()
    ids = torch.tensor([69, 0, 17])
    assert torch.equal(linear.rows(ids), weight.dequantize()[ids])
    from twostroke.kernels.native.linear import PanelSizes

    planned = PanelSizes().weight((64, 512), REPACKED[name].format, FLOAT32, gated=False)
    assert planned * 8 == BITS[name] * 64 * 512


def in_columns(of_groups: torch.Tensor, group_size: int) -> torch.Tensor:
    return of_groups.float().repeat_interleave(group_size, dim=1)


@pytest.mark.parametrize("name", ["IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"])
def test_the_tables_of_iq_types_are_those_of_ggml(name: str) -> None:
    theirs = vars(quants)[name]
    theirs.init_grid()
    with np.load(str(files("twostroke.model.gguf") / "grids.npz")) as grids:
        assert np.array_equal(grids[name], theirs.grid.reshape(theirs.grid_shape))


def test_every_exponent_of_mxfp4() -> None:
    data = np.zeros((251, 17), np.uint8)
    data[:, 0], data[:, 1:] = np.arange(251), 0xF7  # 12 and -12, up to where float32 ends
    expected = torch.from_numpy(quants.dequantize(data, GGMLQuantizationType.MXFP4))
    blocks = torch.from_numpy(data).unflatten(-1, (1, 17))
    assert torch.equal(REPACKED["MXFP4"].numbers(blocks, (251, 32)), expected)
    weight = REPACKED["MXFP4"].repack(blocks, (251, 32), torch.float32).dequantize()
    assert torch.equal(weight[104:144], expected[104:144])  # the exponents that float16 has
    assert weight.isfinite().all()


def test_every_quantized_type_that_is_read_is_repacked() -> None:
    assert REPACKED.keys() == TYPES_BY_NAME.keys()


def test_the_format_that_is_promised_is_the_one_that_comes() -> None:
    for name, layout in REPACKED.items():
        kind = TYPES[TYPES_BY_NAME[name]]
        blocks = torch.zeros(4, 2, kind.block_bytes, dtype=torch.uint8)
        weight = layout.repack(blocks, (4, 2 * kind.block_size), torch.bfloat16)
        assert weight.format == layout.format, name
