"""Conversion of ggml's blocks to codes, scales and mins by all threads (csrc/ggml_blocks.hpp)."""

from __future__ import annotations

from torch import Tensor

from twostroke.kernels.native.extension import address, native
from twostroke.kernels.quantized_weight import QuantizedWeight


def unpack_blocks(type_name: str, blocks: Tensor, weight: QuantizedWeight) -> None:
    """Write codes, scales and mins of blocks uint8 [N, num_blocks, block_bytes] into `weight`.

    The bits are those of model/gguf/blocks.py. `type_name` is one of native.block_types().
    """
    blocks = blocks.contiguous()
    native.unpack_blocks(
        type_name,
        blocks.data_ptr(),
        blocks.shape[0] * blocks.shape[1],
        weight.codes.data_ptr(),
        weight.scales.data_ptr(),
        address(weight.mins),
        address(weight.super_scales),
        address(weight.super_mins),
    )
