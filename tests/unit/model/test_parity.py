"""Our logits against transformers', eager attention, float32: random small models of every kind we claim to run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings

from oracle import naive_model
from oracle.paged_driver import PagedDriver
from oracle.parity import check_layers, check_parity
from twostroke.config.load import Kernels
from twostroke.kernels.dispatch import operators_for
from twostroke.model.checkpoint import read_model_config
from twostroke.model.decoder import Placement
from twostroke.model.loader import load_model, open_weights

CPU = torch.device("cpu")


def rope(rope_type: str, **parameters: Any) -> dict[str, Any]:
    """Rope parameters in the spelling of transformers 5."""
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10_000.0, **parameters}}


def longrope(num_pairs: int, *, original: int) -> dict[str, Any]:
    """A config of Phi 3's whose heads of 16 are rotated in part."""
    factors = np.linspace(1.0, 3.0, num_pairs)
    return {
        "pad_token_id": 0,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": original,
        **rope(
            "longrope",
            short_factor=factors.tolist(),
            long_factor=(4 * factors).tolist(),
            original_max_position_embeddings=original,
            partial_rotary_factor=num_pairs / 8,
        ),
    }


QWEN3_MOE: dict[str, Any] = {
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
}
QWEN2_MOE: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 80,
}
GPT_OSS: dict[str, Any] = {
    "head_dim": 16,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "sliding_window": 37,
    **rope("yarn", factor=4.0, original_max_position_embeddings=256, beta_fast=32.0, beta_slow=1.0, truncate=False),
}
GLM4_MOE: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
}
MINIMAX_M2: dict[str, Any] = {"head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 3}
ERNIE4_5_MOE: dict[str, Any] = {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 48}
GEMMA4_EXPERTS: dict[str, Any] = {
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 3,
    "moe_intermediate_size": 48,
    "final_logit_softcapping": 3.0,
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-gqa": ("Llama", {}),
    "llama-mha-tied": ("Llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama-mqa-biases": ("Llama", {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}),
    "llama-three-heads-per-kv-head": ("Llama", {"hidden_size": 96, "num_attention_heads": 6, "head_dim": 24}),
    "llama-linear": ("Llama", rope("linear", factor=4.0)),
    "llama-dynamic": ("Llama", rope("dynamic", factor=2.0)),
    "llama-llama3": (
        "Llama",
        rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=128),
    ),
    "llama-yarn": ("Llama", rope("yarn", factor=4.0, original_max_position_embeddings=256)),
    "llama-yarn-mscale": (
        "Llama",
        rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=256,
            mscale=0.8,
            mscale_all_dim=0.5,
            beta_fast=16.0,
            beta_slow=2.0,
            truncate=False,
        ),
    ),
    "llama-yarn-attention-factor": (
        "Llama",
        rope("yarn", factor=4.0, original_max_position_embeddings=256, attention_factor=1.3),
    ),
    "mistral-window": ("Mistral", {"sliding_window": 37}),
    "mistral-no-window": ("Mistral", {"sliding_window": None, "head_dim": 32}),
    "gemma": ("Gemma", {"head_dim": 32, "num_key_value_heads": 1}),
    "gemma-untied-biases": (
        "Gemma",
        {"head_dim": 16, "tie_word_embeddings": False, "attention_bias": True, "hidden_act": "gelu"},
    ),
    "gemma2": (
        "Gemma2",
        {
            "num_hidden_layers": 4,
            "head_dim": 32,
            "sliding_window": 37,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma2-no-caps": (
        "Gemma2",
        {"head_dim": 16, "sliding_window": 150, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma3": ("Gemma3", {"num_hidden_layers": 7, "head_dim": 32, "sliding_window": 37, "num_key_value_heads": 1}),
    "gemma3-stretched-caps": (
        "Gemma3",
        {
            "head_dim": 16,
            "sliding_window": 20,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
            },
            "query_pre_attn_scalar": 20,
            "final_logit_softcapping": 3.0,
            "attn_logit_softcapping": 2.0,  # not read there
            "tie_word_embeddings": False,
        },
    ),
    "gemma4": (  # as E2B and E4B are
        "Gemma4",
        {
            "num_hidden_layers": 6,
            "head_dim": 16,
            "global_head_dim": 32,
            "num_key_value_heads": 1,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 199,
            "sliding_window": 37,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma4-one-projection": (  # as 31B is
        "Gemma4",
        {
            "num_hidden_layers": 7,
            "head_dim": 16,
            "global_head_dim": 64,
            "num_key_value_heads": 2,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "sliding_window": 37,
            "use_bidirectional_attention": "vision",
            "attention_bias": True,
        },
    ),
    "gemma4-experts": (  # as 26B-A4B is
        "Gemma4",
        {
            **GEMMA4_EXPERTS,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "sliding_window": 37,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "tie_word_embeddings": True,
        },
    ),
    "gemma4-experts-and-token-inputs": (
        "Gemma4",
        {
            **GEMMA4_EXPERTS,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "global_head_dim": 32,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 199,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_experts": 4,
            "top_k_experts": 2,
        },
    ),
    "gemma4-equal-heads": (  # saved without a word about full layers
        "Gemma4",
        {"head_dim": 16, "global_head_dim": 16, "hidden_size_per_layer_input": 0, "sliding_window": 37},
    ),
    "phi3": ("Phi3", {"pad_token_id": 0}),
    "phi3-window-partial-tied": (
        "Phi3",
        {
            "pad_token_id": 0,
            "sliding_window": 37,
            "tie_word_embeddings": True,
            "partial_rotary_factor": 0.75,
        },
    ),
    "phi3-longrope": ("Phi3", longrope(6, original=1024)),
    "cohere2": ("Cohere2", {"num_hidden_layers": 5, "sliding_window": 37, "pad_token_id": 0}),
    "cohere2-biases-untied": (
        "Cohere2",
        {
            "attention_bias": True,
            "tie_word_embeddings": False,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "sliding_window": 150,
            "logit_scale": 0.7,
        },
    ),
    "starcoder2": ("Starcoder2", {"sliding_window": 37}),
    "starcoder2-no-biases": ("Starcoder2", {"use_bias": False, "tie_word_embeddings": True}),
    "ministral3": (
        "Ministral3",
        {
            "head_dim": 16,
            "pad_token_id": 0,
            **rope(
                "yarn",
                factor=16.0,
                original_max_position_embeddings=128,
                llama_4_scaling_beta=0.3,
                mscale=1.0,
                mscale_all_dim=1.0,
            ),
        },
    ),
    "glm": ("Glm", {"head_dim": 16, "pad_token_id": 0}),
    "glm-no-biases": ("Glm", {"head_dim": 32, "pad_token_id": 0, "attention_bias": False}),
    "glm4": ("Glm4", {"head_dim": 16, "pad_token_id": 0}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 1.7,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.6,
            "logits_scaling": 0.8,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "granite-plain-tied": ("Granite", {"attention_multiplier": 0.25, "tie_word_embeddings": True}),
    "ministral": (
        "Ministral",
        {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 37,
            "head_dim": 16,
            **rope("default"),
        },
    ),
    "seed-oss": ("SeedOss", {"head_dim": 32, "mlp_bias": True}),
    "seed-oss-output-bias": ("SeedOss", {"head_dim": 16, "attention_bias": False, "attention_out_bias": True}),
    "olmo2": ("Olmo2", {"attention_bias": True}),
    "olmo3": (
        "Olmo3",
        {
            "num_hidden_layers": 4,
            "sliding_window": 37,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
        },
    ),
    "exaone4": ("Exaone4", {"num_hidden_layers": 4, "sliding_window": 37}),
    "exaone4-no-windows": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "smollm3": ("SmolLM3", {"tie_word_embeddings": True, "num_hidden_layers": 5}),
    "smollm3-windows-biases": (
        "SmolLM3",
        {
            "no_rope_layers": [0, 1, 1],
            "attention_bias": True,
            "mlp_bias": True,
            "use_sliding_window": True,
            "sliding_window": 37,
        },
    ),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-mixed-windows": (
        "Qwen2",
        {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 150, "max_window_layers": 2},
    ),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-mixed-windows": (
        "Qwen3",
        {
            "head_dim": 8,
            "use_sliding_window": True,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "phi": ("Phi", {}),
    "phi-mha-less-rotation": ("Phi", {"num_key_value_heads": 4, "partial_rotary_factor": 0.25}),
    "gpt-neox": ("GPTNeoX", {"num_key_value_heads": 4}),
    "gpt-neox-one-after-the-other-tied": (
        "GPTNeoX",
        {
            "num_key_value_heads": 4,
            "use_parallel_residual": False,
            "hidden_act": "gelu_fast",
            "rotary_pct": 1.0,
            "tie_word_embeddings": True,
        },
    ),
    "stablelm": ("StableLm", {}),
    "stablelm-parallel-biases-qk-norm": (
        "StableLm",
        {
            "qk_layernorm": True,
            "use_parallel_residual": True,
            "use_qkv_bias": True,
            "partial_rotary_factor": 0.75,
            "tie_word_embeddings": True,
        },
    ),
    "cohere": ("Cohere", {"pad_token_id": 0}),
    "cohere-qk-norm-biases-tied": (
        "Cohere",
        {
            "use_qk_norm": True,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "logit_scale": 0.7,
            "pad_token_id": 0,
        },
    ),
    "arcee": ("Arcee", {}),
    "arcee-biases": ("Arcee", {"attention_bias": True, "mlp_bias": True}),
    "nemotron": ("Nemotron", {}),
    "nemotron-biases-whole-rotation": (
        "Nemotron",
        {"attention_bias": True, "mlp_bias": True, "partial_rotary_factor": 1.0, "head_dim": 32},
    ),
    "helium": ("Helium", {"head_dim": 16}),
    "helium-biases-tied": (
        "Helium",
        {"head_dim": 16, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "apertus": (
        "Apertus",
        rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=128),
    ),
    "apertus-biases-tied": ("Apertus", {"attention_bias": True, "tie_word_embeddings": True, **rope("default")}),
    "falcon": ("Falcon", {}),
    "falcon-new": (
        "Falcon",
        {
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "num_ln_in_parallel_attn": 1,
            "ffn_hidden_size": 96,
            "tie_word_embeddings": True,
        },
    ),
    "falcon-new-two-norms": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 96}),
    "falcon-mha-biases-one-after-the-other": (
        "Falcon",
        {"multi_query": False, "parallel_attn": False, "bias": True, "ffn_hidden_size": 96},
    ),
    "bloom": ("Bloom", {"tie_word_embeddings": True}),
    "bloom-residual-behind-the-norm": (
        "Bloom",
        {"apply_residual_connection_post_layernorm": True, "tie_word_embeddings": True},
    ),
    "bloom-six-heads-untied": ("Bloom", {"hidden_size": 96, "num_attention_heads": 6}),
    "gptj": ("GPTJ", {"num_key_value_heads": 4, "rotary_dim": 8}),
    "gptj-whole-rotation": ("GPTJ", {"num_key_value_heads": 4, "rotary_dim": 16, "n_inner": 96}),
    "opt": (
        "OPT",
        {"num_key_value_heads": 4, "ffn_dim": 96, "init_std": 0.15, "pad_token_id": 0, "tie_word_embeddings": True},
    ),
    "opt-no-biases-untied": (
        "OPT",
        {
            "num_key_value_heads": 4,
            "ffn_dim": 96,
            "init_std": 0.15,
            "pad_token_id": 0,
            "enable_bias": False,
            "activation_function": "gelu",
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "mixtral-window-tied": (
        "Mixtral",
        {"num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 24, "tie_word_embeddings": True},
    ),
    "qwen2-moe": ("Qwen2Moe", QWEN2_MOE),
    "qwen2-moe-renormalized": ("Qwen2Moe", {**QWEN2_MOE, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "qwen3-moe": ("Qwen3Moe", QWEN3_MOE),
    "qwen3-moe-dense-layers": (
        "Qwen3Moe",
        {**QWEN3_MOE, "norm_topk_prob": True, "decoder_sparse_step": 2, "attention_bias": True},
    ),
    "olmoe": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 3}),
    "olmoe-renormalized": (
        "Olmoe",
        {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True, "attention_bias": True},
    ),
    "granite-moe": (
        "GraniteMoe",
        {
            "num_local_experts": 4,
            "embedding_multiplier": 2.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.7,
            "logits_scaling": 3.0,
        },
    ),
    "gpt-oss": ("GptOss", GPT_OSS),
    "gpt-oss-no-windows": (
        "GptOss",
        {
            **GPT_OSS,
            **rope("default"),
            "layer_types": ["full_attention"] * 3,
            "num_experts_per_tok": 1,
            "attention_bias": False,
            "head_dim": 32,
        },
    ),
    "glm4-moe": ("Glm4Moe", GLM4_MOE),
    "glm4-moe-groups": (
        "Glm4Moe",
        {
            **GLM4_MOE,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "routed_scaling_factor": 2.5,
            "use_qk_norm": True,
            "attention_bias": True,
        },
    ),
    "glm4-moe-weights-as-they-are": ("Glm4Moe", {**GLM4_MOE, "norm_topk_prob": False, "first_k_dense_replace": 2}),
    "minimax-m2": ("MiniMaxM2", {**MINIMAX_M2, "rotary_dim": 8}),
    "minimax-m2-whole-heads-tied": ("MiniMaxM2", {**MINIMAX_M2, "tie_word_embeddings": True}),
    "ernie4.5-moe": ("Ernie4_5_Moe", ERNIE4_5_MOE),
    "ernie4.5-moe-some-layers": (
        "Ernie4_5_Moe",
        {
            **ERNIE4_5_MOE,
            "num_hidden_layers": 6,
            "moe_layer_start_index": 2,
            "moe_layer_end_index": 4,
            "moe_layer_interval": 2,
            "moe_num_shared_experts": 0,
            "tie_word_embeddings": True,
        },
    ),
    "dots1": ("Dots1", {**GLM4_MOE, "n_shared_experts": 2}),
    "dots1-groups-windows": (
        "Dots1",
        {
            **GLM4_MOE,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "first_k_dense_replace": 1,
            "attention_bias": True,
            "sliding_window": 37,
            "max_window_layers": 2,
        },
    ),
    "hunyuan-moe": ("HunYuanMoEV1", {"head_dim": 16, "num_experts": 8, "moe_topk": 3}),
    "hunyuan-moe-alpha-tied": (
        "HunYuanMoEV1",
        {
            "head_dim": 24,
            "num_experts": 6,
            "moe_topk": 1,
            "attention_bias": True,
            "tie_word_embeddings": True,
            **rope("dynamic", alpha=1000.0, factor=1.0),
        },
    ),
    "gpt2": ("GPT2", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "gpt2-scores-by-layer": (
        "GPT2",
        {"num_key_value_heads": 4, "scale_attn_by_inverse_layer_idx": True, "tie_word_embeddings": True},
    ),
    "gpt2-untied": ("GPT2", {"num_key_value_heads": 4, "n_inner": 96, "activation_function": "gelu"}),
}


@pytest.mark.parametrize("kernels", ["reference", "auto"])
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, kernels: Kernels, tmp_path: Path) -> None:
    kind, changes = CASES[case]
    check_parity(tmp_path, kind, changes, seed=0, prompt_lens=[1, 61, 400], num_decode=200, kernels=kernels)


@pytest.mark.parametrize("kernels", ["reference", "auto"])
@pytest.mark.parametrize("case", CASES)
def test_every_layers_output_equals_transformers(case: str, kernels: Kernels, tmp_path: Path) -> None:
    """Covers MHA, GQA and MQA, with two chunks of a prompt and three decodes."""
    kind, changes = CASES[case]
    check_layers(tmp_path, kind, changes, chunks=[40, 21, 1, 1, 1], kernels=kernels)


@torch.no_grad()
@pytest.mark.parametrize("kernels", ["reference", "auto"])
def test_what_tokens_bring_to_gemma_4s_layers_is_rounded_as_in_transformers(kernels: Kernels, tmp_path: Path) -> None:
    """In bfloat16 to the bit: the weights of their norm multiply before anything is rounded."""
    changes = {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 199, "dtype": "bfloat16"}
    theirs = naive_model.build(tmp_path, "Gemma4", **changes).to(torch.bfloat16)
    theirs.save_pretrained(tmp_path)
    ids = torch.arange(5, 190)[None]
    of_tokens = theirs.model.get_per_layer_inputs(ids, None)
    expected = theirs.model.project_per_layer_inputs(theirs.model.embed_tokens(ids), of_tokens)[0].flatten(1)
    config, cpu = read_model_config(tmp_path), torch.device("cpu")
    operators = operators_for(cpu, torch.bfloat16, kernels)
    weights = open_weights(tmp_path, config)
    model = load_model(weights, config, Placement(operators, torch.bfloat16, cpu, 64))
    assert torch.equal(model.embed(ids[0])[:, config.hidden_size :], expected)


@torch.no_grad()
@pytest.mark.parametrize("kernels", ["reference", "auto"])
@pytest.mark.parametrize("kind", ["Llama", "Helium", "Olmo2", "Olmo3"])
def test_norms_are_rounded_as_in_transformers(kind: str, kernels: Kernels, tmp_path: Path) -> None:
    """In bfloat16 to the bit, whether the weights multiply before that or behind it."""
    theirs = naive_model.build(tmp_path, kind, dtype="bfloat16", hidden_size=256, head_dim=64).to(torch.bfloat16)
    theirs.save_pretrained(tmp_path)
    hidden = torch.randn(50, 256, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    config, operators = read_model_config(tmp_path), operators_for(CPU, torch.bfloat16, kernels)
    weights = open_weights(tmp_path, config)
    model = load_model(weights, config, Placement(operators, torch.bfloat16, CPU, 64))
    assert torch.equal(model.final_norm(hidden), theirs.model.norm(hidden))


@pytest.mark.parametrize("kernels", ["reference", "auto"])
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("vocab_size", [300, 151_936])
def test_logits_are_as_wide_as_the_vocabulary(vocab_size: int, is_tied: bool, kernels: Kernels, tmp_path: Path) -> None:
    """The first and the last token of the vocabulary are read and scored like any other."""
    changes = {"vocab_size": vocab_size, "hidden_size": 32, "tie_word_embeddings": is_tied, "num_hidden_layers": 1}
    theirs = naive_model.build(tmp_path, "Llama", **changes)
    config = read_model_config(tmp_path)
    operators = operators_for(CPU, torch.float32, kernels)
    source = open_weights(tmp_path, config)
    model = load_model(source, config, Placement(operators, torch.float32, CPU, 64))
    driver = PagedDriver(model, num_blocks=8)
    token_ids = [0, vocab_size - 1, 7, vocab_size // 2, vocab_size - 1]
    found = driver.logits(driver.step([(driver.add(token_ids), len(token_ids))])[0])
    assert found.shape == (len(token_ids), vocab_size)
    torch.testing.assert_close(found, naive_model.logits(theirs, token_ids), rtol=1e-4, atol=1e-4)


def check_grid(folder: Path, seeds: range) -> None:
    """The heavier version: every case with other weights, block sizes, chunks and lengths."""
    for seed in seeds:
        rng = np.random.default_rng(seed)
        for case, (kind, changes) in CASES.items():
            prompt_lens = [1, *rng.integers(2, 400, 3).tolist()]
            check_parity(folder / f"{case}-{seed}", kind, changes, seed=seed, prompt_lens=prompt_lens, num_decode=250)


def test_parity_grid(tmp_path: Path) -> None:
    num_seeds = settings().max_examples // 500
    if not num_seeds:
        pytest.skip("the whole grid runs with --hypothesis-profile=soak")
    check_grid(tmp_path, range(1, num_seeds + 1))


def test_longrope_is_fixed_for_the_longest_context(tmp_path: Path) -> None:
    """Beyond the original context the long factors serve, as in transformers for a prompt that is longer than it."""
    theirs = naive_model.build(tmp_path, "Phi3", **longrope(6, original=64))
    config = read_model_config(tmp_path).fixed_for(None)
    assert config.max_context == 4096
    operators = operators_for(CPU, torch.float32)
    source = open_weights(tmp_path, config)
    model = load_model(source, config, Placement(operators, torch.float32, CPU, 256))
    driver = PagedDriver(model)
    token_ids = list(range(100))
    found = driver.logits(driver.step([(driver.add(token_ids), 100)])[0])
    assert torch.allclose(found, naive_model.logits(theirs, token_ids), atol=1e-3)


def test_dynamic_scaling_is_fixed_for_the_longest_context(tmp_path: Path) -> None:
    """Stretched at load to 2,048 positions: the same as transformers at that length, already for short prompts."""
    changes = {**rope("dynamic", factor=2.0), "max_position_embeddings": 256}
    theirs = naive_model.build(tmp_path, "Llama", **changes)
    config = read_model_config(tmp_path).fixed_for(2048)
    model = load_model(
        open_weights(tmp_path, config), config, Placement(operators_for(CPU, torch.float32), torch.float32, CPU, 2048)
    )
    token_ids = list(range(100))
    driver = PagedDriver(model)
    found = driver.logits(driver.step([(driver.add(token_ids), 100)])[0])
    assert not torch.allclose(found, naive_model.logits(theirs, token_ids), atol=1e-2)
    naive_model.logits(theirs, [0] * 2048)  # stretches transformers' frequencies, which then stay for longer prompts
    theirs_at_length = naive_model.logits(theirs, token_ids + [0] * 200)[:100]
    assert torch.allclose(found, theirs_at_length, atol=1e-3)
