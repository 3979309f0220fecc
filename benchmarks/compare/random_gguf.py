"""GGUF files of random blocks in published shapes: the speed of models of billions of weights without a download.

Speed does not depend on the values of the weights. Blocks are drawn in their own format, so that no quantization of
gigabytes is needed: scales are equal, codes are random, and weights are about as large as those of an untrained model.
Experts are chosen as by a random router.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import numpy.typing as npt
from cyclopts import Parameter
from tqdm.auto import tqdm

from benchmarks.compare.gguf_file import write_vocabulary
from twostroke.errors import InvalidParameter

if TYPE_CHECKING:
    from gguf import GGUFWriter

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileShape:
    """Sizes and formats of a model's file."""

    graph: str
    """Name of the graph in llama.cpp."""
    pre: str
    """Pre-tokenizer of the tokenizer."""
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    inner_size: int
    """Width of an expert, or of a dense layer's MLP."""
    vocab_size: int
    others: str
    """GGUF format of all matrices but those of experts."""
    num_experts: int = 0
    """Experts of a layer; 0: dense layers."""
    num_chosen: int = 0
    of_experts: str = ""
    """GGUF format of experts."""
    is_tied: bool = False
    """Whether the head shares the embedding table."""
    rope_theta: float = 1_000_000.0
    norms_heads: bool = False
    """Whether q and k have a norm over each head."""
    mlp_norm: str = "ffn_norm"
    """Name of the norm before the experts."""
    window: int = 0
    """Tokens that layers with a window see; 0: no windows."""
    stretching: float = 1.0
    """Factor of YaRN beyond a context of 4,096."""
    has_biases: bool = False
    """Whether all linear layers have biases, and heads sinks."""


SHAPES = {
    "qwen3-0.6b": FileShape(
        graph="qwen3",
        pre="qwen2",
        num_layers=28,
        hidden_size=1024,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        inner_size=3072,
        vocab_size=151_936,
        others="Q4_K",
        norms_heads=True,
        is_tied=True,
    ),
    "qwen3-3b-a0.6b": FileShape(
        graph="qwen3moe",
        pre="qwen2",
        num_layers=24,
        hidden_size=1024,
        num_heads=16,
        num_kv_heads=4,
        head_dim=128,
        num_experts=64,
        num_chosen=8,
        inner_size=512,
        vocab_size=151_936,
        of_experts="Q4_K",
        others="Q4_K",
        norms_heads=True,
    ),
    "gpt-oss-4l": FileShape(
        graph="gpt-oss",
        pre="gpt-4o",
        num_layers=4,
        hidden_size=2880,
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        num_experts=32,
        num_chosen=4,
        inner_size=2880,
        vocab_size=201_088,
        of_experts="MXFP4",
        others="Q8_0",
        rope_theta=150_000.0,
        mlp_norm="post_attention_norm",
        window=128,
        stretching=32.0,
        has_biases=True,
    ),
}
"""Qwen3-0.6B; a cut of Qwen3-30B-A3B: its graph with half the width, half the layers and half the experts; and
gpt-oss-20b with 4 of its 24 layers."""


def random_gguf(
    shape: str,
    *,
    vocabulary: Path,
    output: Path,
    seed: int = 0,
    progress: Annotated[bool, Parameter(negative="--no-progress")] = True,
) -> None:
    """Write a GGUF file of random weights in a published shape.

    Args:
        shape: One of the known shapes.
        vocabulary: A model folder whose tokenizer.json has a byte-level BPE.
        output: The file to write.
        seed: Seed of the weights.
        progress: Show a progress bar.
    """
    if shape not in SHAPES:
        raise InvalidParameter("shape", shape, f"is not known; known: {', '.join(SHAPES)}")
    rng = np.random.default_rng(seed)
    write_file(SHAPES[shape], vocabulary, output, partial(_drawn, rng), progress=progress)


def write_file(
    sizes: FileShape,
    vocabulary: Path,
    output: Path,
    draw: Callable[[DrawnTensor], Bytes],
    *,
    progress: bool = True,
) -> None:
    """Write a GGUF file of a shape.

    Args:
        sizes: of the model, with the formats of its matrices.
        vocabulary: a model folder whose tokenizer.json has a byte-level BPE.
        output: the file to write.
        draw: returns the bytes of a tensor.
        progress: show a progress bar.
    """
    import gguf

    writer = gguf.GGUFWriter(output, sizes.graph)
    try:
        _write_shape(writer, sizes)
        write_vocabulary(writer, vocabulary, sizes.vocab_size, sizes.pre)
        _write_tensors(writer, list(_tensors(sizes)), draw, progress=progress)
    finally:
        writer.close()


def _write_shape(writer: GGUFWriter, sizes: FileShape) -> None:
    writer.add_block_count(sizes.num_layers)
    writer.add_context_length(32_768)
    writer.add_embedding_length(sizes.hidden_size)
    writer.add_feed_forward_length(sizes.inner_size)
    writer.add_head_count(sizes.num_heads)
    writer.add_head_count_kv(sizes.num_kv_heads)
    writer.add_key_length(sizes.head_dim)
    writer.add_value_length(sizes.head_dim)
    writer.add_rope_dimension_count(sizes.head_dim)
    writer.add_rope_freq_base(sizes.rope_theta)
    if sizes.stretching != 1.0:
        from gguf import RopeScalingType

        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(sizes.stretching)
        writer.add_rope_scaling_orig_ctx_len(4096)
    if sizes.window:
        writer.add_sliding_window(sizes.window)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(sizes.vocab_size)
    if sizes.num_experts:
        writer.add_expert_count(sizes.num_experts)
        writer.add_expert_used_count(sizes.num_chosen)
        writer.add_expert_feed_forward_length(sizes.inner_size)


