"""GGUF files of the newer families, written as llama.cpp's converter writes them: the logits are transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter

from fixtures.gguf.layout import interleaved
from oracle import naive_model
from oracle.paged_driver import PagedDriver
from twostroke.errors import CorruptCheckpoint, UnsupportedModel
from twostroke.kernels.dispatch import operators_for
from twostroke.model.decoder import Placement
from twostroke.model.gguf.names import gguf_name
from twostroke.model.loader import load_model
from twostroke.model.model_files import find_model

CPU = torch.device("cpu")
NORMS_BEHIND = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
MULTIPLIERS: dict[str, Any] = {
    "embedding_multiplier": 1.7,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.6,
    "logits_scaling": 0.8,
}
CAPS: dict[str, Any] = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0}
NO_ROTATION: dict[str, Any] = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 1e30}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "smollm3": ("smollm3", "SmolLM3", {"num_hidden_layers": 5}),
    "granite": ("granite", "Granite", MULTIPLIERS),
    "granite-no-rotation": ("granite", "Granite", {**MULTIPLIERS, "rope_parameters": NO_ROTATION}),
    "gemma": ("gemma", "Gemma", {"head_dim": 16, "tie_word_embeddings": True}),
    "gemma2": ("gemma2", "Gemma2", {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 24, **CAPS}),
    "gemma2-27b": (
        "gemma2",
        "Gemma2",
        {"head_dim": 32, "query_pre_attn_scalar": 16, "num_hidden_layers": 46, "sliding_window": 24, **CAPS},
    ),
    "gemma3": (
        "gemma3",
        "Gemma3",
        {"head_dim": 16, "query_pre_attn_scalar": 16, "num_hidden_layers": 7, "sliding_window": 24},
    ),
    "olmo2": ("olmo2", "Olmo2", {}),
    "olmo3": ("olmo2", "Olmo3", {"num_hidden_layers": 4, "sliding_window": 24}),
    "exaone4": ("exaone4", "Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "exaone4-32b": ("exaone4", "Exaone4", {"num_hidden_layers": 64, "hidden_size": 32, "intermediate_size": 48}),
    "exaone4-windows": ("exaone4", "Exaone4", {"num_hidden_layers": 4, "sliding_window": 24}),
}
"""llama.cpp's name, transformers', and what its config has beside the usual. Files leave out a window of 4096."""


def _add_of_gemma(writer: GGUFWriter, architecture: str, config: Any) -> dict[str, str]:
    """Gemma's own keys; returns its names of modules."""
    if not architecture.startswith("gemma"):
        return {}
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if architecture == "gemma":
        return {}
    writer.add_sliding_window(config.sliding_window)
    return {**NORMS_BEHIND, "pre_feedforward_layernorm": "ffn_norm"}


def write(path: Path, architecture: str, model: Any, pattern: list[bool] | None = None) -> None:
    """A file of the model in float32, with a tokenizer of bytes."""
    config = model.config
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer = GGUFWriter(str(path), architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    if architecture == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
        writer.add_rope_scaling_finetuned("factor" not in rope)
    if architecture in ("olmo2", "exaone4") and getattr(config, "sliding_window", None) not in (None, 4096):
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern(pattern or [kind == "sliding_attention" for kind in config.layer_types])
    own = _add_of_gemma(writer, architecture, config)
    if architecture in ("olmo2", "exaone4"):
        own = NORMS_BEHIND
    num_heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array, part = weight.numpy().astype(np.float32), name.split(".")[-2]
        if architecture in ("smollm3", "granite") and part in num_heads:
            array = interleaved(array, num_heads[part])
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            array = array + 1
        writer.add_tensor(gguf_name(name, own), np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    architecture, kind, changes = CASES[case]
    theirs = naive_model.build(tmp_path / "folder", kind, **changes)
    write(tmp_path / "x.gguf", architecture, theirs)
    files = find_model(str(tmp_path / "x.gguf"))
    config = files.config()
    model = load_model(
        files.weights(config, None),
        config,
        Placement(operators_for(CPU, torch.float32, "reference"), torch.float32, CPU, 256),
    )
    driver = PagedDriver(model, num_blocks=64)
    token_ids = np.random.default_rng(1).integers(0, model.config.vocab_size, 90).tolist()
    found = driver.logits(driver.step([(driver.add(token_ids), len(token_ids))])[0]).log_softmax(-1)
    expected = naive_model.logits(theirs, token_ids).log_softmax(-1)
    assert (found - expected).abs().max().item() <= 1e-4


def test_multipliers_that_nobody_reads_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    theirs = naive_model.build(tmp_path / "folder", "Granite", **MULTIPLIERS)
    write(path, "granite", theirs)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"granite.", b"smollm3.").replace(b"granite", b"smollm3"))
    with pytest.raises(UnsupportedModel, match=r"smollm3.attention.scale=0.2"):
        find_model(str(path)).config()


def test_a_file_says_which_layers_have_a_window(tmp_path: Path) -> None:
    theirs = naive_model.build(tmp_path / "folder", "Exaone4", num_hidden_layers=4, sliding_window=24)
    write(tmp_path / "x.gguf", "exaone4", theirs, [True, False, True, False])
    assert find_model(str(tmp_path / "x.gguf")).config().layer_windows == (24, None, 24, None)
    write(tmp_path / "y.gguf", "exaone4", theirs, [True, False])
    with pytest.raises(CorruptCheckpoint, match="a boolean for each of the 4 layers"):
        find_model(str(tmp_path / "y.gguf")).config()
