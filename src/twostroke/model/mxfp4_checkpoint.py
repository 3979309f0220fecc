"""Mxfp4Weights: the weight source for checkpoints whose experts are stored as 4-bit floats, as gpt-oss is published.

    X.gate_up_proj_blocks  uint8 [experts, 2 I, H / 32, 16]: two codes per byte, low half first; gate and up interleaved
    X.gate_up_proj_scales  uint8 [experts, 2 I, H / 32]: exponents of 2, biased by 127
    X.down_proj_blocks     uint8 [experts, H, I / 32, 16], and X.down_proj_scales

The codes are kept: e2m1 floats as bits (OCP Microscaling Formats, arXiv:2310.10537), looked up by the kernels.
Scales become float16, which represents these powers of two from 2^-24 to 2^15.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from twostroke.errors import CorruptCheckpoint, UnsupportedModel
from twostroke.kernels.quantized_weight import QuantizedFormat, QuantizedWeight
from twostroke.model.checkpoint import Checkpoint
from twostroke.model.float_weights import check_floats, stored_floats
from twostroke.model.stacked_experts import PARTS
from twostroke.model.weight_source import ALL_ROWS, StoredStack, StoredWeight

MXFP4 = QuantizedFormat(4, 32, table="fp4")
_BLOCKS, _SCALES = "_blocks", "_scales"
_OF_BLOCK = 16
"""Bytes of the codes that share a scale."""
_BIAS = 128
"""Bias of a scale's exponent: the kernels' table has doubled values, so scales are half of the stored ones."""
_NAN_CODE, _MOST = 255, 15
"""The exponent that means NaN, and the largest exponent of a power of two in float16."""
_REMEDY = "Download the model again."


class Mxfp4Weights:
    """Weights with experts in their stored 4 bits and all others as stored floats. Implements WeightSource."""

    quantization = "mxfp4"

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Find the stacks of experts and check their shapes and types.

        Raises:
            UnsupportedModel: a tensor of a type that is not implemented.
            CorruptCheckpoint: blocks without their scales, scales without their blocks, or of another shape.
        """
        self._checkpoint = checkpoint
        self._places: dict[str, tuple[str, int, slice]] = {}
        """Stack, expert and rows, by the name of a matrix."""
        stacks = sorted(name.removesuffix(_BLOCKS) for name in checkpoint.shapes if name.endswith(_BLOCKS))
        floats = {n: s for n, s in checkpoint.shapes.items() if not n.endswith((_BLOCKS, _SCALES))}
        left = sorted(n for n in checkpoint.shapes if n.endswith(_SCALES) and n.removesuffix(_SCALES) not in stacks)
        if left:
            missing = left[0].removesuffix(_SCALES) + _BLOCKS
            raise CorruptCheckpoint(f"{self.path}: {missing} is missing beside {left[0]} (mxfp4). {_REMEDY}")
        check_floats(checkpoint, floats, "Only the matrices of experts are stored in 4 bits (mxfp4).")
        found = stored_floats(checkpoint, floats)
        for stack in stacks:
            found |= self._unstacked(stack)
        self.weights: Mapping[str, StoredWeight] = found

    @property
    def path(self) -> Path:
        return self._checkpoint.path

    def read(self, name: str, dtype: torch.dtype, rows: slice = ALL_ROWS) -> Tensor | QuantizedWeight:
        if name not in self._places:
            return self._checkpoint.read(name, rows)
        stack, expert, of_part = self._places[name]
        blocks, exponents = (
            self._checkpoint.read(stack + kind, slice(expert, expert + 1))[0][of_part][rows]
            for kind in (_BLOCKS, _SCALES)
        )
        largest = int(exponents.amax())
        if _MOST + _BIAS < largest < _NAN_CODE:
            raise UnsupportedModel(
                f"{self.path}: {stack}{_SCALES}[{expert}] reaches 2^{largest - _BIAS + 1}; at most 2^{_MOST + 1} is "
                "possible, because scales are kept in float16."
            )
        spread = blocks.flatten(1).to(torch.int16)  # each byte's low half, then its high half
        codes = (spread | spread << 4).bitwise_and_(0x0F0F).view(torch.uint8)
        scales = torch.exp2(exponents.float() - _BIAS).half()
        scales = scales.masked_fill(exponents == _NAN_CODE, torch.nan)
        return QuantizedWeight(codes, scales, None, MXFP4.bits, MXFP4.group_size, dtype, table=MXFP4.table)

    def _unstacked(self, stack: str) -> Mapping[str, StoredWeight]:
        """Return the matrices of a stack, and record where each is stored."""
        block, _, last = stack.rpartition(".")
        parts, (blocks, scales) = PARTS.get(last, ()), (stack + kind for kind in (_BLOCKS, _SCALES))
        shape = self._checkpoint.shapes[blocks]
        is_stack = len(shape) == 4 and shape[3] == _OF_BLOCK and 0 not in shape
        if not parts or not is_stack or shape[1] % len(parts):
            known = f"[experts, rows, inputs / {MXFP4.group_size}, {_OF_BLOCK}]"
            raise CorruptCheckpoint(
                f"{self.path}: {blocks} has shape {list(shape)}; it must be {known} of gate_up_proj (an even number of "
                f"rows) or down_proj (mxfp4). {_REMEDY}"
            )
        if scales not in self._checkpoint.shapes:
            raise CorruptCheckpoint(f"{self.path}: {scales} is missing (mxfp4). {_REMEDY}")
        if self._checkpoint.shapes[scales] != shape[:3]:
            raise CorruptCheckpoint(
                f"{self.path}: {scales} has shape {list(self._checkpoint.shapes[scales])}; for {list(shape)} of "
                f"{blocks} it must be {list(shape[:3])}. {_REMEDY}"
            )
        for name in (blocks, scales):
            if self._checkpoint.types[name] != "U8":
                raise UnsupportedModel(
                    f"{self.path}: {name} has type {self._checkpoint.types[name]}; known: U8. {_REMEDY}"
                )
        found: dict[str, StoredWeight] = {}
        for expert in range(shape[0]):
            for place, part in enumerate(parts):
                name = f"{block}.{expert}.{part}.weight"
                self._places[name] = stack, expert, slice(place, None, len(parts))
                whole = (shape[1] // len(parts), shape[2] * MXFP4.group_size)
                told = f"{part} of {blocks}[{expert}]"
                found[name] = StoredWeight(whole, MXFP4, stored_name=told, stack=StoredStack(blocks, shape))
        return found