@dataclass(frozen=True, slots=True)
class DrawnTensor:
    """A tensor of random numbers."""

    name: str
    shape: tuple[int, ...]
    kind: str
    """GGUF format."""


def _tensors(sizes: FileShape) -> Iterator[DrawnTensor]:
    hidden, q, kv = sizes.hidden_size, sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    yield DrawnTensor("token_embd.weight", (sizes.vocab_size, hidden), sizes.others)
    yield DrawnTensor("output_norm.weight", (hidden,), "F32")
    if not sizes.is_tied:
        yield DrawnTensor("output.weight", (sizes.vocab_size, hidden), sizes.others)
    for layer in range(sizes.num_layers):
        of_layer = {
            "attn_norm": ((hidden,), "F32"),
            "attn_q": ((q, hidden), sizes.others),
            "attn_k": ((kv, hidden), sizes.others),
            "attn_v": ((kv, hidden), sizes.others),
            "attn_output": ((hidden, q), sizes.others),
            sizes.mlp_norm: ((hidden,), "F32"),
            **_feed_forward(sizes),
        }
        if sizes.norms_heads:
            of_layer |= dict.fromkeys(("attn_q_norm", "attn_k_norm"), ((sizes.head_dim,), "F32"))
        if sizes.has_biases:
            of_layer["attn_sinks"] = (sizes.num_heads,), "F32"
        for name, (shape, kind) in of_layer.items():
            yield DrawnTensor(f"blk.{layer}.{name}.weight", shape, kind)
            if sizes.has_biases and len(shape) > 1:
                yield DrawnTensor(f"blk.{layer}.{name}.bias", shape[:-1], "F32")


def _feed_forward(sizes: FileShape) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and format of the matrices behind a layer's second norm."""
    hidden, inner, stack = sizes.hidden_size, sizes.inner_size, sizes.num_experts
    if not stack:
        kind = sizes.others
        return {
            "ffn_gate": ((inner, hidden), kind),
            "ffn_up": ((inner, hidden), kind),
            "ffn_down": ((hidden, inner), kind),
        }
    kind = sizes.of_experts
    return {
        "ffn_gate_inp": ((stack, hidden), "F32"),
        "ffn_gate_exps": ((stack, inner, hidden), kind),
        "ffn_up_exps": ((stack, inner, hidden), kind),
        "ffn_down_exps": ((stack, hidden, inner), kind),
    }


def _write_tensors(
    writer: GGUFWriter, tensors: list[DrawnTensor], draw: Callable[[DrawnTensor], Bytes], *, progress: bool
) -> None:
    from gguf import GGMLQuantizationType, quant_shape_to_byte_shape

    for tensor in tensors:
        kind = GGMLQuantizationType[tensor.kind]
        shape = quant_shape_to_byte_shape(tensor.shape, kind)
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.uint8), math.prod(shape), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tqdm(tensors, desc="drawing", unit="tensor", disable=None if progress else True, leave=False):
        writer.write_tensor_data(draw(tensor))


def _drawn(rng: np.random.Generator, tensor: DrawnTensor) -> Bytes:
    """Return the bytes of a tensor; norms are 1, biases and sinks 0."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    if tensor.kind == "F32":
        if tensor.name.endswith((".bias", "_sinks.weight")):
            numbers = np.zeros(tensor.shape)
        else:
            numbers = np.ones(tensor.shape) if len(tensor.shape) == 1 else rng.normal(0.0, 1.0, tensor.shape)
        return numbers.astype(np.float32).view(np.uint8)
    numbers_of_block, bytes_of_block = GGML_QUANT_SIZES[GGMLQuantizationType[tensor.kind]]
    num_blocks = math.prod(tensor.shape) // numbers_of_block
    blocks = rng.integers(0, 256, (num_blocks, bytes_of_block), dtype=np.uint8)
    _BLOCKS[tensor.kind](blocks)
    return blocks


def _half(*numbers: float) -> Bytes:
    return np.array(numbers, np.float16).view(np.uint8)


def _q4_k(blocks: Bytes) -> None:
    """Set the factor of the scales and that of the mins: numbers up to about 0.02 on both sides of 0."""
    blocks[:, :4] = _half(1e-4, 7.5e-4)


def _q8_0(blocks: Bytes) -> None:
    """Set the scale: numbers up to about 0.02 on both sides of 0."""
    blocks[:, :2] = _half(2.7e-4)


def _mxfp4(blocks: Bytes) -> None:
    """Set the exponent of 2: numbers up to 6, times 2**-8."""
    blocks[:, 0] = 127 - 8


_BLOCKS: dict[str, Callable[[Bytes], None]] = {"Q4_K": _q4_k, "Q8_0": _q8_0, "MXFP4": _mxfp4}
