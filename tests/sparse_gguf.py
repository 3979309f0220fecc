"""A small GGUF file of a model with experts."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from model_folders import write_random_model
from twostroke.model.gguf.names import gguf_name

Tensors = dict[str, Tensor]


def nvfp4_blocks(shape: tuple[int, ...], *, layer: str) -> NDArray[np.uint8]:
    """Return random blocks of 64 numbers: 4 scales in floats of 8 bits, then 32 bytes of codes."""
    random = np.random.default_rng(zlib.crc32(layer.encode()))
    blocks = random.integers(0, 256, (*shape[:-1], shape[-1] // 64, 36), np.uint8)
    blocks[..., :4] = (blocks[..., :4] & 0x1F) + 0x18
    return blocks.reshape(*shape[:-1], -1)


def write_gguf(
    path: Path,
    change: Callable[[Tensors], object] = lambda _: None,
    *,
    gate: str = "Q8_0",
    numbers: Mapping[str, int] = MappingProxyType({}),
) -> Path:
    """Write a small qwen3moe file in float32, but for the gate's stacks.

    Args:
        path: of the file.
        change: what is done to the tensors.
        gate: the type of the gate's stacks: Q8_0, or NVFP4 with random blocks.
        numbers: values of keys; -1 leaves one out.
    """
    folder = write_random_model(path.parent / "folder", "qwen3_moe", mlp_only_layers=[])
    stored = load_file(next(folder.glob("*.safetensors")))
    tensors: Tensors = {}
    for name, weight in stored.items():
        if ".experts." not in name:
            tensors[gguf_name(name)] = weight
    for layer in range(3):
        for part in ("gate", "up", "down"):
            name = f"model.layers.{layer}.mlp.experts.{{}}.{part}_proj.weight"
            tensors[f"blk.{layer}.ffn_{part}_exps.weight"] = torch.stack([stored[name.format(e)] for e in range(8)])
    change(tensors)
    writer = GGUFWriter(str(path), "qwen3moe")
    writer.add_block_count(3)
    writer.add_context_length(640)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(16)
    writer.add_value_length(16)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    usual = {"expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 64}
    for key, number in {**usual, **numbers}.items():
        if number >= 0:
            writer.add_uint32(f"qwen3moe.{key}", number)
    for name, weight in tensors.items():
        array = np.ascontiguousarray(weight.numpy().astype(np.float32))
        if name.endswith("gate_exps.weight"):
            kind = GGMLQuantizationType[gate]
            blocks = quants.quantize(array, kind) if gate == "Q8_0" else nvfp4_blocks(array.shape, layer=name)
            writer.add_tensor(name, blocks, raw_dtype=kind)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
