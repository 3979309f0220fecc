"""ggml's blocks against `gguf.quants`, which is the reference implementation: any bytes, and scales at their limits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from numpy.typing import NDArray

from twostroke.gguf.tensor_types import TYPES, TensorType
from twostroke.model.gguf.blocks import REPACKED

HALF_FIELDS = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip
"""Where a block keeps its float16 numbers, which random bytes would make NaN."""

ROUNDING = 2**-11
"""Of float16."""


def random_blocks(kind: TensorType, scales: tuple[float, float]) -> NDArray[np.uint8]:
    """[rows, bytes of a row], every byte random but those of the scales."""
    rng = np.random.default_rng(TYPES_BY_NAME[kind.name])
    blocks = rng.integers(0, 256, (5, 3, kind.block_bytes), dtype=np.uint8)
    for at in HALF_FIELDS[kind.name]:
        numbers = rng.uniform(*scales, (5, 3, 1)) * rng.choice([-1, 1], (5, 3, 1))
        blocks[..., at : at + 2] = numbers.astype(np.float16).view(np.uint8)
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
    assert expected.abs().max() > 100 * scales[0] / 20


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
