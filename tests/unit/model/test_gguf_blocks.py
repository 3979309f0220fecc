"""ggml's blocks against `gguf.quants`, which is the reference implementation: any bytes, and scales at their limits."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from numpy.typing import NDArray

from twostroke.errors import SetupError
from twostroke.gguf.tensor_types import TYPES, TensorType
from twostroke.model.gguf import lattices
from twostroke.model.gguf.blocks import REPACKED

HALF_FIELDS = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "IQ1_S": (0,), "IQ2_XXS": (0,),
    "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,), "TQ1_0": (52,), "TQ2_0": (64,),
}  # fmt: skip
"""Where a block keeps its float16 numbers, which random bytes would make NaN."""

ROUNDING = 2**-11
"""Of float16."""


def random_blocks(kind: TensorType, scales: tuple[float, float]) -> NDArray[np.uint8]:
    """[rows, bytes of a row], every byte random but those of the scales."""
    rng = np.random.default_rng(TYPES_BY_NAME[kind.name])
    blocks = rng.integers(0, 256, (5, 3, kind.block_bytes), dtype=np.uint8)
    numbers = rng.uniform(*scales, (5, 3, 1))
    for at in HALF_FIELDS.get(kind.name, ()):
        signed = numbers * rng.choice([-1, 1], (5, 3, 1))
        blocks[..., at : at + 2] = signed.astype(np.float16).view(np.uint8)
        numbers = rng.uniform(*scales, (5, 3, 1))
    if kind.name == "IQ1_M":  # a quarter of it in each of four words
        words = blocks[..., 48:].view(np.uint16)
        words[...] = words & 0x0FFF | (numbers.astype(np.float16).view(np.uint16) >> np.array([0, 4, 8, 12])) << 12
    if kind.name == "MXFP4":  # a power of two
        blocks[..., :1] = 128 + np.floor(np.log2(numbers))
    if kind.name == "NVFP4":  # exponents from -7 on, and three bits of a fraction
        exponents = np.maximum(0, np.floor(np.log2(numbers)) + 8).astype(np.uint8)
        blocks[..., :4] = exponents << 3 | blocks[..., :4] & 7
    blocks[2] = 0
    return blocks.reshape(5, -1)


TYPES_BY_NAME = {kind.name: number for number, kind in TYPES.items() if kind.is_quantized}


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
    if layout.is_exact:
        assert torch.equal(found, expected)
    # of the parts of a number: its scaled code, and the group's minimum seen from the middle code
    codes = (weight.codes.float() - 2 ** (weight.bits - 1)) * in_columns(weight.scales, weight.group_size)
    minima = torch.zeros_like(codes) if weight.mins is None else in_columns(weight.mins, weight.group_size)
    bound = ROUNDING * (codes.abs() + minima.abs()) + 256 * 2.0**-25
    assert ((found - expected).abs() <= bound).all()
    assert expected.abs().max() > scales[0] * (0.9 if name.startswith("TQ") else 5)


def test_tables_need_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    lattices.table.cache_clear()
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(SetupError, match=r"table of IQ3_S weights .*pip install 'twostroke\[gguf\]'"):
        REPACKED["IQ3_S"].repack(torch.zeros(1, 1, 110, dtype=torch.uint8), (1, 256), torch.float32)


def in_columns(of_groups: torch.Tensor, group_size: int) -> torch.Tensor:
    return of_groups.float().repeat_interleave(group_size, dim=1)


def test_every_quantized_type_that_is_read_is_repacked() -> None:
    assert REPACKED.keys() == TYPES_BY_NAME.keys()


def test_the_format_that_is_promised_is_the_one_that_comes() -> None:
    for name, layout in REPACKED.items():
        kind = TYPES[TYPES_BY_NAME[name]]
        blocks = torch.zeros(4, 2, kind.block_bytes, dtype=torch.uint8)
        weight = layout.repack(blocks, (4, 2 * kind.block_size), torch.bfloat16)
        assert weight.format == layout.format, name
