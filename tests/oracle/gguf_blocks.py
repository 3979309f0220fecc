"""Random blocks of ggml's types: any bytes, with scales of a size."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from twostroke.gguf.container import TYPES, TensorType

HALF_FIELDS = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "IQ3_S": (0,),
    "IQ3_XXS": (0,), "IQ2_S": (0,), "IQ2_XS": (0,), "IQ2_XXS": (0,), "IQ1_S": (0,), "TQ1_0": (52,), "TQ2_0": (64,),
    "IQ1_M": (), "MXFP4": (), "NVFP4": (),
}  # fmt: skip
"""Where a block keeps its float16 numbers, which random bytes would make NaN."""

TYPES_BY_NAME = {kind.name: number for number, kind in TYPES.items() if kind.is_quantized}


def random_blocks(
    kind: TensorType, scales: tuple[float, float], shape: tuple[int, int] = (5, 3), seed: int = 0
) -> NDArray[np.uint8]:
    """[rows, bytes of a row], every byte random but those of the scales; the third row is 0. `shape` counts blocks."""
    rng = np.random.default_rng((TYPES_BY_NAME[kind.name], seed) if seed else TYPES_BY_NAME[kind.name])
    blocks = rng.integers(0, 256, (*shape, kind.block_bytes), dtype=np.uint8)
    for at in HALF_FIELDS[kind.name]:
        numbers = rng.uniform(*scales, (*shape, 1)) * rng.choice([-1, 1], (*shape, 1))
        blocks[..., at : at + 2] = numbers.astype(np.float16).view(np.uint8)
    if kind.name == "IQ1_M":  # in the high halves of the last four numbers
        halves = (rng.uniform(*scales, shape) * rng.choice([-1, 1], shape)).astype(np.float16).view(np.uint16)
        for i in range(4):
            high = blocks[..., 49 + 2 * i]
            high[...] = (high & 15) | (halves >> (4 * i) & 15) << 4
    if kind.name == "MXFP4":  # float16 has fewer exponents
        blocks[..., 0] = 128 + np.log2(rng.uniform(*scales, shape)).round()
    blocks[2] = 0
    return blocks.reshape(len(blocks), -1)
