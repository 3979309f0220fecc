"""GPTQ checkpoints of AutoGPTQ and GPTQModel, dequantized.

Written from their QuantLinear (github.com/AutoGPTQ/AutoGPTQ, github.com/ModelCloud/GPTQModel). Of a linear map with K
inputs and N outputs, b bits and G groups of inputs, the file holds

    qweight int32 [K * b / 32, N]     qzeros int32 [G, N * b / 32]     scales float16 [G, N]     g_idx int32 [K]

Fields lie lowest bits first, along K in qweight and along N in qzeros. `g_idx` names the group of an input, whatever
`desc_act` says, and w[n, k] = (qweight[k, n] - zero[g, n]) * scales[g, n] with g = g_idx[k].

Format "gptq" (also where `checkpoint_format` is absent) stores zero - 1, "gptq_v2" stores zero.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from oracles.checkpoint import Float32Array, read_quantization_config, read_tensors, unpack_fields

_ZERO_OFFSET = {"gptq": 1, "gptq_v2": 0}
_PARTS_OF_A_LINEAR = ("qzeros", "scales", "g_idx")


def dequantize(folder: Path) -> dict[str, Float32Array]:
    """Float32 weights under the names of the model that was quantized; exact, as (9 bits) * (float16) fits float32."""
    config = read_quantization_config(folder)
    assert config["quant_method"] == "gptq", config
    num_bits = config["bits"]
    zero_offset = _ZERO_OFFSET[config.get("checkpoint_format", "gptq")]
    weights: dict[str, Float32Array] = {}
    tensors = read_tensors(folder)
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        if kind == "qweight":
            stored_zeros = unpack_fields(tensors[f"{module}.qzeros"], num_bits)
            if zero_offset and stored_zeros.max() == 2**num_bits - 1:
                # A zero of 0, less one, borrows from the neighbouring field or becomes 2**b: readers disagree.
                raise ValueError(f"{module}.qzeros: {2**num_bits - 1} has no meaning that all readers of v1 share")
            codes = unpack_fields(np.ascontiguousarray(tensor.T), num_bits)  # [N, K]
            zeros = (stored_zeros + zero_offset).T  # [N, G]
            scales = tensors[f"{module}.scales"].astype(np.float32).T  # [N, G]
            group_of_input = tensors[f"{module}.g_idx"]
            weights[f"{module}.weight"] = ((codes - zeros[:, group_of_input]) * scales[:, group_of_input]).astype(
                np.float32
            )
        elif kind not in _PARTS_OF_A_LINEAR:
            weights[name] = tensor.astype(np.float32)
    return weights
