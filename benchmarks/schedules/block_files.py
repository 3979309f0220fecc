"""Tiny random models as GGUF files, whose matrices have blocks of one type. Rows divide into super-blocks of 256."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.compare.random_gguf import Bytes, DrawnTensor, FileShape, write_file
from benchmarks.schedules.model_folders import VOCAB_SIZE, write_byte_tokenizer

HALVES: dict[str, tuple[int, ...]] = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "TQ1_0": (52,), "TQ2_0": (64,),
    "MXFP4": (), "NVFP4": (),
}  # fmt: skip
"""Types of blocks, and the bytes at which a block has its float16 numbers."""
_STD = 0.1
"""Standard deviation of weights: answers depend on every position."""

_DENSE = FileShape(
    graph="qwen3",
    pre="qwen2",
    num_layers=2,
    hidden_size=256,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    inner_size=256,
    vocab_size=VOCAB_SIZE,
    others="",
    norms_heads=True,
)
_SPARSE = replace(_DENSE, graph="qwen3moe", num_experts=6, num_chosen=2)


def write_dense_file(kind: str, folder: Path) -> Path:
    """Write a dense model whose matrices have blocks of a type."""
    return _write(replace(_DENSE, others=kind), folder)


def write_sparse_file(kind: str, folder: Path) -> Path:
    """Write a model with experts whose matrices have blocks of a type."""
    return _write(replace(_SPARSE, others=kind, of_experts=kind), folder)


def _write(sizes: FileShape, folder: Path) -> Path:
    write_byte_tokenizer(folder)
    write_file(sizes, folder, folder / "random.gguf", partial(_draw, np.random.default_rng(0)), progress=False)
    return folder / "random.gguf"


def _draw(rng: np.random.Generator, tensor: DrawnTensor) -> Bytes:
    """Return the bytes of a tensor: norms about 1, router weights normal, blocks of standard deviation `_STD`."""
    import gguf

    if tensor.kind == "F32":
        is_norm = len(tensor.shape) == 1
        numbers = rng.uniform(0.5, 1.5, tensor.shape) if is_norm else rng.normal(0.0, 0.3, tensor.shape)
        return numbers.astype(np.float32).view(np.uint8)
    kind = gguf.GGMLQuantizationType[tensor.kind]
    numbers_of_block, bytes_of_block = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (math.prod(tensor.shape) // numbers_of_block, bytes_of_block), dtype=np.uint8)
    scales = rng.uniform(0.5, 1.0, len(blocks)) * rng.choice([-1.0, 1.0], len(blocks))
    _set_scales(tensor.kind, blocks, scales)
    _set_scales(tensor.kind, blocks, scales * _STD / float(gguf.dequantize(blocks, kind).std()))
    return blocks


def _set_scales(kind: str, blocks: Bytes, scales: np.ndarray) -> None:
    """Set a scale for each block; formats without signed scales take the magnitude."""
    for at in HALVES[kind]:
        blocks[:, at : at + 2] = scales.astype(np.float16)[:, None].view(np.uint8)
    if kind == "MXFP4":  # an exponent of 2
        blocks[:, 0] = 127 + np.log2(np.abs(scales)).round()
    if kind == "NVFP4":  # four numbers of 4 bits of exponent, 3 of mantissa, and no sign in use
        low, high = (8 * (7 + math.floor(math.log2(np.abs(scales).max() * part))) for part in (0.5, 1.0))
        blocks[:, :4] = np.clip(blocks[:, :4] % (high - low + 8) + low, 1, 0x7E)
