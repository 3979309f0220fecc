"""config.json of published models, both spellings of rope, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from twostroke.config.architectures import ARCHITECTURE_TRAITS
from twostroke.config.model import ModelConfig
from twostroke.config.rope import RopeConfig
from twostroke.errors import CorruptCheckpoint, SetupError, UnsupportedModel, shown
from twostroke.layers.elementwise import inverse_frequencies
from twostroke.model.registry import num_parameters

FIXTURES = Path(__file__).parents[2] / "fixtures"

LLAMA3_ROPE = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
COMMON: dict[str, Any] = {"hidden_act": "silu", "initializer_range": 0.02, "torch_dtype": "bfloat16", "use_cache": True}

PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "Llama-3.2-1B": (
        {
            **COMMON,
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
            "head_dim": 64,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "max_position_embeddings": 131072,
            "mlp_bias": False,
            "num_attention_heads": 32,
            "num_hidden_layers": 16,
            "num_key_value_heads": 8,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_scaling": LLAMA3_ROPE,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
            "vocab_size": 128256,
        },
        1_235_814_400,
    ),
    "Llama-3.1-8B-Instruct": (
        {
            **COMMON,
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "bos_token_id": 128000,
            "eos_token_id": [128001, 128008, 128009],
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "max_position_embeddings": 131072,
            "mlp_bias": False,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {**LLAMA3_ROPE, "factor": 8.0},
            "rope_theta": 500000.0,
            "tie_word_embeddings": False,
            "vocab_size": 128256,
        },
        8_030_261_248,
    ),
    "Mistral-7B-v0.1": (
        {
            **COMMON,
            "architectures": ["MistralForCausalLM"],
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "max_position_embeddings": 32768,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_theta": 10000.0,
            "sliding_window": 4096,
            "tie_word_embeddings": False,
            "vocab_size": 32000,
        },
        7_241_732_096,
    ),
    "Mistral-7B-v0.3": (
        {
            **COMMON,
            "architectures": ["MistralForCausalLM"],
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "max_position_embeddings": 32768,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "vocab_size": 32768,
        },
        7_248_023_552,
    ),
    "Qwen2.5-0.5B-Instruct": (
        {
            **COMMON,
            "architectures": ["Qwen2ForCausalLM"],
            "bos_token_id": 151643,
            "eos_token_id": 151645,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "max_position_embeddings": 32768,
            "max_window_layers": 21,
            "num_attention_heads": 14,
            "num_hidden_layers": 24,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0,
            "sliding_window": 32768,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
        494_032_768,
    ),
    "Qwen3-0.6B": (
        {
            **COMMON,
            "architectures": ["Qwen3ForCausalLM"],
            "attention_bias": False,
            "bos_token_id": 151643,
            "eos_token_id": 151645,
            "head_dim": 128,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "max_position_embeddings": 40960,
            "max_window_layers": 28,
            "num_attention_heads": 16,
            "num_hidden_layers": 28,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
        596_049_920,
    ),
    "gemma-2-2b": (
        {
            **COMMON,
            "architectures": ["Gemma2ForCausalLM"],
            "attention_bias": False,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "max_position_embeddings": 8192,
            "num_attention_heads": 8,
            "num_hidden_layers": 26,
            "num_key_value_heads": 4,
            "query_pre_attn_scalar": 256,
            "rms_norm_eps": 1e-06,
            "rope_theta": 10000.0,
            "sliding_window": 4096,
            "vocab_size": 256000,
        },
        2_614_341_888,
    ),
    "gemma-3-1b": (
        {
            **COMMON,
            "architectures": ["Gemma3ForCausalLM"],
            "attention_bias": False,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "max_position_embeddings": 32768,
            "num_attention_heads": 4,
            "num_hidden_layers": 26,
            "num_key_value_heads": 1,
            "query_pre_attn_scalar": 256,
            "rms_norm_eps": 1e-06,
            "rope_local_base_freq": 10000,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
            "vocab_size": 262144,
        },
        999_885_952,
    ),
    "Phi-4-mini-instruct": (
        {
            **COMMON,
            "architectures": ["Phi3ForCausalLM"],
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "max_position_embeddings": 131072,
            "num_attention_heads": 24,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "original_max_position_embeddings": 4096,
            "partial_rotary_factor": 0.75,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.5] * 48},
            "rope_theta": 10000.0,
            "sliding_window": 262144,
            "tie_word_embeddings": True,
            "vocab_size": 200064,
        },
        3_836_021_760,
    ),
    "phi-4": (
        {
            **COMMON,
            "architectures": ["Phi3ForCausalLM"],
            "hidden_size": 5120,
            "intermediate_size": 17920,
            "max_position_embeddings": 16384,
            "num_attention_heads": 40,
            "num_hidden_layers": 40,
            "num_key_value_heads": 10,
            "original_max_position_embeddings": 16384,
            "rms_norm_eps": 1e-05,
            "rope_scaling": None,
            "rope_theta": 250000,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "vocab_size": 100352,
        },
        14_659_507_200,
    ),
    "glm-4-9b-hf": (
        {
            **COMMON,
            "architectures": ["GlmForCausalLM"],
            "attention_bias": True,
            "head_dim": 128,
            "hidden_size": 4096,
            "intermediate_size": 13696,
            "max_position_embeddings": 8192,
            "num_attention_heads": 32,
            "num_hidden_layers": 40,
            "num_key_value_heads": 2,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1.5625e-07,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "vocab_size": 151552,
        },
        9_399_951_360,
    ),
    "phi-2": (
        {
            **COMMON,
            "architectures": ["PhiForCausalLM"],
            "hidden_act": "gelu_new",
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "layer_norm_eps": 1e-05,
            "max_position_embeddings": 2048,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 32,
            "partial_rotary_factor": 0.4,
            "qk_layernorm": False,
            "rope_scaling": None,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "vocab_size": 51200,
        },
        2_779_683_840,
    ),
    "pythia-160m": (
        {
            **COMMON,
            "architectures": ["GPTNeoXForCausalLM"],
            "hidden_act": "gelu",
            "hidden_size": 768,
            "intermediate_size": 3072,
            "layer_norm_eps": 1e-05,
            "max_position_embeddings": 2048,
            "num_attention_heads": 12,
            "num_hidden_layers": 12,
            "rotary_emb_base": 10000,
            "rotary_pct": 0.25,
            "tie_word_embeddings": False,
            "use_parallel_residual": True,
            "vocab_size": 50304,
        },
        162_322_944,
    ),
    "stablelm-3b-4e1t": (
        {
            **COMMON,
            "architectures": ["StableLmForCausalLM"],
            "hidden_size": 2560,
            "intermediate_size": 6912,
            "layer_norm_eps": 1e-05,
            "max_position_embeddings": 4096,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 32,
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000,
            "tie_word_embeddings": False,
            "use_qkv_bias": False,
            "vocab_size": 50304,
        },
        2_795_443_200,
    ),
    "stablelm-2-12b": (
        {
            **COMMON,
            "architectures": ["StableLmForCausalLM"],
            "hidden_size": 5120,
            "intermediate_size": 13824,
            "layer_norm_eps": 1e-05,
            "max_position_embeddings": 4096,
            "num_attention_heads": 32,
            "num_hidden_layers": 40,
            "num_key_value_heads": 8,
            "partial_rotary_factor": 0.25,
            "qk_layernorm": True,
            "rope_theta": 10000,
            "tie_word_embeddings": False,
            "use_parallel_residual": True,
            "use_qkv_bias": False,
            "vocab_size": 100352,
        },
        12_143_185_920,
    ),
    "command-r": (
        {
            **COMMON,
            "architectures": ["CohereForCausalLM"],
            "attention_bias": False,
            "hidden_size": 8192,
            "intermediate_size": 22528,
            "layer_norm_eps": 1e-05,
            "logit_scale": 0.0625,
            "max_position_embeddings": 8192,
            "num_attention_heads": 64,
            "num_hidden_layers": 40,
            "num_key_value_heads": 64,
            "rope_theta": 8000000.0,
            "use_qk_norm": False,
            "vocab_size": 256000,
        },
        34_980_831_232,
    ),
    "command-r-plus": (
        {
            **COMMON,
            "architectures": ["CohereForCausalLM"],
            "attention_bias": False,
            "hidden_size": 12288,
            "intermediate_size": 33792,
            "layer_norm_eps": 1e-05,
            "logit_scale": 0.8333333333333334,
            "max_position_embeddings": 8192,
            "num_attention_heads": 96,
            "num_hidden_layers": 64,
            "num_key_value_heads": 8,
            "rope_theta": 75000000.0,
            "use_qk_norm": True,
            "vocab_size": 256000,
        },
        103_810_674_688,
    ),
    "Apertus-8B": (
        {
            **COMMON,
            "architectures": ["ApertusForCausalLM"],
            "attention_bias": False,
            "hidden_act": "xielu",
            "hidden_size": 4096,
            "intermediate_size": 21504,
            "max_position_embeddings": 65536,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {**LLAMA3_ROPE, "factor": 8.0},
            "rope_theta": 12000000,
            "tie_word_embeddings": False,
            "vocab_size": 131072,
        },
        8_053_338_176,
    ),
    "falcon-7b": (
        {
            "architectures": ["FalconForCausalLM"],
            "alibi": False,
            "bias": False,
            "hidden_size": 4544,
            "layer_norm_epsilon": 1e-05,
            "multi_query": True,
            "new_decoder_architecture": False,
            "num_attention_heads": 71,
            "num_hidden_layers": 32,
            "num_kv_heads": 71,
            "parallel_attn": True,
            "torch_dtype": "bfloat16",
            "vocab_size": 65024,
        },
        6_921_720_704,
    ),
    "bloom-560m": (
        {
            "apply_residual_connection_post_layernorm": False,
            "architectures": ["BloomForCausalLM"],
            "layer_norm_epsilon": 1e-05,
            "n_embed": 1024,
            "n_inner": None,
            "n_layer": 24,
            "num_attention_heads": 16,
            "offset_alibi": 100,
            "pretraining_tp": 1,
            "slow_but_exact": False,
            "torch_dtype": "bfloat16",
            "vocab_size": 250880,
        },
        559_214_592,
    ),
    "gpt-j-6b": (
        {
            "architectures": ["GPTJForCausalLM"],
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-05,
            "n_embd": 4096,
            "n_head": 16,
            "n_inner": None,
            "n_layer": 28,
            "n_positions": 2048,
            "rotary_dim": 64,
            "scale_attn_weights": True,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "vocab_size": 50400,
        },
        6_050_882_784,
    ),
    "opt-1.3b": (
        {
            "_remove_final_layer_norm": False,
            "activation_function": "relu",
            "architectures": ["OPTForCausalLM"],
            "do_layer_norm_before": True,
            "ffn_dim": 8192,
            "hidden_size": 2048,
            "max_position_embeddings": 2048,
            "num_attention_heads": 32,
            "num_hidden_layers": 24,
            "torch_dtype": "bfloat16",
            "vocab_size": 50272,
            "word_embed_proj_dim": 2048,
        },
        1_315_758_080,
    ),
    "gpt2": (
        {
            "architectures": ["GPT2LMHeadModel"],
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-05,
            "n_ctx": 1024,
            "n_embd": 768,
            "n_head": 12,
            "n_layer": 12,
            "n_positions": 1024,
            "torch_dtype": "bfloat16",
            "vocab_size": 50257,
        },
        124_439_808,
    ),
}


def changed(name: str, **changes: Any) -> dict[str, Any]:
    """A published config.json with some keys changed; None removes a key."""
    merged = {**PUBLISHED[name][0], **changes}
    return {key: value for key, value in merged.items() if value is not None or key not in changes}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_the_published_number_of_parameters(name: str) -> None:
    config, expected = PUBLISHED[name]
    read = ModelConfig.from_hf(config)
    assert num_parameters(read) == expected
    assert read.dtype == "bfloat16"
    assert len(read.layer_windows) == config.get("num_hidden_layers", config.get("n_layer"))


def test_values_of_published_models() -> None:
    llama = ModelConfig.from_hf(PUBLISHED["Llama-3.1-8B-Instruct"][0])
    assert llama.layers[0].kv.head_dim == 128
    assert llama.layers[0].rope == RopeConfig(500000.0, "llama3", 8.0, 8192, 1.0, 4.0)
    assert ModelConfig.from_hf(PUBLISHED["Mistral-7B-v0.1"][0]).layer_windows == (4096,) * 32
    assert ModelConfig.from_hf(PUBLISHED["Mistral-7B-v0.3"][0]).layer_windows == (None,) * 32
    qwen2 = ModelConfig.from_hf(PUBLISHED["Qwen2.5-0.5B-Instruct"][0])
    assert (qwen2.layers[0].qkv_bias, qwen2.layers[0].output_bias, qwen2.layer_windows) == (True, False, (None,) * 24)
    assert ModelConfig.from_hf(PUBLISHED["Qwen3-0.6B"][0]).layers[0].qk_norm


def test_values_of_gemma_and_phi() -> None:
    gemma3 = ModelConfig.from_hf(PUBLISHED["gemma-3-1b"][0])
    assert gemma3.layer_windows == ((512,) * 5 + (None,)) * 4 + (512,) * 2
    assert {(rope.theta, rope.factor) for rope, _ in gemma3.ropes} == {(1e6, 1.0), (1e4, 1.0)}
    assert (gemma3.tie_word_embeddings, gemma3.norm_offset, gemma3.embedding_scale) == (True, 1.0, 1152**0.5)
    stretched = ModelConfig.from_hf(
        {**PUBLISHED["gemma-3-1b"][0], "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    )
    assert [rope.factor for rope, _ in stretched.ropes] == [1.0, 8.0]
    assert stretched.max_context == 32768, "as it is after the stretching"
    gemma2 = ModelConfig.from_hf(PUBLISHED["gemma-2-2b"][0])
    assert (gemma2.layers[1].attention_softcap, gemma2.logits_softcap, gemma2.layer_windows[:2]) == (
        50.0,
        30.0,
        (4096, None),
    )
    phi = ModelConfig.from_hf(PUBLISHED["Phi-4-mini-instruct"][0])
    rope = phi.ropes[0][0]
    assert (rope.rope_type, rope.rotary_dim, rope.factor, phi.max_context) == ("longrope", 96, 32.0, 131072)


@pytest.mark.parametrize("name", ["su", "yarn"])
def test_first_names_of_longrope(name: str) -> None:
    """Only Phi 3 is affected; yarn without factors stays yarn there, as in a GGUF file."""
    phi, _ = PUBLISHED["Phi-4-mini-instruct"]
    scaling = phi["rope_scaling"]
    assert ModelConfig.from_hf({**phi, "rope_scaling": {**scaling, "type": name}}) == ModelConfig.from_hf(phi)
    yarn = ModelConfig.from_hf({**phi, "rope_scaling": {"type": "yarn", "factor": 2.0}})
    assert yarn.ropes[0][0].rope_type == "yarn"


@pytest.mark.parametrize("name", ["bloom-560m", "gpt2", "gpt-j-6b", "opt-1.3b", "pythia-160m", "falcon-7b"])
def test_heads_are_equal_where_transformers_reads_nothing_else(name: str) -> None:
    config, _ = PUBLISHED[name]
    unread: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 48}
    if name == "pythia-160m":  # its rotation, but not its projections, would have heads of that size
        with pytest.raises(UnsupportedModel, match=r"head_dim=48 .* known: hidden_size / num_attention_heads \(64\)"):
            ModelConfig.from_hf({**config, **unread})
        del unread["head_dim"]
    assert ModelConfig.from_hf({**config, **unread}) == ModelConfig.from_hf(config)


def test_values_of_older_families() -> None:
    phi, pythia, command = (ModelConfig.from_hf(PUBLISHED[name][0]) for name in ("phi-2", "pythia-160m", "command-r"))
    assert (phi.layers[0].activation, phi.layers[0].norms, phi.ropes[0][0].rotary_dim) == ("gelu_tanh", "shared", 32)
    layer = pythia.layers[0]
    assert (layer.activation, layer.norms, layer.is_parallel, pythia.head_bias) == ("gelu", "before", True, False)
    serial = ModelConfig.from_hf({**PUBLISHED["pythia-160m"][0], "use_parallel_residual": False}).layers[0]
    assert (serial.norms, serial.is_parallel) == ("before", False)
    assert (command.layers[0].qk_norm, command.logits_divisor) == ("none", 16.0)
    plus = ModelConfig.from_hf(PUBLISHED["command-r-plus"][0])
    assert plus.layers[0].qk_norm == "own_heads"
    falcon, gptj = (ModelConfig.from_hf(PUBLISHED[name][0]) for name in ("falcon-7b", "gpt-j-6b"))
    assert (falcon.layers[0].kv.num_kv_heads, falcon.layers[0].intermediate_size) == (1, 18176)
    assert (gptj.ropes[0][0].rotary_dim, gptj.layers[0].intermediate_size, gptj.head_bias) == (64, 16384, True)


@pytest.mark.parametrize(
    ("name", "changes", "error", "said"),
    [
        ("gemma-3-1b", {"hidden_activation": "silu"}, UnsupportedModel, "hidden_activation='silu'"),
        ("gemma-3-1b", {"use_bidirectional_attention": True}, UnsupportedModel, "use_bidirectional_attention"),
        ("gemma-2-2b", {"attn_logit_softcapping": -1}, CorruptCheckpoint, "attn_logit_softcapping must be null or a"),
        ("gemma-2-2b", {"final_logit_softcapping": 1e9}, CorruptCheckpoint, "must be null or a number from 1 to 10000"),
        ("phi-2", {"qk_layernorm": True}, UnsupportedModel, "qk_layernorm=true is not implemented for this arch"),
        ("phi-2", {"tie_word_embeddings": True}, UnsupportedModel, "tie_word_embeddings=true .* bias on logits"),
        ("bloom-560m", {"slow_but_exact": True}, UnsupportedModel, "slow_but_exact=true is not implemented"),
        ("falcon-7b", {"alibi": True}, UnsupportedModel, "alibi=true is not implemented"),
        (
            "falcon-7b",
            {"new_decoder_architecture": True, "num_kv_heads": 71, "num_ln_in_parallel_attn": 3},
            CorruptCheckpoint,
            "num_ln_in_parallel_attn must be an integer above 0 .at most 2",
        ),
        ("opt-1.3b", {"do_layer_norm_before": False}, UnsupportedModel, "do_layer_norm_before=false"),
        ("opt-1.3b", {"word_embed_proj_dim": 512}, UnsupportedModel, "word_embed_proj_dim=512 .* hidden_size .2048"),
        ("gpt-j-6b", {"rotary_dim": 512}, CorruptCheckpoint, r"rotary_dim must be an integer above 0 .at most 256"),
        (
            "phi-4",
            {
                "original_max_position_embeddings": 1,
                "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 64, "long_factor": [1.0] * 64},
            },
            CorruptCheckpoint,
            "needs an original_max_position_embeddings above 1",
        ),
        (
            "glm-4-9b-hf",
            {"head_dim": 4, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            CorruptCheckpoint,
            "dynamic rope scaling needs a head_dim of 4",
        ),
        ("gemma-2-2b", {"query_pre_attn_scalar": 0}, CorruptCheckpoint, "query_pre_attn_scalar must be a number"),
        ("glm-4-9b-hf", {"partial_rotary_factor": 0.01}, CorruptCheckpoint, "partial_rotary_factor must give an even"),
        ("glm-4-9b-hf", {"partial_rotary_factor": 1.5}, CorruptCheckpoint, "partial_rotary_factor must give an even"),
        (
            "phi-4",
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 64, "long_factor": [1.0] * 63}},
            CorruptCheckpoint,
            "needs 64 numbers above 0 as long_factor, found 63",
        ),
    ],
)
def test_refused_of_other_families(name: str, changes: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        ModelConfig.from_hf({**PUBLISHED[name][0], **changes})


GEMMA_3_4B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
}
"""As it is on the hub: what is transformers' default is left out."""


