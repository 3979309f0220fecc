"""Conversion of a model folder to a GGUF file, so that engines that only read GGUF run the same weights.

All matrices become BF16, F16, Q8_0 or Q4_0, including the embedding; vectors stay float32, as llama.cpp requires.
llama.cpp's own tool would keep a tied embedding at 6 bits or more in a Q4_0 file; 4 bits everywhere reads less memory,
and matches twostroke's int4. Names and layouts are those of the GGUF specification (ggml-org/ggml, docs/gguf.md) and
of the llama and qwen3 graphs in llama.cpp.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm.auto import tqdm

from twostroke.config.model import ModelConfig
from twostroke.config.rope import RopeConfig
from twostroke.errors import SetupError, UnsupportedModel
from twostroke.model.checkpoint import Checkpoint, read_model_config
from twostroke.model.gguf.names import gguf_name, gguf_names
from twostroke.plain_words import reason_of

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFWriter

_ARCHITECTURES = {"LlamaForCausalLM": ("llama", "llama-bpe"), "Qwen3ForCausalLM": ("qwen3", "qwen2")}
"""The graph in llama.cpp, and the pre-tokenizer (irrelevant for prompts of token ids)."""

_NORMAL, _CONTROL, _UNUSED = 1, 3, 5
"""Kinds of tokens, as numbered by the specification."""


def write_gguf(folder: Path, file_type: str, target_folder: Path, *, progress: bool = True) -> Path:
    """Convert a model folder, or return the result of an earlier call for the same files.

    Args:
        folder: Hugging Face folder.
        file_type: of its matrices, in GGUF's words: BF16, F16, Q8_0 or Q4_0.
        target_folder: for the file; it is created.
        progress: show a progress bar.

    Returns:
        The file; its name holds the type and a digest of the model's files' names, sizes and times.

    Raises:
        UnsupportedModel: an architecture, a rope type, a bias or a window cannot be converted.
        SetupError: the package gguf is not installed, or a matrix has no whole blocks.
    """
    try:
        import gguf
    except ImportError as error:
        raise SetupError("GGUF files need the package gguf (pip install 'twostroke[bench]').") from error
    config = read_model_config(folder)
    _check(config)
    target = target_folder / f"{_digest(folder)}-{file_type}.gguf"
    if target.is_file():
        return target
    target_folder.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_suffix(".unfinished")
    name, pre = _ARCHITECTURES[config.architecture]
    writer = gguf.GGUFWriter(unfinished, name)
    try:
        _write_shape(writer, config)
        writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{file_type}"])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        write_vocabulary(writer, folder, config.vocab_size, pre)
        kind = gguf.GGMLQuantizationType[file_type]
        _write_tensors(writer, tuple(_tensors(Checkpoint(folder), config, kind)), progress=progress)
    finally:
        writer.close()
    unfinished.replace(target)
    return target


def _check(config: ModelConfig) -> None:
    if config.architecture not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise UnsupportedModel(f"{config.architecture} is not converted to GGUF; known: {known}.")
    if len(config.kinds) > 1:
        raise UnsupportedModel("layers of several kinds are not converted to GGUF.")
    layer = config.layers[0]
    rope = layer.rope
    if rope is None:
        raise UnsupportedModel("layers without rotation are not converted to GGUF.")
    if rope.rope_type not in ("default", "llama3"):
        raise UnsupportedModel(f"rope type {rope.rope_type!r} is not converted to GGUF; known: default, llama3.")
    if layer.qkv_bias or layer.output_bias or layer.mlp_bias or layer.kv.window is not None:
        raise UnsupportedModel("biases and sliding windows are not converted to GGUF.")


def _digest(folder: Path) -> str:
    files = sorted(path for path in folder.iterdir() if path.suffix in (".json", ".safetensors"))
    seen = repr([(path.name, (stat := path.stat()).st_size, stat.st_mtime_ns) for path in files])
    return f"{folder.name}-{hashlib.sha256(seen.encode()).hexdigest()[:12]}"


def _write_shape(writer: GGUFWriter, config: ModelConfig) -> None:
    layer = config.layers[0]
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(layer.intermediate_size)
    writer.add_head_count(layer.num_heads)
    writer.add_head_count_kv(layer.kv.num_kv_heads)
    writer.add_key_length(layer.kv.head_dim)
    writer.add_value_length(layer.kv.head_dim)
    writer.add_rope_dimension_count(layer.kv.head_dim)
    writer.add_rope_freq_base(config.ropes[0][0].theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_vocab_size(config.vocab_size)


def write_vocabulary(writer: GGUFWriter, folder: Path, vocab_size: int, pre: str) -> None:
    """Write the folder's byte-level BPE; rows of the embedding without a token get a name that no text contains."""
    try:
        given: dict[str, Any] = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        vocab: dict[str, int] = given["model"]["vocab"]
        merges: list[Any] = given["model"]["merges"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SetupError(
            f"{folder.name}: tokenizer.json is no byte-level BPE that GGUF could hold ({reason_of(error)})."
        ) from error
    tokens = [f"[PAD{i}]" for i in range(vocab_size)]
    kinds = [_UNUSED] * vocab_size
    added: list[dict[str, Any]] = given.get("added_tokens", [])
    for token, i in [*vocab.items(), *((entry["content"], entry["id"]) for entry in added)]:
        if i < vocab_size:
            tokens[i], kinds[i] = token, _NORMAL
    special = [entry["id"] for entry in added if entry["id"] < vocab_size]
    for i in special:
        kinds[i] = _CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    # an empty array has no type, which GGUF requires
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges] or ["a b"])
    end = special[0] if special else 0
    writer.add_bos_token_id(end)
    writer.add_eos_token_id(end)
    writer.add_add_bos_token(False)


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One tensor of the file."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    read: Callable[[], torch.Tensor]
    """Function that reads the tensor when it is written, in the order of the file and the type of the folder."""


