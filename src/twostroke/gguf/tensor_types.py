"""How ggml stores numbers: the types that are read, and the names of the others for messages.

The names and numbers are those of `enum ggml_type` in ggml.h; blocks run along a row.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorType:
    """A way to store numbers, in blocks of a row."""

    name: str
    block_size: int
    """Numbers in a block."""
    block_bytes: int

    @property
    def is_quantized(self) -> bool:
        """Whether a block shares a scale."""
        return self.block_size > 1


TYPES: dict[int, TensorType] = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    30: TensorType("BF16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    20: TensorType("IQ4_NL", 32, 18),
    23: TensorType("IQ4_XS", 256, 136),
    21: TensorType("IQ3_S", 256, 110),
    18: TensorType("IQ3_XXS", 256, 98),
    22: TensorType("IQ2_S", 256, 82),
    17: TensorType("IQ2_XS", 256, 74),
    16: TensorType("IQ2_XXS", 256, 66),
    29: TensorType("IQ1_M", 256, 56),
    19: TensorType("IQ1_S", 256, 50),
    34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66),
    39: TensorType("MXFP4", 32, 17),
    40: TensorType("NVFP4", 64, 36),
}
"""What is read, by the number in the file."""

NAMES = {
    9: "Q8_1",
    15: "Q8_K",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
}
"""What is not."""