def test_a_sparse_text_config_takes_transformers_defaults() -> None:
    read = ModelConfig.from_hf(GEMMA_3_4B)
    layer = read.layers[0]
    assert (layer.num_heads, layer.kv.num_kv_heads, layer.kv.head_dim, read.vocab_size) == (8, 4, 256, 262_208)
    assert (read.max_context, read.layer_windows.count(None), read.dtype) == (131_072, 5, "bfloat16")
    assert num_parameters(read) == 3_880_263_168


LEFT_OUT = object()


def gemma4(size: str, **changes: Any) -> ModelConfig:
    given = json.loads((FIXTURES / "gemma4" / size / "config.json").read_text()) | changes
    return ModelConfig.from_hf({key: value for key, value in given.items() if value is not LEFT_OUT})


def test_gemma_4s_layers() -> None:
    e2b, e4b, dense = (gemma4(size) for size in ("e2b", "e4b", "31b"))
    assert [round(num_parameters(config) / 1e9, 2) for config in (e2b, e4b, dense)] == [4.63, 7.46, 30.7]
    assert [len(config.kv_specs) for config in (e2b, e4b, dense)] == [15, 24, 60]
    assert {(spec.num_kv_heads, spec.head_dim, spec.window) for spec in dense.kv_specs} == {
        (16, 256, 1024),
        (4, 512, None),
    }
    shared = [layer for layer in e2b.layers if layer.kv_source is not None]
    assert {(layer.kv_source, layer.kv.window, layer.intermediate_size) for layer in shared} == {
        (13, 512, 12_288),
        (14, None, 12_288),
    }
    assert {(rope.rope_type, rope.rotating_share, size) for rope, size in dense.ropes} == {
        ("default", 1.0, 256),
        ("proportional", 0.25, 512),
    }
    assert [layer.has_value_projection for layer in dense.layers[4:6]] == [True, False]


