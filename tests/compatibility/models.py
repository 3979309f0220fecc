"""Models for the pairs: small ones of each family, in each format, and what drafts for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from safetensors.torch import save_file

import gguf_files
from model_folders import write_random_model
from twostroke.config.model import ModelConfig
from twostroke.model.model_files import find_model
from twostroke.model.quantize_folder import quantize_folder

NUM_LAYERS = 7
"""The fewest with a low, a middle and a high one for EAGLE."""
NUM_KV_HEADS = 2
"""Of all of them."""
NUM_HEADS = 3
"""Of Medusa."""
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


class Models:
    """All of them in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for family in FAMILIES:
            sizes = {"num_hidden_layers": NUM_LAYERS, "num_key_value_heads": NUM_KV_HEADS}
            if family == "qwen2":  # half of them have windows: two groups of KV blocks
                sizes |= {"num_hidden_layers": 8, "max_window_layers": 4}
            write_random_model(folder / f"tiny-{family}", family, seed=1, **sizes)
        quantize_folder(str(folder / "tiny-llama"), folder / "tiny-llama-int4", "int4")
        _write_gguf(folder / "tiny-llama.gguf")

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def config(self, name: str) -> ModelConfig:
        return find_model(self.path(name)).config()

    def drafter(self, kind: str, target: str) -> str:
        """Return the folder of a model that drafts, written on first use."""
        if kind == "itself":
            return self.path(target)
        folder = self.folder / f"{kind}-of-{target}"
        if not folder.exists():
            folder.mkdir()
            torch.manual_seed(2)
            (_write_medusa if kind == "medusa" else write_eagle)(folder, self.config(target))
        return str(folder)


def _write_gguf(path: Path) -> None:
    """Write llama.cpp's fixture of two layers with more layers, which repeat those two."""
    name = "llama-q8_0"
    blocks = {tensor.name: tensor.data for tensor in GGUFReader(gguf_files.fixture(name)).tensors}
    more = {
        tensor.replace(f"blk.{layer % 2}.", f"blk.{layer}."): data
        for layer in range(2, NUM_LAYERS)
        for tensor, data in blocks.items()
        if tensor.startswith(f"blk.{layer % 2}.")
    }
    gguf_files.changed(name, path, {"llama.block_count": NUM_LAYERS}, more)


def _write_medusa(folder: Path, target: ModelConfig) -> None:
    hidden = target.hidden_size
    tensors = {f"{i}.0.linear.weight": 0.1 * torch.randn(hidden, hidden) for i in range(NUM_HEADS)}
    tensors |= {f"{i}.0.linear.bias": torch.zeros(hidden) for i in range(NUM_HEADS)}
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    config = {"hidden_size": hidden, "vocab_size": target.vocab_size, "medusa_num_heads": NUM_HEADS}
    (folder / "config.json").write_text(json.dumps(config))


def write_eagle(folder: Path, target: ModelConfig) -> None:
    hidden, wide = target.hidden_size, 96
    config: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "max_position_embeddings": target.max_position_embeddings,
        "vocab_size": target.vocab_size,
    }
    shapes = {
        "fc.weight": (hidden, 3 * hidden),
        "midlayer.self_attn.q_proj.weight": (hidden, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (hidden // 2, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (hidden // 2, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, hidden),
        "midlayer.mlp.gate_proj.weight": (wide, hidden),
        "midlayer.mlp.up_proj.weight": (wide, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, wide),
        "lm_head.weight": (target.vocab_size, hidden),
    }
    tensors = {name: 0.1 * torch.randn(*shape) for name, shape in shapes.items()}
    norms = ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm")
    tensors |= {f"{name}.weight": torch.ones(hidden) for name in norms}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
