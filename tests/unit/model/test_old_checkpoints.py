"""Checkpoints of older families as they were published: other names, causal masks among the weights, a norm a head."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from oracle import naive_model
from oracle.paged_driver import PagedDriver
from twostroke.errors import CorruptCheckpoint
from twostroke.kernels.dispatch import operators_for
from twostroke.model.checkpoint import read_model_config
from twostroke.model.decoder import Placement
from twostroke.model.loader import load_model, open_weights

CPU = torch.device("cpu")
MASK = torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()
Weights = dict[str, Tensor]


def pythia(weights: Weights) -> Weights:
    masks = {"bias": MASK, "masked_bias": torch.tensor(-1e9), "rotary_emb.inv_freq": torch.ones(2)}
    renamed = {name.replace("lm_head.", "embed_out."): tensor for name, tensor in weights.items()}
    return renamed | {f"gpt_neox.layers.0.attention.{name}": tensor for name, tensor in masks.items()}


def gpt2(weights: Weights) -> Weights:
    return {name.removeprefix("transformer."): tensor for name, tensor in weights.items()} | {"h.0.attn.bias": MASK}


def bloom(weights: Weights) -> Weights:
    return {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}


def gptj(weights: Weights) -> Weights:
    masks = {"bias": MASK, "masked_bias": torch.tensor(-1e9)}
    return weights | {f"transformer.h.1.attn.{name}": tensor for name, tensor in masks.items()}


OLD: dict[str, Callable[[Weights], Weights]] = {"GPTNeoX": pythia, "GPT2": gpt2, "GPTJ": gptj, "Bloom": bloom}


def rewrite(folder: Path, change: Callable[[Weights], Weights]) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file(change(weights), folder / "model.safetensors", metadata={"format": "pt"})


def logits(folder: Path) -> Tensor:
    config = read_model_config(folder)
    source = open_weights(folder, config)
    operators = operators_for(CPU, torch.float32)
    model = load_model(source, config, Placement(operators, torch.float32, CPU, 64))
    driver = PagedDriver(model)
    return driver.logits(driver.step([(driver.add(list(range(40))), 40)])[0])


@pytest.mark.parametrize("kind", OLD)
def test_the_first_names_and_masks_are_read_alike(kind: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"num_key_value_heads": 4, "num_hidden_layers": 2}
    theirs = naive_model.build(tmp_path, kind, **changes, **({"rotary_dim": 8} if kind == "GPTJ" else {}))
    rewrite(tmp_path, OLD[kind])
    assert torch.allclose(logits(tmp_path), naive_model.logits(theirs, list(range(40))), atol=1e-3)


def test_a_norm_of_a_head_that_is_missing(tmp_path: Path) -> None:
    naive_model.build(tmp_path, "StableLm", qk_layernorm=True)
    lost = "model.layers.1.self_attn.k_layernorm.norms.0.weight"
    rewrite(tmp_path, lambda weights: {name: tensor for name, tensor in weights.items() if name != lost})
    with pytest.raises(
        CorruptCheckpoint, match=r"layers\.1\.self_attn\.k_layernorm\.weight is incomplete: heads \[1\]"
    ):
        open_weights(tmp_path, read_model_config(tmp_path))
