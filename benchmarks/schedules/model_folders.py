"""Tiny random models as Hugging Face folders: a dense one, and one for each kind of router."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.decoders import ByteLevel

from twostroke.errors import SetupError

VOCAB_SIZE = 320
"""Bytes, a merge, an end, and rows of the embedding without a token, as real models have them."""
END = 257
WINDOW = 24
"""Tokens that half of the layers see, in families with windows."""
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 640,
    "initializer_range": 0.15,  # answers depend on every position
    "bos_token_id": None,
    "eos_token_id": END,
    "pad_token_id": None,
}
_WINDOWS = ["sliding_attention", "full_attention"]
_EIGHT = {"moe_intermediate_size": 64, "num_experts_per_tok": 3}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {"head_dim": 32, "num_hidden_layers": 3}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "qwen2_moe": ("Qwen2Moe", {**_EIGHT, "num_experts": 6, "shared_expert_intermediate_size": 96}),
    "glm4_moe": (
        "Glm4Moe",
        {
            **_EIGHT,
            "num_hidden_layers": 3,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "layer_types": _WINDOWS,
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
    "gemma4": (
        "Gemma4",
        {
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "head_dim": 16,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 0,
            "sliding_window": WINDOW,
            "layer_types": _WINDOWS,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 64,
        },
    ),
}
"""Name in transformers, and sizes beside those of all."""


def write_random_folder(folder: Path, family: str, **fields: Any) -> Path:
    """Write a model with random weights, norms and biases, and a tokenizer of bytes.

    Args:
        folder: for the files.
        family: of `FAMILIES`.
        fields: more fields of its config.

    Raises:
        SetupError: transformers is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise SetupError("random models need transformers (pip install 'twostroke[dev]').") from error
    kind, shape = FAMILIES[family]
    config_class = getattr(transformers, f"{kind}TextConfig" if kind == "Gemma4" else f"{kind}Config")
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config_class(**{**_SIZES, **shape, **fields}))
    _randomize_vectors(model)
    transformers.utils.logging.disable_progress_bar()
    model.to(torch.float32).save_pretrained(folder)
    write_byte_tokenizer(folder)
    return folder


@torch.no_grad()
def _randomize_vectors(model: Any) -> None:
    """Give norms, biases, sinks and a router's scales random numbers; transformers starts with ones and zeros."""
    for name, vector in (*model.named_parameters(), *model.named_buffers()):
        if "norm" in name or name.endswith(("router.scale", "per_expert_scale", "layer_scalar")):
            vector.uniform_(0.5, 1.5)
            if name.startswith("model.layers") and "q_norm" in name:
                vector.mul_(0.3)  # some families scale scores by these alone
        elif name.endswith("e_score_correction_bias"):
            vector.uniform_(-0.3, 0.3)
        elif name.endswith(("bias", "sinks")):
            vector.normal_(0, 0.5)


def write_byte_tokenizer(folder: Path) -> None:
    """Write a byte-level BPE with one merge: the ids below 256 are bytes, and `END` ends a text."""
    vocab = {piece: i for i, piece in enumerate((*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        '{"eos_token": "<|end|>", "tokenizer_class": "PreTrainedTokenizerFast"}', encoding="utf-8"
    )