def _read_in_pairs(read: Callable[[], torch.Tensor], num_heads: int) -> torch.Tensor:
    """Change the rows of each head from halves to pairs, the layout for the rotation in llama.cpp's llama graph."""
    found = read()
    return found.reshape(num_heads, 2, -1, found.shape[1]).transpose(1, 2).reshape(found.shape)


def _tensors(checkpoint: Checkpoint, config: ModelConfig, kind: GGMLQuantizationType) -> Iterator[_Tensor]:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    block = GGML_QUANT_SIZES[kind][0]
    layer = config.layers[0]
    is_llama = config.architecture == "LlamaForCausalLM"
    interleaved = {"attn_q": layer.num_heads, "attn_k": layer.kv.num_kv_heads} if is_llama else {}
    for source, shape in checkpoint.shapes.items():
        if not gguf_names(source) or (source == "lm_head.weight" and config.tie_word_embeddings):
            continue
        if len(shape) > 1 and shape[-1] % block:
            raise SetupError(f"{source} has rows of {shape[-1]} numbers; {kind.name} needs multiples of {block}.")
        name, of_type = gguf_name(source), kind if len(shape) > 1 else GGMLQuantizationType.F32
        read, heads = partial(checkpoint.read, source), interleaved.get(name.split(".")[-2])
        yield _Tensor(name, shape, of_type, partial(_read_in_pairs, read, heads) if heads else read)
    factors = _rope_factors(*config.ropes[0])
    if factors is not None:
        yield _Tensor("rope_freqs.weight", tuple(factors.shape), GGMLQuantizationType.F32, lambda: factors)


def _rope_factors(rope: RopeConfig, head_dim: int) -> torch.Tensor | None:
    """Return llama.cpp's divisors of frequencies, Llama 3's scaling of long wavelengths: float32 [head_dim / 2]."""
    if rope.rope_type == "default":
        return None
    context, low, high = rope.original_max_position_embeddings, rope.low_freq_factor, rope.high_freq_factor
    assert context is not None, rope
    assert low is not None, rope
    assert high is not None, rope
    factors: list[float] = []
    for i in range(head_dim // 2):
        turns = context * rope.theta ** (-2 * i / head_dim) / (2 * math.pi)
        smooth = (turns - low) / (high - low)
        smooth = min(max(smooth, 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / rope.factor + smooth))
    return torch.tensor(factors)


def _write_tensors(writer: GGUFWriter, tensors: tuple[_Tensor, ...], *, progress: bool) -> None:
    import numpy as np
    from gguf import quant_shape_to_byte_shape, quants

    for tensor in tensors:
        shape = quant_shape_to_byte_shape(tensor.shape, tensor.kind)
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.uint8), math.prod(shape), tensor.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tqdm(tensors, desc="to GGUF", unit="tensor", disable=None if progress else True, leave=False):
        found = tensor.read()
        if found.dtype is torch.bfloat16 and tensor.kind.name == "BF16":
            data = found.contiguous().view(torch.uint8).numpy()  # unchanged, without a conversion through float32
        else:
            data = quants.quantize(found.float().numpy(), tensor.kind)
        writer.write_tensor_data(data)
