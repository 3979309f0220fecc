"""Checkpoints of compressed-tensors, formats "pack-quantized" and "int-quantized", dequantized.

Written from the package's guide to its formats (github.com/vllm-project/compressed-tensors) and checked against what it
makes of the same files (`decompressed.json` beside each fixture). Of a linear map with K inputs and N outputs, b bits
and G groups of inputs (G = 1: a scale per channel):

    pack-quantized    weight_packed int32 [N, ceil(K * b / 32)], fields along K, lowest bits first, plus 2**(b - 1)
                      weight_zero_point int32 [ceil(N * b / 32), G], fields along N, plus 2**(b - 1); asymmetric only
                      weight_shape int64 [2] = (N, K)
    int-quantized     weight int8 [N, K]; weight_zero_point int8 [N, G], asymmetric only
    both              weight_scale [N, G] in the model's dtype
                      weight_g_idx int32 [K], the group of an input (actorder "group"); else group k * G / K

w[n, k] = (q[n, k] - zero_point[n, g]) * scale[n, g]. Input activations that are quantized too (W8A8) change no weight.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from oracles.checkpoint import Array, Float32Array, Int32Array, read_quantization_config, read_tensors, unpack_fields

_PARTS_OF_A_LINEAR = ("weight_shape", "weight_scale", "weight_zero_point", "weight_g_idx")


def dequantize(folder: Path) -> dict[str, Float32Array]:
    """Float32 weights under the names of the model that was quantized.

    Exact: (9 bits) * (bfloat16 or float16) fits float32, where the package itself rounds to the dtype of the scales.
    """
    config = read_quantization_config(folder)
    assert config["quant_method"] == "compressed-tensors", config
    (group,) = config["config_groups"].values()
    num_bits = group["weights"]["num_bits"]
    weights: dict[str, Float32Array] = {}
    tensors = read_tensors(folder)
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        parts = {part: tensors.get(f"{module}.{part}") for part in _PARTS_OF_A_LINEAR}
        if kind == "weight_packed":
            weights[f"{module}.weight"] = _from_packed(tensor, parts, num_bits)
        elif kind == "weight" and tensor.dtype == np.int8:
            weights[name] = _scaled(tensor.astype(np.int32), parts["weight_zero_point"], parts)
        elif kind not in _PARTS_OF_A_LINEAR:
            weights[name] = tensor.astype(np.float32)
    return weights


def _from_packed(packed: Int32Array, parts: dict[str, Array | None], num_bits: int) -> Float32Array:
    shape, stored_zeros = parts["weight_shape"], parts["weight_zero_point"]
    assert shape is not None
    num_outputs, num_inputs = (int(size) for size in shape)
    offset = 2 ** (num_bits - 1)
    codes = unpack_fields(packed, num_bits)[:, :num_inputs] - offset
    if stored_zeros is None:
        return _scaled(codes, None, parts)
    zeros = unpack_fields(np.ascontiguousarray(stored_zeros.T), num_bits)[:, :num_outputs].T - offset
    return _scaled(codes, zeros, parts)


def _scaled(codes: Int32Array, zeros: Array | None, parts: dict[str, Array | None]) -> Float32Array:
    scales, group_of_input = parts["weight_scale"], parts["weight_g_idx"]
    assert scales is not None
    num_inputs, num_groups = codes.shape[1], scales.shape[1]
    if group_of_input is None:
        group_of_input = np.arange(num_inputs) * num_groups // num_inputs
    offsets = np.zeros_like(scales, np.int32) if zeros is None else zeros.astype(np.int32)
    scaled = (codes - offsets[:, group_of_input]) * scales.astype(np.float32)[:, group_of_input]
    return scaled.astype(np.float32)