def test_gemma_4_as_its_own_files_say_it() -> None:
    """Published files name the heads of full layers once, and not layer by layer."""
    own = {"per_layer_config": LEFT_OUT, "global_head_dim": 512, "num_global_key_value_heads": 4}
    assert gemma4("31b", **own).layers == gemma4("31b").layers
    types = {"layer_types": None, "rope_parameters": None}
    assert gemma4("31b", **own, **types).layers == gemma4("31b").layers


def test_gemma_4_layer_by_layer() -> None:
    """With `per_layer_config`, the heads of full layers are ignored, as in transformers."""
    for own in ({}, None, {"5": {"head_dim": 256, "skip": []}}):
        kvs = gemma4("31b", per_layer_config=own, global_head_dim=64, num_global_key_value_heads=8).kv_specs
        assert {(spec.num_kv_heads, spec.head_dim) for spec in kvs} == {(16, 256)}
    own = {"0": {"num_key_value_heads": 8}, "05": {"head_dim": 512}}
    kvs = gemma4("31b", per_layer_config=own).kv_specs
    assert [(kvs[i].num_kv_heads, kvs[i].head_dim) for i in (0, 1, 5, 11)] == [
        (8, 256),
        (16, 256),
        (16, 512),
        (16, 256),
    ]


@pytest.mark.parametrize(
    ("size", "changes", "error", "said"),
    [
        ("31b", {"enable_moe_block": True}, CorruptCheckpoint, "num_experts must be an integer above 0 .*found null"),
        (
            "31b",
            {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5, "moe_intermediate_size": 48},
            CorruptCheckpoint,
            "top_k_experts 5 is more than num_experts 4",
        ),
        ("31b", {"use_bidirectional_attention": "all"}, UnsupportedModel, "use_bidirectional_attention"),
        ("e2b", {"num_kv_shared_layers": 35}, CorruptCheckpoint, "no layer whose K and V layer 0 could read"),
        ("e2b", {"vocab_size_per_layer_input": 1000}, UnsupportedModel, "vocab_size_per_layer_input=1000"),
        ("e2b", {"num_kv_shared_layers": -1}, CorruptCheckpoint, "num_kv_shared_layers"),
        ("31b", {"per_layer_config": {"x": {}}}, CorruptCheckpoint, "per_layer_config has 'x'"),
        ("31b", {"per_layer_config": {"60": {}}}, CorruptCheckpoint, "has '60', which is no layer's number.*0 to 59"),
        ("31b", {"per_layer_config": {"5": {"num_key_value_heads": 3}}}, CorruptCheckpoint, "layer 5 has 3 KV heads"),
        ("31b", {"per_layer_config": {"5": {"skip": ["mlp"]}}}, UnsupportedModel, "gives layer 5 its own skip"),
        (
            "31b",
            {"per_layer_config": {"05": {"intermediate_size": 7}}},
            UnsupportedModel,
            r"layer 5 its own intermediate_size \(7\), .*known: head_dim, num_key_value_heads",
        ),
        ("31b", {"per_layer_config": {"5": 3}}, CorruptCheckpoint, "5 must be an object"),
    ],
)
def test_what_gemma_4_cannot_be(size: str, changes: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        gemma4(size, **changes)


def test_layers_of_their_own_are_refused_where_all_have_to_be_alike() -> None:
    """transformers 5.24 builds any model so; only what is as in all layers says nothing."""
    mistral = PUBLISHED["Mistral-7B-v0.1"][0]
    for own in ({"1": {"sliding_window": None}}, {"1": {"num_key_value_heads": 4}}, {"1": {"skip": ["attention"]}}):
        with pytest.raises(UnsupportedModel, match=r"per_layer_config gives layer 1 .*; known: nothing"):
            ModelConfig.from_hf({**mistral, "per_layer_config": own})
    alike = {"1": {"sliding_window": mistral["sliding_window"], "skip": []}}
    assert ModelConfig.from_hf({**mistral, "per_layer_config": alike}) == ModelConfig.from_hf(mistral)


@pytest.mark.parametrize(
    ("architecture", "meant"),
    [("Gemma3ForCausalLM", "; with images it is Gemma3ForConditionalGeneration"), ("GraniteForCausalLM", "")],
)
def test_a_text_config_that_a_model_of_text_does_not_read_is_named(architecture: str, meant: str) -> None:
    nested = {"architectures": [architecture], "text_config": PUBLISHED["gemma-3-1b"][0]}
    with pytest.raises(UnsupportedModel, match=f"text_config is not read, since {architecture} is text-only{meant}"):
        ModelConfig.from_hf(nested)


def test_a_text_model_that_is_not_known_is_refused() -> None:
    for kind in ("llama", "mistral4", 7):
        config = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {"model_type": kind}}
        with pytest.raises(UnsupportedModel, match="text_config of Mistral3ForConditionalGeneration has model_type"):
            ModelConfig.from_hf(config)


