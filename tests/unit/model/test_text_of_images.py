"""The text model of checkpoints that read images too: transformers' logits of a text, and the towers are named once."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from oracle import naive_model
from oracle.paged_driver import PagedDriver
from twostroke.errors import CorruptCheckpoint
from twostroke.kernels.dispatch import operators_for
from twostroke.model.checkpoint import Checkpoint, read_model_config
from twostroke.model.decoder import Placement
from twostroke.model.loader import load_model, open_weights
from twostroke.tokenizer.settings import read_eos_token_ids

CPU = torch.device("cpu")
TINY: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "depth": 1, "out_hidden_size": 64}
PIXTRAL: dict[str, Any] = {
    "model_type": "pixtral",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
MROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
GEMMA4_VISION: dict[str, Any] = {
    **PIXTRAL,
    "model_type": "gemma4_vision",
    "num_key_value_heads": 2,
    "head_dim": 8,
    "position_embedding_size": 16,
}
QWEN3_VL_VISION: dict[str, Any] = {**TINY, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
QWEN3_VL_MOE: dict[str, Any] = {
    "head_dim": 16,
    "rope_parameters": {**MROPE, "mrope_interleaved": True},
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        "Gemma3",
        {"head_dim": 16, "sliding_window": 24, "num_hidden_layers": 7},
        {**PIXTRAL, "model_type": "siglip_vision_model"},
    ),
    "gemma4": (
        "Gemma4",
        {
            "head_dim": 16,
            "global_head_dim": 32,
            "sliding_window": 24,
            "num_hidden_layers": 6,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 199,
            "pad_token_id": 0,
        },
        GEMMA4_VISION,
    ),
    "mistral3": ("Mistral3", {"model_type": "mistral", "head_dim": 16, "sliding_window": None}, PIXTRAL),
    "mistral3-of-ministral3": ("Mistral3", {"model_type": "ministral3", "head_dim": 16}, PIXTRAL),
    "qwen2.5-vl": ("Qwen2_5_VL", {"rope_parameters": MROPE}, {**TINY, "fullatt_block_indexes": [0]}),
    "qwen3-vl": (
        "Qwen3VL",
        {"head_dim": 16, "rope_parameters": {**MROPE, "mrope_interleaved": True}},
        QWEN3_VL_VISION,
    ),
    "gemma4-experts": (
        "Gemma4",
        {
            "head_dim": 16,
            "global_head_dim": 32,
            "sliding_window": 24,
            "num_hidden_layers": 6,
            "hidden_size_per_layer_input": 0,
            "pad_token_id": 0,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 48,
        },
        GEMMA4_VISION,
    ),
    "qwen3-vl-moe": ("Qwen3VLMoe", QWEN3_VL_MOE, QWEN3_VL_VISION),
    "qwen3-vl-moe-square-experts": (
        "Qwen3VLMoe",
        {**QWEN3_VL_MOE, "moe_intermediate_size": 32, "mlp_only_layers": [1]},
        QWEN3_VL_VISION,
    ),
    "glm4v-moe": (
        "Glm4vMoe",
        {
            "head_dim": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "attention_bias": True,
            "rope_parameters": {**MROPE, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5},
        },
        {**TINY, "intermediate_size": 32, "image_size": 28, "patch_size": 14},
    ),
}
"""transformers' kind, what its text model's config has beside the usual, and a small tower."""


def build(folder: Path, kind: str, text: dict[str, Any], vision: dict[str, Any], *, is_tied: bool = False) -> Any:
    config = getattr(transformers, f"{kind}Config")(
        text_config={**naive_model.SMALL, **text}, vision_config=vision, tie_word_embeddings=is_tied
    )
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("case", CASES)
def test_a_text_has_transformers_logits(case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    theirs = build(tmp_path, *CASES[case])
    config = read_model_config(tmp_path)
    with caplog.at_level(logging.INFO):
        source = open_weights(tmp_path, config)
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]  # what commands show
    assert sum("tensors outside the text model are not loaded" in line for line in warned) == 1
    operators = operators_for(CPU, torch.float32, "reference")
    model = load_model(source, config, Placement(operators, torch.float32, CPU, 256))
    driver = PagedDriver(model, num_blocks=64)
    token_ids = np.random.default_rng(1).integers(3, 190, 90).tolist()
    found = driver.logits(driver.step([(driver.add(token_ids), len(token_ids))])[0]).log_softmax(-1)
    expected = naive_model.logits(theirs, token_ids).log_softmax(-1)
    assert (found - expected).abs().max().item() <= 1e-4


@pytest.mark.parametrize("case", ["qwen3-vl-moe", "qwen3-vl-moe-square-experts"])
def test_published_experts_of_qwen3_vl_lie_the_other_way_round(case: str, tmp_path: Path) -> None:
    """Square ones are taken as they lie, as transformers does."""
    theirs = build(tmp_path, *CASES[case])
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    stacks = [name for name in tensors if "mlp.experts." in name]
    turned = {
        name: tensors[name].mT.contiguous() for name in stacks if tensors[name].shape[1] != tensors[name].shape[2]
    }
    assert len(turned) == len(stacks) // (1 if case == "qwen3-vl-moe" else 2)
    save_file({**tensors, **turned}, path, {"format": "pt"})
    config = read_model_config(tmp_path)
    operators = operators_for(CPU, torch.float32, "auto")
    model = load_model(open_weights(tmp_path, config), config, Placement(operators, torch.float32, CPU, 256))
    driver, token_ids = PagedDriver(model, num_blocks=8), [3, 1, 4, 1, 5, 9]
    found = driver.logits(driver.step([(driver.add(token_ids), len(token_ids))])[0])
    torch.testing.assert_close(found, naive_model.logits(theirs, token_ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", ["mistral3", "mistral3-of-ministral3", "qwen3-vl"])
def test_the_whole_says_that_the_head_is_tied_where_none_is_stored(case: str, tmp_path: Path) -> None:
    """If it is stored, the text model's config says so, as in Ministral 3 8B."""
    theirs = build(tmp_path, *CASES[case], is_tied=True)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["tie_word_embeddings"] = False
    if case.startswith("mistral3"):
        del config["tie_word_embeddings"]  # it is true by default
    path.write_text(json.dumps(config))
    read = read_model_config(tmp_path)
    assert read.tie_word_embeddings
    source, operators = open_weights(tmp_path, read), operators_for(CPU, torch.float32, "reference")
    model = load_model(source, read, Placement(operators, torch.float32, CPU, 256))
    driver, token_ids = PagedDriver(model, num_blocks=8), [3, 1, 4, 1, 5, 9]
    found = driver.logits(driver.step([(driver.add(token_ids), len(token_ids))])[0])
    torch.testing.assert_close(found, naive_model.logits(theirs, token_ids), rtol=1e-4, atol=1e-4)
    path.write_text(json.dumps({**config, "tie_word_embeddings": False}))
    assert not read_model_config(tmp_path).tie_word_embeddings
    path.write_text(json.dumps(config))
    weights = tmp_path / "model.safetensors"
    tensors = load_file(weights)
    save_file({**tensors, "language_model.lm_head.weight": torch.zeros(199, 64)}, weights)
    assert not read_model_config(tmp_path).tie_word_embeddings
    weights.write_bytes(b"no such file")
    assert not read_model_config(tmp_path).tie_word_embeddings
    weights.unlink()
    assert not read_model_config(tmp_path).tie_word_embeddings


def test_a_tensor_under_two_names_is_refused(tmp_path: Path) -> None:
    build(tmp_path, *CASES["mistral3"])
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("layers.0.mlp.up_proj.weight"))
    plain = "model.layers.0.mlp.up_proj.weight"
    save_file(
        {**tensors, plain: tensors[name].clone(), f"model.language_model.{plain[6:]}": tensors[name].clone()}, path
    )
    with pytest.raises(CorruptCheckpoint, match="is stored under two names"):
        Checkpoint(tmp_path)


def test_end_tokens_of_the_text_model_count(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": [7, 9]}}))
    assert read_eos_token_ids(tmp_path, 3) == {3, 7, 9}
