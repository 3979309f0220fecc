"""Small valid files of every external kind, as the basis of mutations."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.decoders import ByteLevel as ByteLevelDecoder

from twostroke.config.model import ModelConfig
from twostroke.model.gguf.names import gguf_name
from twostroke.model.random_weights import RandomWeights

CHATML = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step and message.role == 'user' and not message.content.startswith('<tool>') %}
        {%- set ns.multi_step = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' and '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' ~ (content | trim) ~ '<|im_end|>' ~ '\\n' }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
    {%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""Chat template like Qwen3's."""

_SHAPE: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
}


def write_folder(folder: Path) -> Path:
    """Write a model in Hugging Face's layout, in two weight files with an index."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **_SHAPE, "eos_token_id": 257}
    config |= {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "torch_dtype": "float32", "hidden_act": "silu"}
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"eos_token_id": [257, 258], "temperature": 0.7, "top_k": 20})
    tokenizer = Tokenizer(models.BPE(vocab=_vocabulary(), merges=[("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens(["<|end|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    added = {"257": {"content": "<|end|>", "special": True, "lstrip": False}}
    named = {"eos_token": "<|end|>", "pad_token": {"content": "<|end|>", "normalized": False}}
    _write_json(
        folder / "tokenizer_config.json",
        {
            **named,
            "tokenizer_class": "PreTrainedTokenizerFast",
            "added_tokens_decoder": added,
            "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
            "add_bos_token": False,
            "chat_template": [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": CHATML}],
        },
    )
    _write_json(folder / "special_tokens_map.json", named)
    weights = _weights(config)
    names = sorted(weights)
    parts = {"model-1.safetensors": names[: len(names) // 2], "model-2.safetensors": names[len(names) // 2 :]}
    for file_name, of_file in parts.items():
        save_file({name: weights[name] for name in of_file}, folder / file_name, metadata={"format": "pt"})
    weight_map = {name: file_name for file_name, of_file in parts.items() for name in of_file}
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": 1}, "weight_map": weight_map})
    return folder


def write_gguf(path: Path, changes: Mapping[str, Any] = MappingProxyType({})) -> Path:
    """Write the same model as a GGUF file, with other values from `changes`."""
    texts = list(_vocabulary())
    texts += ["<|end|>", "<|im_start|>", "<|im_end|>"]
    values: dict[str, Any] = {
        "general.architecture": "llama",
        "general.alignment": 32,
        "general.name": "small",
        "llama.block_count": 2,
        "llama.embedding_length": 32,
        "llama.feed_forward_length": 48,
        "llama.attention.head_count": 2,
        "llama.attention.head_count_kv": 1,
        "llama.context_length": 128,
        "llama.attention.layer_norm_rms_epsilon": 1e-6,
        "llama.rope.freq_base": 10_000.0,
        "llama.rope.scaling.type": "linear",
        "llama.rope.scaling.factor": 2.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": [1] * 257 + [3] * 3,
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 257,
        "tokenizer.ggml.eos_token_id": 257,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHATML,
        "general.sampling.temp": 0.5,
    }
    tensors = {gguf_name(name): weight.numpy() for name, weight in _weights(_SHAPE).items()}
    tensors["rope_freqs.weight"] = np.ones(8, np.float32)
    path.write_bytes(gguf_bytes(values | dict(changes), tensors))
    return path


def gguf_bytes(values: Mapping[str, Any], tensors: Mapping[str, npt.NDArray[np.float32]]) -> bytes:
    """Return a GGUF file with float32 tensors.

    Args:
        values: strings, whole numbers (u32), numbers (f32), booleans, and lists of strings or whole numbers.
        tensors: outermost dimension first.
    """
    head = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values)))
    for key, value in values.items():
        head += _text(key) + _value(value)
    data = bytearray()
    for name, tensor in tensors.items():
        dims = tensor.shape[::-1]
        head += _text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, 0, len(data))
        data += tensor.tobytes()
        data += bytes(-len(data) % 32)
    return bytes(head + bytes(-len(head) % 32) + data)


def _text(text: str) -> bytes:
    content = text.encode()
    return struct.pack("<Q", len(content)) + content


def _value(value: Any) -> bytes:
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + _text(value)
        case [str(), *_]:
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))
        case _:
            return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)


def _vocabulary() -> dict[str, int]:
    """Return the 256 bytes, and one token of two."""
    return {text: i for i, text in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"])}


def _weights(shape: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    config = ModelConfig.from_hf({"architectures": ["LlamaForCausalLM"], **shape})
    source = RandomWeights(Path("small"), config, torch.device("cpu"))
    found = {name: source.read(name, torch.float32) for name in source.weights}
    return {name: weight for name, weight in found.items() if isinstance(weight, torch.Tensor)}


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")