def test_null_and_zero_where_they_have_a_meaning() -> None:
    """Values as published configs have them."""
    base = {
        **COMMON,
        "architectures": ["Ministral3ForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "max_position_embeddings": 262_144,
        "num_attention_heads": 8,
        "num_hidden_layers": 2,
        "vocab_size": 100,
    }
    for config in (base, {**base, "rope_parameters": None}):
        rope = ModelConfig.from_hf(config).ropes[0][0]
        assert (rope.rope_type, rope.theta, rope.factor, rope.query_growth) == ("yarn", 1e6, 16.0, 0.1)
    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 64.0, "original_max_position_embeddings": 4096}
    off = {**yarn, "mscale": 1.0, "mscale_all_dim": 0.0, "llama_4_scaling_beta": 0.0}
    rope = ModelConfig.from_hf({**base, "rope_parameters": off}).ropes[0][0]
    assert (rope.mscale, rope.mscale_all_dim, rope.query_growth) == (1.0, None, None)
    cohere = {**base, "architectures": ["Cohere2ForCausalLM"], "sliding_window": None, "hidden_act": "silu"}
    types = {"layer_types": ["full_attention"] * 2, "max_position_embeddings": 8192}
    assert ModelConfig.from_hf({**cohere, **types}).ropes == (), "a layer without a window is not rotated"
    stretched = ModelConfig.from_hf(
        {
            **PUBLISHED["gemma-3-1b"][0],
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}},
        }
    )
    assert {(rope.theta, rope.factor) for rope, _ in stretched.ropes} == {(1e6, 8.0), (1e4, 1.0)}


