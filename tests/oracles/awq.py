"""AWQ checkpoints of AutoAWQ's version "gemm", dequantized.

Written from AutoAWQ's WQLinear_GEMM (github.com/casper-hansen/AutoAWQ, awq/modules/linear/gemm.py). Of a linear map
with K inputs and N outputs, in groups of g inputs, the file holds

    qweight int32 [K, N / 8]      qzeros int32 [K / g, N / 8]      scales float16 [K / g, N]

Field i of a word (4 bits, lowest first) is column 8 * word + (0, 2, 4, 6, 1, 3, 5, 7)[i], and
w[n, k] = (qweight[k, n] - qzeros[k / g, n]) * scales[k / g, n].
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from oracles.checkpoint import Float32Array, Int32Array, read_quantization_config, read_tensors, unpack_fields

_COLUMN_OF_FIELD = (0, 2, 4, 6, 1, 3, 5, 7)


def dequantize(folder: Path) -> dict[str, Float32Array]:
    """Float32 weights under the names of the model that was quantized; exact, as (4 bits) * (float16) fits float32."""
    config = read_quantization_config(folder)
    assert (config["quant_method"], config["version"], config["bits"]) == ("awq", "gemm", 4), config
    weights: dict[str, Float32Array] = {}
    tensors = read_tensors(folder)
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        if kind == "qweight":
            codes = _columns_in_order(unpack_fields(tensor, 4))
            zeros = _columns_in_order(unpack_fields(tensors[f"{module}.qzeros"], 4))
            scales = tensors[f"{module}.scales"].astype(np.float32)
            group_of_input = np.arange(len(codes)) // config["group_size"]
            weights[f"{module}.weight"] = ((codes - zeros[group_of_input]) * scales[group_of_input]).T.astype(
                np.float32
            )
        elif kind not in ("qzeros", "scales"):
            weights[name] = tensor.astype(np.float32)
    return weights


def _columns_in_order(fields: Int32Array) -> Int32Array:
    """[rows, N] as the words hold them -> [rows, N] as the model numbers its outputs."""
    words = fields.reshape(len(fields), -1, 8)
    columns = np.empty_like(words)
    columns[:, :, _COLUMN_OF_FIELD] = words
    return columns.reshape(fields.shape)
