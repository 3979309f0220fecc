"""Reading experts from config.json: which layers have them, how many, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from twostroke.config.experts import ExpertsSpec
from twostroke.config.model import ModelConfig
from twostroke.errors import CorruptCheckpoint, UnsupportedModel

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
QWEN3 = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2}
GLM = {"architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 8, "num_experts_per_tok": 2}

MINIMAX = {"architectures": ["MiniMaxM2ForCausalLM"], "head_dim": 16}
ERNIE = {"architectures": ["Ernie4_5_MoeForCausalLM"]}
DOTS = {"architectures": ["Dots1ForCausalLM"], "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2}
QWEN2 = {"architectures": ["Qwen2MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2}
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}
HUNYUAN: dict[str, Any] = {
    "architectures": ["HunYuanMoEV1ForCausalLM"],
    "head_dim": 16,
    "attention_head_dim": 16,
    "num_experts": 8,
    "moe_topk": [3, 3, 3, 3],
    "moe_intermediate_size": [96] * 4,
    "num_shared_expert": [1] * 4,
    "use_qk_norm": True,
    "use_cla": False,
    "rope_theta": 10_000.0,
    "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1},
}
"""As published: lists by layer, and the spelling of transformers 4."""
GPT_OSS = {"architectures": ["GptOssForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2}


def experts_of(given: dict[str, Any]) -> list[bool]:
    return [layer.experts is not None for layer in ModelConfig.from_hf(SMALL | given).layers]


def test_layers_without_experts_keep_their_mlp() -> None:
    assert experts_of(QWEN3) == [True] * 4
    assert experts_of(QWEN3 | {"mlp_only_layers": [0, 3]}) == [False, True, True, False]
    assert experts_of(QWEN3 | {"decoder_sparse_step": 2}) == [False, True, False, True]
    assert experts_of(ERNIE) == [False, True, True, True]
    assert experts_of(ERNIE | {"moe_layer_start_index": 0, "moe_layer_end_index": 2}) == [True, True, True, False]
    assert experts_of(ERNIE | {"moe_layer_start_index": 2, "moe_layer_interval": 2}) == [False, False, False, True]
    assert experts_of(GLM) == [False, True, True, True]
    assert experts_of(GLM | {"first_k_dense_replace": 3}) == [False, False, False, True]
    sizes = [layer.intermediate_size for layer in ModelConfig.from_hf(SMALL | GLM).layers]
    assert sizes == [96, 0, 0, 0]


def test_an_mlp_stays_beside_gemma_4s_experts() -> None:
    gemma4 = {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 48, "hidden_size_per_layer_input": 0}
    given = SMALL | {"architectures": ["Gemma4ForCausalLM"], **gemma4}
    assert experts_of(given) == [False] * 4
    layers = ModelConfig.from_hf(given | {"enable_moe_block": True}).layers
    assert [layer.intermediate_size for layer in layers] == [96] * 4
    assert layers[0].experts == ExpertsSpec(
        num_experts=8, num_chosen=2, intermediate_size=48, norms_router_input=True, has_expert_scales=True
    )


def test_a_config_says_how_experts_are_chosen() -> None:
    groups = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "n_shared_experts": 2}
    layer = ModelConfig.from_hf(SMALL | GLM | groups | {"moe_intermediate_size": 48}).layers[1]
    assert layer.experts == ExpertsSpec(
        num_experts=8,
        num_chosen=2,
        intermediate_size=48,
        scores="sigmoid",
        is_renormalized=True,
        scale=2.5,
        has_correction_bias=True,
        num_groups=4,
        num_chosen_groups=2,
        shared_size=96,
    )


def test_gpt_oss_has_windows_sinks_biases_and_a_gate_of_its_own() -> None:
    read = ModelConfig.from_hf(SMALL | GPT_OSS)
    assert read.layer_windows == (128, None, 128, None)
    assert read.ropes[0][0].theta == 150_000.0
    for layer in read.layers:
        assert (layer.has_sinks, layer.qkv_bias, layer.output_bias, layer.activation) == (
            True,
            True,
            True,
            "clamped_swiglu",
        )
        assert not layer.centers_keys, "the score of a sink does not fall with the others"
        assert layer.experts == ExpertsSpec(num_experts=8, num_chosen=2, intermediate_size=96, has_biases=True)
    stretched = ModelConfig.from_hf(SMALL | GPT_OSS | {"rope_scaling": YARN})
    assert not stretched.ropes[0][0].truncate
    assert stretched.max_context == 32 * 64
    types = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    chosen = ModelConfig.from_hf(SMALL | GPT_OSS | {"layer_types": types, "sliding_window": 7})
    assert chosen.layer_windows == (None, 7, 7, None)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (GPT_OSS | {"layer_types": ["full_attention"] * 3}, "layer_types has 3 entries for 4 layers"),
        (GPT_OSS | {"num_experts_per_tok": 9}, "num_experts_per_tok 9 is more than num_local_experts 8"),
        (QWEN3 | {"num_experts_per_tok": 9}, "num_experts_per_tok 9 is more than num_experts 8"),
        (QWEN3 | {"num_experts": 0}, "num_experts must be an integer above 0"),
        (QWEN3 | {"mlp_only_layers": ["a"]}, "mlp_only_layers must be numbers of layers"),
        (GLM | {"n_group": 3}, "n_routed_experts 8 is no multiple of n_group 3"),
        (GLM | {"n_group": 2, "topk_group": 3}, "topk_group 3 is more than n_group 2"),
        (GLM | {"n_group": 8, "topk_group": 2}, "leaves one of 8 experts in a group"),
        (GLM | {"n_group": 4, "topk_group": 1, "num_experts_per_tok": 3}, "more than the 2 experts of topk_group 1"),
        (GLM | {"first_k_dense_replace": 5}, "first_k_dense_replace must be an integer from 0 to 4"),
        (GLM | {"routed_scaling_factor": -1.0}, "routed_scaling_factor must be a number above 0"),
        (ERNIE | {"moe_k": 65}, "moe_k 65 is more than moe_num_experts 64"),
        (ERNIE | {"moe_layer_end_index": -2}, "moe_layer_end_index must be an integer from 0"),
        (MINIMAX | {"rotary_dim": 32}, "rotary_dim must be an integer above 0"),
        (GLM | {"n_shared_experts": -1}, "n_shared_experts must be an integer from 0"),
        (GLM | {"num_experts": 4}, "num_experts 4 contradicts n_routed_experts 8; both are names of the same value"),
        (QWEN3 | {"mlp_only_layers": [4]}, r"mlp_only_layers must be numbers of layers, 0 to 3, found \[4\]"),
        (QWEN3 | {"mlp_only_layers": [-1]}, "mlp_only_layers must be numbers of layers, 0 to 3"),
        (GPT_OSS | {"experts_per_token": 4}, "experts_per_token 4 contradicts num_experts_per_tok 2"),
        (ERNIE | {"moe_k": 6, "num_experts_per_tok": 4}, "num_experts_per_tok 4 contradicts moe_k 6"),
        (MINIMAX | {"attn_type_list": [1] * 3}, "attn_type_list has 3 entries for 4 layers"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(CorruptCheckpoint, match=told):
        ModelConfig.from_hf(SMALL | given)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (QWEN3 | {"use_sliding_window": True}, "use_sliding_window=true"),
        ({"architectures": ["OlmoeForCausalLM"], "clip_qkv": 8.0}, "clip_qkv=8"),
        (ERNIE | {"use_bias": True}, "use_bias=true"),
        (MINIMAX | {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        (MINIMAX | {"use_qk_norm": False}, "use_qk_norm=false"),
        (MINIMAX | {"attn_type_list": [1, 1, 0, 1]}, "attn_type_list must be one value for all layers"),
        (MINIMAX | {"attn_type_list": [0] * 4}, r"attn_type_list=\[0, 0, 0, 0\] is not implemented .* known: 1"),
        (MINIMAX | {"use_routing_bias": False}, "use_routing_bias=false"),
        (MINIMAX | {"qk_norm_type": "per_head"}, "qk_norm_type='per_head'"),
        (MINIMAX | {"shared_intermediate_size": 64}, "shared_intermediate_size=64"),
        (MINIMAX | {"sliding_window": 64}, "sliding_window=64 .* known: null"),
        (GLM | {"scoring_func": "softmax"}, "scoring_func='softmax' is not .* known: 'sigmoid', 'noaux_tc'"),
        (GLM | {"topk_method": "greedy"}, "topk_method='greedy'"),
        (DOTS | {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        (DOTS | {"moe_layer_freq": 2}, "moe_layer_freq=2"),
        (ERNIE | {"moe_norm_min": 0.5}, "moe_norm_min=0.5"),
        (ERNIE | {"moe_use_aux_free": False}, "moe_use_aux_free=false"),
        (
            QWEN2 | {"layer_types": ["sliding_attention"] * 4},
            r"layer_types \['sliding_attention'\] are not implemented",
        ),
        (QWEN3 | {"is_causal": False}, "is_causal=false"),
        (GPT_OSS | {"swiglu_limit": 10.0}, r"swiglu_limit=10.0 is not implemented for this architecture; known: 7.0"),
        (GPT_OSS | {"swiglu_alpha": 1.0}, r"swiglu_alpha=1.0 is not implemented for this architecture; known: 1.702"),
        (GPT_OSS | {"hidden_act": "gelu"}, "hidden_act='gelu' is not implemented; known: silu"),
        (GPT_OSS | {"quantization_config": {"quant_method": "mxfp8"}}, "quant_method='mxfp8' .*fp8, mxfp4"),
    ],
)
def test_what_is_not_implemented_is_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(UnsupportedModel, match=told):
        ModelConfig.from_hf(SMALL | given)


@pytest.mark.parametrize(
    "given",
    [
        QWEN3 | {"num_local_experts": 8, "experts_per_token": 2},
        {"architectures": ["Qwen3MoeForCausalLM"], "num_local_experts": 8, "experts_per_token": 2},
        {"architectures": ["Qwen3MoeForCausalLM"], "n_routed_experts": 8, "moe_topk": 2, "num_experts": None},
    ],
)
def test_other_names_of_numbers_of_experts(given: dict[str, Any]) -> None:
    assert ModelConfig.from_hf(SMALL | given) == ModelConfig.from_hf(SMALL | QWEN3)


def test_names_that_published_configs_add() -> None:
    dots = {"scoring_func": "noaux_tc", "topk_method": "noaux_tc", "moe_layer_freq": 1}
    assert ModelConfig.from_hf(SMALL | DOTS | dots) == ModelConfig.from_hf(SMALL | DOTS)
    minimax = {"attn_type_list": [1] * 4, "shared_intermediate_size": 0, "use_routing_bias": True}
    assert ModelConfig.from_hf(SMALL | MINIMAX | minimax) == ModelConfig.from_hf(SMALL | MINIMAX)


def test_a_config_of_hunyuan_as_published() -> None:
    layer = ModelConfig.from_hf(SMALL | HUNYUAN).layers[0]
    assert layer.experts is not None
    assert layer.rope is not None
    assert (layer.experts.num_chosen, layer.experts.shared_size, layer.qk_norm) == (3, 96, "rotated_heads")
    assert (layer.rope.rope_type, layer.rope.theta) == ("default", pytest.approx(10_000 * 1000 ** (16 / 14)))


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"moe_topk": [3, 3, 2, 3]}, UnsupportedModel, "moe_topk must be one value for all layers"),
        ({"num_experts": []}, CorruptCheckpoint, "num_experts has 0 entries for 4 layers"),
        ({"moe_topk": 9}, CorruptCheckpoint, "moe_topk 9 is more than num_experts 8"),
        ({"rope_scaling": {"type": "dynamic", "alpha": -1.0}}, CorruptCheckpoint, "alpha above 0 and below 1e9"),
        ({"rope_scaling": {"type": "dynamic", "alpha": "x"}}, CorruptCheckpoint, "alpha above 0 and below 1e9"),
        ({"moe_topk": [3, 3, 3]}, CorruptCheckpoint, "moe_topk has 3 entries for 4 layers"),
        (
            {"moe_intermediate_size": [64] * 4},
            UnsupportedModel,
            r"moe_intermediate_size=.* known: intermediate_size \(96",
        ),
        ({"moe_intermediate_size": 64}, UnsupportedModel, "moe_intermediate_size=64"),
        ({"attention_head_dim": 32}, UnsupportedModel, r"attention_head_dim=32 .* known: head_dim \(16\)"),
        ({"num_shared_expert": [2] * 4}, UnsupportedModel, "num_shared_expert=.* known: 1"),
        ({"use_mixed_mlp_moe": False}, UnsupportedModel, "use_mixed_mlp_moe=false"),
        ({"moe_layer_num_skipped": 1}, UnsupportedModel, "moe_layer_num_skipped=1"),
        ({"use_cla": True}, UnsupportedModel, "use_cla"),
        ({"use_qk_norm": False}, UnsupportedModel, "use_qk_norm"),
    ],
)
def test_hunyuans_that_are_refused(changes: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        ModelConfig.from_hf(SMALL | HUNYUAN | changes)