@pytest.mark.parametrize("architecture", ["Helium", "GPTNeoX", "Phi3", "Llama", "Cohere", "Nemotron"])
def test_a_null_epsilon_is_that_of_the_family(architecture: str) -> None:
    """A null epsilon is treated like a missing one."""
    traits = ARCHITECTURE_TRAITS[f"{architecture}ForCausalLM"]
    config = changed("Llama-3.2-1B", architectures=[f"{architecture}ForCausalLM"], hidden_act=None, rope_scaling=None)
    read = ModelConfig.from_hf({**config, "tie_word_embeddings": False, traits.epsilon_key: None})
    assert read.norm_eps == traits.defaults.get(traits.epsilon_key, 1e-6)


def test_a_null_epsilon_is_that_of_a_text_config() -> None:
    """Qwen2.5-VL's text model has another than Qwen2."""
    read = ModelConfig.from_hf(
        {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "text_config": {"rms_norm_eps": None}}
    )
    assert read.norm_eps == 1e-5


def test_only_ministral_3_scales_queries_by_position() -> None:
    """Transformers reads the key in no other family that is known."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "llama_4_scaling_beta": 0.1}
    of_llama = ModelConfig.from_hf(changed("Llama-3.2-1B", rope_scaling=yarn))
    of_ministral = ModelConfig.from_hf(
        changed("Llama-3.2-1B", architectures=["Ministral3ForCausalLM"], rope_scaling=yarn)
    )
    assert [config.ropes[0][0].query_growth for config in (of_llama, of_ministral)] == [None, 0.1]


def test_the_rotation_of_gpt_j_has_a_size_and_no_other_key() -> None:
    """transformers reads none of these keys, and a published GPT-J has none of them."""
    plain = PUBLISHED["gpt-j-6b"][0]
    stretched = {"rope_theta": 5e5, "rope_scaling": LLAMA3_ROPE, "partial_rotary_factor": 0.5}
    assert ModelConfig.from_hf({**plain, **stretched}).ropes == ModelConfig.from_hf(plain).ropes


def test_the_theta_of_families_that_name_none() -> None:
    config = changed("Llama-3.2-1B", architectures=["Olmo3ForCausalLM"], rope_scaling=None)
    del config["rope_theta"]
    assert [rope.theta for rope, _ in ModelConfig.from_hf(config).ropes] == [500_000.0]
    config |= {"architectures": ["ApertusForCausalLM"], "hidden_act": "xielu", "rope_scaling": LLAMA3_ROPE}
    assert [(rope.theta, rope.factor) for rope, _ in ModelConfig.from_hf(config).ropes] == [(12e6, 32.0)]


def test_both_spellings_of_rope_are_the_same() -> None:
    old = changed("Llama-3.2-1B")
    new = changed("Llama-3.2-1B", rope_scaling=None, rope_theta=None)
    new["rope_parameters"] = {**LLAMA3_ROPE, "rope_theta": 500000.0}
    older = {**old, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert ModelConfig.from_hf(old).ropes == ModelConfig.from_hf(new).ropes
    assert ModelConfig.from_hf(older).layers[0].rope == RopeConfig(500000.0, "linear", 2.0)


def test_windows_by_layer() -> None:
    windowed = changed("Qwen2.5-0.5B-Instruct", use_sliding_window=True, sliding_window=64)
    assert ModelConfig.from_hf(windowed).layer_windows == (None,) * 21 + (64,) * 3
    listed = {**windowed, "layer_types": ["sliding_attention", "full_attention"] * 12}
    assert ModelConfig.from_hf(listed).layer_windows == (64, None) * 12


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"architectures": ["MptForCausalLM"]}, UnsupportedModel, "names the architecture MptForCausalLM; known: "),
        (
            {"architectures": ["SmolLM3MoeForCausalLM"], "num_experts": 60},
            UnsupportedModel,
            "SmolLM3ForCausalLM, without experts (num_experts=60); other architectures have experts; known",
        ),
        (
            {"architectures": ["Qwen3NextForCausalLM"], "layer_types": ["linear_attention", "full_attention"]},
            UnsupportedModel,
            "the nearest is Qwen3ForCausalLM, without layers of type linear_attention; known",
        ),
        (
            {
                "architectures": ["Qwen3NextForCausalLM"],
                "num_experts": 512,
                "layer_types": ["linear_attention", "full_attention"],
            },
            UnsupportedModel,
            "the nearest is Qwen3MoeForCausalLM, without layers of type linear_attention; known",
        ),
        (
            {
                "architectures": ["Llama4ForCausalLM"],
                "num_local_experts": 16,
                "layer_types": ["chunked_attention", "full_attention"],
            },
            UnsupportedModel,
            "experts (num_local_experts=16) or layers of type chunked_attention; other architectures have experts;",
        ),
        (
            {"architectures": ["Gemma3nForConditionalGeneration"], "text_config": {"altup_num_inputs": 4}},
            UnsupportedModel,
            "is Gemma3ForConditionalGeneration, without several residual streams (altup_num_inputs=4); known",
        ),
        (
            {"architectures": ["Gemma3nForCausalLM"], "laurel_rank": 64, "num_kv_shared_layers": 10},
            UnsupportedModel,
            "the nearest is Gemma3ForCausalLM, without residuals of low rank (laurel_rank=64); known",
        ),
        (
            {"architectures": ["FalconMambaForCausalLM"], "state_size": 16},
            UnsupportedModel,
            "the nearest is FalconForCausalLM, without recurrent layers (state_size=16); known",
        ),
        *(
            (
                {
                    "architectures": ["GraniteMoeHybridForCausalLM"],
                    "num_local_experts": num_experts,
                    key: ["attention", kind],
                    "mamba_d_state": 256,
                },
                UnsupportedModel,
                f"the nearest is GraniteMoeForCausalLM{without}; known",
            )
            for key in ("layer_types", "layers_block_type")
            for num_experts, kind, without in (
                (0, "attention", ""),
                (64, "attention", ""),
                (0, "mamba", ", without recurrent layers (mamba_d_state=256) or layers of type mamba"),
            )
        ),
        (
            {"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True},
            UnsupportedModel,
            "none that is known has an encoder (is_encoder_decoder); known",
        ),
        (
            {"architectures": ["MllamaForConditionalGeneration"], "cross_attention_layers": [3]},
            UnsupportedModel,
            "the nearest is LlamaForCausalLM, without cross-attention (cross_attention_layers); known",
        ),
        (
            {"architectures": ["Phi3SmallForCausalLM"], "blocksparse_block_size": 64},
            UnsupportedModel,
            "Phi3ForCausalLM, without block-sparse attention (blocksparse_block_size=64); known",
        ),
        ({"architectures": ["BertForMaskedLM"]}, UnsupportedModel, "models of this name generate no text; known"),
        (
            {"architectures": ["Qwen3Model"]},
            UnsupportedModel,
            "models of this name generate no text; the nearest is Qwen3ForCausalLM; known",
        ),
        (
            {"architectures": ["DeepseekV3ForCausalLM"], "n_routed_experts": 256, "kv_lora_rank": 512},
            UnsupportedModel,
            "none that is known has latent attention (kv_lora_rank=512); known",
        ),
        (
            {"architectures": None, "model_type": "smollm3_moe"},
            UnsupportedModel,
            "model_type 'smollm3_moe'; the nearest is SmolLM3ForCausalLM, without experts; other architectures",
        ),
        ({"architectures": ["MambaForCausalLM"]}, UnsupportedModel, "none that is known has recurrent layers; known"),
        ({"architectures": None, "model_type": "mamba"}, UnsupportedModel, "no architecture beside model_type 'mamba'"),
        ({"architectures": None, "model_type": None}, UnsupportedModel, "names no architecture; known"),
        ({"hidden_act": "gelu"}, UnsupportedModel, "known: silu"),
        (
            {"rope_parameters": {"linear_attention": {}}},
            UnsupportedModel,
            "rope parameters of linear_attention are not",
        ),
        ({"rope_scaling": {"rope_type": "ntk"}}, UnsupportedModel, "known: default, linear"),
        ({"rope_scaling": {"rope_type": "su"}}, UnsupportedModel, "rope type 'su' is not implemented; known: default"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": None, "long_factor": [1.0] * 32}, "rope_theta": 1.0},
            CorruptCheckpoint,
            "rope type 'yarn' needs a rope_theta above 1",
        ),
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}},
            UnsupportedModel,
            "'longrope' is not implemented for this architecture",
        ),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, CorruptCheckpoint, "low_freq_factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, CorruptCheckpoint, "factor, found '2'"),
        ({"partial_rotary_factor": 0.5}, UnsupportedModel, "partial_rotary_factor=0.5"),
        (
            {"quantization_config": {"quant_method": "fbgemm_fp8"}},
            UnsupportedModel,
            "quant_method='fbgemm_fp8' .* known: awq, gptq",
        ),
        ({"num_key_value_heads": 5}, CorruptCheckpoint, "no multiple of num_key_value_heads 5"),
        ({"head_dim": None, "hidden_size": 2050}, CorruptCheckpoint, "hidden_size 2050"),
        ({"head_dim": 63}, CorruptCheckpoint, "head_dim 63 is odd"),
        ({"architectures": 5}, CorruptCheckpoint, "architectures must be a list, found 5"),
        ({"rope_scaling": [1]}, CorruptCheckpoint, "rope_scaling must be an object"),
        ({"rope_scaling": None, "rope_parameters": [1]}, CorruptCheckpoint, "rope_parameters must be an object"),
        ({"rms_norm_eps": "x"}, CorruptCheckpoint, "rms_norm_eps must be a number"),
        ({"rms_norm_eps": float("nan")}, CorruptCheckpoint, "rms_norm_eps must be a number"),
        ({"rope_theta": float("inf")}, CorruptCheckpoint, "for rope_theta, found inf"),
        ({"num_hidden_layers": 10**9}, CorruptCheckpoint, "num_hidden_layers"),
        ({"attention_bias": "no"}, CorruptCheckpoint, "attention_bias must be true or false"),
        ({"quantization_config": "awq"}, CorruptCheckpoint, "quantization_config must be an object"),
        ({"num_hidden_layers": None}, CorruptCheckpoint, "num_hidden_layers"),
        ({"intermediate_size": 0}, CorruptCheckpoint, "intermediate_size must be an integer above 0"),
        ({"torch_dtype": "float8_e4m3fn"}, UnsupportedModel, "float8_e4m3fn"),
    ],
)
def test_refused(changes: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said.replace("(", r"\(").replace(")", r"\)")):
        ModelConfig.from_hf(changed("Llama-3.2-1B", **changes))


@pytest.mark.parametrize("architecture", ["Gemma2", "Gemma3", "Olmo3", "Cohere2"])
def test_a_null_window_is_refused_where_layers_have_one(architecture: str) -> None:
    name = {"architectures": [f"{architecture}ForCausalLM"], "hidden_activation": None, "hidden_act": None}
    config = changed("gemma-3-1b", **name, sliding_window_pattern=None) | {"sliding_window": None}
    with pytest.raises(CorruptCheckpoint, match="sliding_window is null, and layers of this architecture have one"):
        ModelConfig.from_hf(config)
    full = {"layer_types": ["full_attention"] * 26}
    assert set(ModelConfig.from_hf({**config, **full}).layer_windows) == {None}


STEERING = "\x1b[2J" + "A" * 3000


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": [STEERING]},
        {"architectures": [f"{STEERING}{i}" for i in range(1000)]},
        {"architectures": [], "model_type": STEERING},
        {"architectures": ["FooForCausalLM"], "layer_types": [f"{STEERING}{i}" for i in range(1000)]},
        {"architectures": ["FooForCausalLM"], "num_experts": 10**1000},
        {"partial_rotary_factor": STEERING},
        {"architectures": ["Gemma3ForCausalLM"], "rope_parameters": {f"{STEERING}{i}": {} for i in range(1000)}},
        {"architectures": ["Gemma3ForCausalLM"], "layer_types": [f"{STEERING}{i}" for i in range(16)]},
        {"per_layer_config": {"0": {STEERING: 1}}},
    ],
)
def test_what_a_config_says_is_quoted_in_a_short_printable_line(changes: dict[str, Any]) -> None:
    with pytest.raises(SetupError) as told:
        ModelConfig.from_hf(changed("Llama-3.2-1B", **changes))
    assert str(told.value).isprintable()
    assert len(str(told.value).split("known:")[0]) < 600


def test_layer_types_must_fit() -> None:
    with pytest.raises(CorruptCheckpoint, match="2 entries for 24 layers"):
        ModelConfig.from_hf(changed("Qwen2.5-0.5B-Instruct", layer_types=["full_attention"] * 2))
    with pytest.raises(CorruptCheckpoint, match="no sliding_window is in use"):
        ModelConfig.from_hf(changed("Qwen2.5-0.5B-Instruct", layer_types=["sliding_attention"] * 24))
    with pytest.raises(UnsupportedModel, match="chunked_attention"):
        ModelConfig.from_hf(changed("Qwen2.5-0.5B-Instruct", layer_types=["chunked_attention"] * 24))


ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 512, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0},
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
}


def tiny(architecture: str, rope_type: str, spelling: str) -> dict[str, Any]:
    return {
        "architectures": [f"{architecture}ForCausalLM"],
        "attention_bias": False,
        "eos_token_id": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "hidden_size": 32,
        "intermediate_size": 48,
        "layer_types": ["full_attention", "sliding_attention"] if architecture == "Qwen3" else None,
        "max_position_embeddings": 1024,
        "max_window_layers": 1,
        "mlp_bias": False,
        "model_type": "tiny",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 1.0,
        "quantization_config": None,
        "original_max_position_embeddings": None,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        spelling: {"rope_type": rope_type, "truncate": True, **ROPES[rope_type]},
        "sliding_window": 16,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "use_sliding_window": True,
        "vocab_size": 64,
    }


ODD_VALUES = [
    None,
    -1,
    0,
    1,
    1.5,
    "x",
    [],
    ["x"],
    [[]],
    {},
    {"x": {}},
    True,
    10**30,
    10**400,
    float("nan"),
    float("inf"),
    1e-300,
]


def loads_or_is_refused(config: dict[str, Any]) -> None:
    try:
        read = ModelConfig.from_hf(config)
    except SetupError:
        return
    frequencies, factor = inverse_frequencies(*read.fixed_for(None).ropes[0])
    assert torch.isfinite(frequencies).all()
    assert factor == factor


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0, -1, 1e-300, "1", True])
@pytest.mark.parametrize("name", ["rms_norm_eps", "rope_theta", "factor"])
def test_numbers_that_would_make_nan_are_refused_by_name(name: str, value: object) -> None:
    config = tiny("Llama", "llama3", "rope_scaling")
    (config["rope_scaling"] if name == "factor" else config)[name] = value
    with pytest.raises(CorruptCheckpoint, match=f"{name}.*found {shown(value)}"):
        ModelConfig.from_hf(config)


@pytest.mark.parametrize("rope_type", ROPES)
@pytest.mark.parametrize("architecture", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_any_odd_value_is_refused_or_loads(architecture: str, rope_type: str) -> None:
    for spelling in ("rope_scaling", "rope_parameters"):
        sound = tiny(architecture, rope_type, spelling)
        ModelConfig.from_hf(sound)
        for value in ODD_VALUES:
            for key in sound:
                loads_or_is_refused({**sound, key: value})
            for key in (*sound[spelling], "rope_theta", "attention_factor", "type", "mscale_all_dim"):
                loads_or_is_refused({**sound, spelling: {**sound[spelling], key: value}})


@pytest.mark.parametrize(
    ("rope_type", "changes", "context"),
    [
        ("default", {}, 1024),
        ("linear", {}, 4096),
        ("dynamic", {}, 4096),
        ("yarn", {}, 2048),
        ("yarn", {"original_max_position_embeddings": None}, 1024),
        ("llama3", {}, 1024),
    ],
)
def test_longest_context_of_each_rope_type(rope_type: str, changes: dict[str, Any], context: int) -> None:
    config = tiny("Llama", rope_type, "rope_scaling")
    config["rope_scaling"] |= changes
    assert ModelConfig.from_hf(config).max_context == context


@pytest.mark.parametrize(("rotary_dim", "head_dim"), [(58, 100), (14, 50), (64, 256), (100, 100)])
def test_as_many_numbers_turn_as_a_gpt_j_says(rotary_dim: int, head_dim: int) -> None:
    """This holds even if their share of a head is rounded down."""
    given = {"n_embd": head_dim, "n_head": 1, "n_layer": 1, "n_positions": 64, "vocab_size": 64}
    config = ModelConfig.from_hf({"architectures": ["GPTJForCausalLM"], "rotary_dim": rotary_dim, **given})
    ((rope, size),) = config.ropes
    assert (rope.rotary_dim or size) == rotary_dim


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma3ForCausalLM", "Gemma4ForCausalLM"])
def test_more_layers_than_any_model_has_are_refused_at_once(architecture: str) -> None:
    """Before a list of so many is made."""
    given = {"architectures": [architecture], "num_hidden_layers": 2**31 - 1, "hidden_size": 64}
    with pytest.raises(CorruptCheckpoint, match=r"num_hidden_layers.*4096.*2147483647"):
        ModelConfig.from_hf({**given, "num_attention_heads": 4, "max_position_embeddings": 128, "vocab_size": 10})
