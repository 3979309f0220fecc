"""Small random models and tokenizers as Hugging Face folders, written once per test session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from oracle.naive_model import config_class, model_class, randomize_vectors

VOCAB_SIZE = 320
"""256 bytes, a few merges and special tokens; the embedding has some rows more, as real models do."""

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"num_attention_heads": 4, "num_key_value_heads": 2}),
    "mistral": ("Mistral", {"num_attention_heads": 4, "num_key_value_heads": 1, "sliding_window": 24}),
    "ministral": (
        "Ministral",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    ),
    "ministral3": (
        "Ministral3",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_hidden_layers": 2,
            "pad_token_id": 0,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 10.0,
                "original_max_position_embeddings": 64,
                "llama_4_scaling_beta": 0.3,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
    ),
    "seed_oss": ("SeedOss", {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "mlp_bias": True}),
    "gemma": (
        "Gemma",
        {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32, "num_hidden_layers": 2},
    ),
    "gemma2": (
        "Gemma2",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "sliding_window": 24,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 10.0,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "num_hidden_layers": 4,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gemma4": (
        "Gemma4",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "head_dim": 16,
            "global_head_dim": 32,
            "num_hidden_layers": 5,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "sliding_window": 24,
            "layer_types": [*["sliding_attention"] * 2, "full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "gemma4_experts": (
        "Gemma4",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "head_dim": 16,
            "global_head_dim": 32,
            "num_hidden_layers": 3,
            "hidden_size_per_layer_input": 0,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 64,
        },
    ),
    "granite": (
        "Granite",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "embedding_multiplier": 1.7,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.6,
            "logits_scaling": 0.8,
        },
    ),
    "mixtral": (
        "Mixtral",
        {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "num_local_experts": 4},
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_hidden_layers": 2,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 96,
        },
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 64,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "olmoe": (
        "Olmoe",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_hidden_layers": 2,
            "num_experts": 6,
            "num_experts_per_tok": 2,
        },
    ),
    "granite_moe": (
        "GraniteMoe",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_hidden_layers": 2,
            "num_local_experts": 4,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.6,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_hidden_layers": 2,
            "sliding_window": 24,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 10.0,
                "original_max_position_embeddings": 64,
                "truncate": False,
            },
        },
    ),
    "glm4_moe": (
        "Glm4Moe",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_hidden_layers": 3,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 64,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
        },
    ),
    "minimax_m2": (
        "MiniMaxM2",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_hidden_layers": 2,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "rotary_dim": 8,
        },
    ),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_hidden_layers": 2,
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_intermediate_size": 64,
        },
    ),
    "dots1": (
        "Dots1",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_hidden_layers": 3,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 64,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": True,
            "first_k_dense_replace": 1,
            "sliding_window": 24,
            "max_window_layers": 2,
        },
    ),
    "hunyuan_v1_moe": (
        "HunYuanMoEV1",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_hidden_layers": 2,
            "num_experts": 8,
            "moe_topk": 3,
        },
    ),
    "olmo2": ("Olmo2", {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}),
    "olmo3": (
        "Olmo3",
        {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4, "sliding_window": 24},
    ),
    "exaone4": (
        "Exaone4",
        {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4, "sliding_window": 24},
    ),
    "smollm3": ("SmolLM3", {"num_attention_heads": 4, "num_key_value_heads": 2, "no_rope_layers": [1, 0, 1]}),
    "cohere2": (
        "Cohere2",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_hidden_layers": 4,
            "sliding_window": 24,
            "pad_token_id": 0,
        },
    ),
    "starcoder2": ("Starcoder2", {"num_attention_heads": 4, "num_key_value_heads": 1, "sliding_window": 24}),
    "phi3": (
        "Phi3",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "partial_rotary_factor": 0.75,
            "pad_token_id": 0,
        },
    ),
    "glm": (
        "Glm",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_hidden_layers": 2,
            "pad_token_id": 0,
        },
    ),
    "glm4": ("Glm4", {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}),
    "qwen2": (
        "Qwen2",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "use_sliding_window": True,
            "sliding_window": 24,
            "max_window_layers": 2,
        },
    ),
    "qwen3": ("Qwen3", {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}),
    "phi": ("Phi", {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}),
    "gpt_neox": ("GPTNeoX", {"num_attention_heads": 4, "num_hidden_layers": 2}),
    "stablelm": (
        "StableLm",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_hidden_layers": 2,
            "use_qkv_bias": True,
            "qk_layernorm": True,
        },
    ),
    "cohere": (
        "Cohere",
        {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "use_qk_norm": True},
    ),
    "arcee": ("Arcee", {"num_attention_heads": 4, "num_key_value_heads": 2}),
    "nemotron": ("Nemotron", {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}),
    "helium": ("Helium", {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "num_hidden_layers": 2}),
    "apertus": (
        "Apertus",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    ),
    "falcon": (
        "Falcon",
        {
            "num_attention_heads": 4,
            "num_kv_heads": 2,
            "new_decoder_architecture": True,
            "ffn_hidden_size": 96,
            "num_hidden_layers": 2,
        },
    ),
    "bloom": ("Bloom", {"num_attention_heads": 12, "hidden_size": 96, "num_hidden_layers": 2}),
    "gptj": ("GPTJ", {"num_attention_heads": 4, "rotary_dim": 8, "n_inner": 96, "num_hidden_layers": 2}),
    "opt": ("OPT", {"num_attention_heads": 4, "ffn_dim": 96, "init_std": 0.15, "num_hidden_layers": 2}),
    "gpt2": ("GPT2", {"num_attention_heads": 4, "n_inner": 96, "num_hidden_layers": 2}),
}
"""One of each family, by what is special about it: GQA, MQA with a window, windows in some layers, scales on q by
position, biases on q, k, v and the MLP, wide norms with 1 added, soft caps, two kinds of rotation, heads by
kind of layer with shared K and V and inputs of tokens to layers, multipliers, norms
at outputs and over all heads without and with windows in some layers, norms at outputs and over each head, a layer
without rotation, parallel blocks, layer norms without a gate, heads rotated in part or by neighbours without and with
norms around, MHA with windows in some layers, own head_dim with qk-norm; then exact GELU with a bias on logits, q, k
and v by KV head beside two norms that read the residual stream, biases on q, k and v alone, layer norms of each head,
squared ReLU, layer norms with 1 added, wide norms, a learned activation, one KV head for several in one tensor,
ALiBi for heads that are no power of two, keys of its own, learned positions, and ReLU with positions that begin at row
2.

Every suite that is about families takes them from here (tests/invariance/test_every_family.py has a small one of each).
"""


def write_tokenizer(folder: Path, num_characters: int = 256) -> None:
    """A byte-level BPE without merges: every text is its bytes, so every sequence of ids below 256 is a text. With
    fewer characters, for a smaller vocabulary, some texts have no ids."""
    alphabet = sorted(ByteLevel.alphabet())[:num_characters]
    vocab = {piece: i for i, piece in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        '{"eos_token": "<|end|>", "tokenizer_class": "PreTrainedTokenizerFast"}'
    )


def write_random_model(folder: Path, family: str, *, dtype: str = "float32", seed: int = 0, **fields: Any) -> Path:
    """Random weights, norms and biases; wide enough that outputs are peaked and depend on every position."""
    kind, shape = SHAPES[family]
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "max_position_embeddings": 640,
        "initializer_range": 0.15,
        "bos_token_id": None,
        "eos_token_id": 256,
        "pad_token_id": None,
    }
    config = config_class(kind)(dtype=dtype, **(sizes | shape | fields))
    torch.manual_seed(seed)
    model = model_class(kind)(config)
    randomize_vectors(model, kind)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


class RandomModels(dict[str, Path]):
    """Folders of random float32 models, by family."""

    def __init__(self, new_folder: Callable[[str], Path]) -> None:
        """Takes what makes a folder of a name."""
        super().__init__()
        self._new_folder = new_folder

    def __missing__(self, family: str) -> Path:
        """Write the model."""
        if family not in SHAPES:
            raise KeyError(family)
        self[family] = write_random_model(self._new_folder(family), family)
        return self[family]

    def get(self, family: str, default: Any = None) -> Any:
        """Return the folder of a family; what is none has the default."""
        return self[family] if family in SHAPES else default
