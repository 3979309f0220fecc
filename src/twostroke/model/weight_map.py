"""Checkpoint names to ours: one table per architecture.

A table maps our module to the checkpoint's module, or to several whose rows are concatenated when they are loaded.
`{i}` is the layer and `{e}` an expert; `.weight` and `.bias` are appended.
"""

from __future__ import annotations

from collections.abc import Mapping

NameTable = Mapping[str, str | tuple[str, ...]]

LLAMA: NameTable = {
    "embedding": "model.embed_tokens",
    "layers.{i}.attention_norm": "model.layers.{i}.input_layernorm",
    "layers.{i}.qkv": (
        "model.layers.{i}.self_attn.q_proj",
        "model.layers.{i}.self_attn.k_proj",
        "model.layers.{i}.self_attn.v_proj",
    ),
    "layers.{i}.output": "model.layers.{i}.self_attn.o_proj",
    "layers.{i}.mlp_norm": "model.layers.{i}.post_attention_layernorm",
    "layers.{i}.gate_up": ("model.layers.{i}.mlp.gate_proj", "model.layers.{i}.mlp.up_proj"),
    "layers.{i}.down": "model.layers.{i}.mlp.down_proj",
    "norm": "model.norm",
    "lm_head": "lm_head",
}
"""Names of Llama, Mistral and Qwen2."""

QWEN3: NameTable = {
    **LLAMA,
    "layers.{i}.q_norm": "model.layers.{i}.self_attn.q_norm",
    "layers.{i}.k_norm": "model.layers.{i}.self_attn.k_norm",
}

PHI3: NameTable = {
    **LLAMA,
    "layers.{i}.qkv": "model.layers.{i}.self_attn.qkv_proj",
    "layers.{i}.gate_up": "model.layers.{i}.mlp.gate_up_proj",
}

GLM: NameTable = {**LLAMA, "layers.{i}.gate_up": "model.layers.{i}.mlp.gate_up_proj"}

GLM4: NameTable = {
    **GLM,
    "layers.{i}.attention_out_norm": "model.layers.{i}.post_self_attn_layernorm",
    "layers.{i}.mlp_out_norm": "model.layers.{i}.post_mlp_layernorm",
}

STARCODER2: NameTable = {
    **LLAMA,
    "layers.{i}.up": "model.layers.{i}.mlp.c_fc",
    "layers.{i}.down": "model.layers.{i}.mlp.c_proj",
}

OLMO2: NameTable = {
    **QWEN3,
    "layers.{i}.attention_out_norm": "model.layers.{i}.post_attention_layernorm",
    "layers.{i}.mlp_out_norm": "model.layers.{i}.post_feedforward_layernorm",
}
"""Norms after attention and MLP: OLMo 2, OLMo 3 and EXAONE 4."""

GEMMA2: NameTable = {**OLMO2, "layers.{i}.mlp_norm": "model.layers.{i}.pre_feedforward_layernorm"}
"""Norms before and after attention and MLP: Gemma 2 and 3."""

GEMMA4: NameTable = {
    **GEMMA2,
    "layers.{i}.q": "model.layers.{i}.self_attn.q_proj",
    "layers.{i}.qk": ("model.layers.{i}.self_attn.q_proj", "model.layers.{i}.self_attn.k_proj"),
    "layers.{i}.whole": "model.layers.{i}",
    "token_inputs": "model.embed_tokens_per_layer",
    "token_inputs_up": "model.per_layer_model_projection",
    "token_inputs_norm": "model.per_layer_projection_norm",
    "layers.{i}.input_gate": "model.layers.{i}.per_layer_input_gate",
    "layers.{i}.input_up": "model.layers.{i}.per_layer_projection",
    "layers.{i}.input_norm": "model.layers.{i}.post_per_layer_input_norm",
    "layers.{i}.router": "model.layers.{i}.router.proj",
    "layers.{i}.routing": "model.layers.{i}.router",
    "layers.{i}.experts.{e}.gate_up": (
        "model.layers.{i}.experts.{e}.gate_proj",
        "model.layers.{i}.experts.{e}.up_proj",
    ),
    "layers.{i}.experts.{e}.down": "model.layers.{i}.experts.{e}.down_proj",
    "layers.{i}.dense_out_norm": "model.layers.{i}.post_feedforward_layernorm_1",
    "layers.{i}.experts_norm": "model.layers.{i}.pre_feedforward_layernorm_2",
    "layers.{i}.experts_out_norm": "model.layers.{i}.post_feedforward_layernorm_2",
}

PHI: NameTable = {
    **LLAMA,
    "layers.{i}.output": "model.layers.{i}.self_attn.dense",
    "layers.{i}.up": "model.layers.{i}.mlp.fc1",
    "layers.{i}.down": "model.layers.{i}.mlp.fc2",
    "norm": "model.final_layernorm",
}

STABLELM: NameTable = {
    **LLAMA,
    "layers.{i}.q_norm": "model.layers.{i}.self_attn.q_layernorm",
    "layers.{i}.k_norm": "model.layers.{i}.self_attn.k_layernorm",
}

ARCEE: NameTable = {**LLAMA, "layers.{i}.up": "model.layers.{i}.mlp.up_proj"}
"""An MLP without a gate: Arcee and Nemotron."""

APERTUS: NameTable = {
    **QWEN3,
    "layers.{i}.attention_norm": "model.layers.{i}.attention_layernorm",
    "layers.{i}.mlp_norm": "model.layers.{i}.feedforward_layernorm",
    "layers.{i}.up": "model.layers.{i}.mlp.up_proj",
    "layers.{i}.activation": "model.layers.{i}.mlp.act_fn",
}

GPT_NEOX: NameTable = {
    "embedding": "gpt_neox.embed_in",
    "layers.{i}.attention_norm": "gpt_neox.layers.{i}.input_layernorm",
    "layers.{i}.qkv": "gpt_neox.layers.{i}.attention.query_key_value",
    "layers.{i}.output": "gpt_neox.layers.{i}.attention.dense",
    "layers.{i}.mlp_norm": "gpt_neox.layers.{i}.post_attention_layernorm",
    "layers.{i}.up": "gpt_neox.layers.{i}.mlp.dense_h_to_4h",
    "layers.{i}.down": "gpt_neox.layers.{i}.mlp.dense_4h_to_h",
    "norm": "gpt_neox.final_layer_norm",
    "lm_head": "lm_head",
}

FALCON: NameTable = {
    "embedding": "transformer.word_embeddings",
    "layers.{i}.attention_norm": "transformer.h.{i}.input_layernorm",
    "layers.{i}.qkv": "transformer.h.{i}.self_attention.query_key_value",
    "layers.{i}.output": "transformer.h.{i}.self_attention.dense",
    "layers.{i}.mlp_norm": "transformer.h.{i}.post_attention_layernorm",
    "layers.{i}.up": "transformer.h.{i}.mlp.dense_h_to_4h",
    "layers.{i}.down": "transformer.h.{i}.mlp.dense_4h_to_h",
    "norm": "transformer.ln_f",
    "lm_head": "lm_head",
}

BLOOM: NameTable = {**FALCON, "embedding_norm": "transformer.word_embeddings_layernorm"}

GPTJ: NameTable = {
    "embedding": "transformer.wte",
    "layers.{i}.attention_norm": "transformer.h.{i}.ln_1",
    "layers.{i}.qkv": (
        "transformer.h.{i}.attn.q_proj",
        "transformer.h.{i}.attn.k_proj",
        "transformer.h.{i}.attn.v_proj",
    ),
    "layers.{i}.output": "transformer.h.{i}.attn.out_proj",
    "layers.{i}.up": "transformer.h.{i}.mlp.fc_in",
    "layers.{i}.down": "transformer.h.{i}.mlp.fc_out",
    "norm": "transformer.ln_f",
    "lm_head": "lm_head",
}

GPT2: NameTable = {
    "embedding": "transformer.wte",
    "positions": "transformer.wpe",
    "layers.{i}.attention_norm": "transformer.h.{i}.ln_1",
    "layers.{i}.qkv": "transformer.h.{i}.attn.c_attn",
    "layers.{i}.output": "transformer.h.{i}.attn.c_proj",
    "layers.{i}.mlp_norm": "transformer.h.{i}.ln_2",
    "layers.{i}.up": "transformer.h.{i}.mlp.c_fc",
    "layers.{i}.down": "transformer.h.{i}.mlp.c_proj",
    "norm": "transformer.ln_f",
    "lm_head": "lm_head",
}

OPT: NameTable = {
    "embedding": "model.decoder.embed_tokens",
    "positions": "model.decoder.embed_positions",
    "layers.{i}.attention_norm": "model.decoder.layers.{i}.self_attn_layer_norm",
    "layers.{i}.qkv": (
        "model.decoder.layers.{i}.self_attn.q_proj",
        "model.decoder.layers.{i}.self_attn.k_proj",
        "model.decoder.layers.{i}.self_attn.v_proj",
    ),
    "layers.{i}.output": "model.decoder.layers.{i}.self_attn.out_proj",
    "layers.{i}.mlp_norm": "model.decoder.layers.{i}.final_layer_norm",
    "layers.{i}.up": "model.decoder.layers.{i}.fc1",
    "layers.{i}.down": "model.decoder.layers.{i}.fc2",
    "norm": "model.decoder.final_layer_norm",
    "lm_head": "lm_head",
}


def _experts(block: str, *, parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> NameTable:
    """Return the names of a router and its experts; `parts` are an expert's gate, up and down."""
    gate, up, down = (f"model.layers.{{i}}.{block}.experts.{{e}}.{part}" for part in parts)
    return {
        "layers.{i}.router": f"model.layers.{{i}}.{block}.gate",
        "layers.{i}.experts.{e}.gate_up": (gate, up),
        "layers.{i}.experts.{e}.down": down,
    }


def _shared_expert(module: str) -> NameTable:
    """Return the names of the expert that computes every token."""
    gate, up, down = (f"model.layers.{{i}}.{module}.{part}" for part in ("gate_proj", "up_proj", "down_proj"))
    return {"layers.{i}.shared.gate_up": (gate, up), "layers.{i}.shared.down": down}


MIXTRAL: NameTable = {**LLAMA, **_experts("block_sparse_moe", parts=("w1", "w3", "w2"))}

QWEN2_MOE: NameTable = {
    **LLAMA,
    **_experts("mlp"),
    **_shared_expert("mlp.shared_expert"),
    "layers.{i}.shared_gate": "model.layers.{i}.mlp.shared_expert_gate",
}

QWEN3_MOE: NameTable = {**QWEN3, **_experts("mlp")}
"""Names of Qwen 3's sparse models and OLMoE."""

GRANITE_MOE: NameTable = {
    **LLAMA,
    **_experts("block_sparse_moe"),
    "layers.{i}.router": "model.layers.{i}.block_sparse_moe.router.layer",
}

GLM4_MOE: NameTable = {
    **QWEN3_MOE,
    **_shared_expert("mlp.shared_experts"),
    "layers.{i}.routing": "model.layers.{i}.mlp.gate",
}
"""Names of GLM 4.5 and dots.llm1."""

MINIMAX_M2: NameTable = {
    **QWEN3,
    **_experts("block_sparse_moe", parts=("w1", "w3", "w2")),
    "layers.{i}.routing": "model.layers.{i}.block_sparse_moe",
}

ERNIE4_5_MOE: NameTable = {
    **LLAMA,
    **_experts("mlp"),
    **_shared_expert("mlp.shared_experts"),
    "layers.{i}.routing": "model.layers.{i}.mlp.moe_statics",
}

HUNYUAN_MOE: NameTable = {
    **LLAMA,
    **_experts("mlp"),
    **_shared_expert("mlp.shared_mlp"),
    "layers.{i}.router": "model.layers.{i}.mlp.gate.wg",
    "layers.{i}.q_norm": "model.layers.{i}.self_attn.query_layernorm",
    "layers.{i}.k_norm": "model.layers.{i}.self_attn.key_layernorm",
}

GPT_OSS: NameTable = {
    **LLAMA,
    **_experts("mlp"),
    "layers.{i}.router": "model.layers.{i}.mlp.router",
    "layers.{i}.attention": "model.layers.{i}.self_attn",
}


def checkpoint_names(table: NameTable, name: str) -> tuple[str, ...]:
    """Return the checkpoint's tensors that make up one of ours.

    >>> checkpoint_names(LLAMA, "layers.7.gate_up.weight")
    ('model.layers.7.mlp.gate_proj.weight', 'model.layers.7.mlp.up_proj.weight')
    """
    module, _, kind = name.rpartition(".")
    layer = expert = ""
    if module.startswith("layers."):
        _, layer, rest = module.split(".", 2)
        if rest.startswith("experts."):
            _, expert, rest = rest.split(".", 2)
            rest = f"experts.{{e}}.{rest}"
        module = f"layers.{{i}}.{rest}"
    theirs = table[module]
    parts = (theirs,) if isinstance(theirs, str) else theirs
    return tuple(f"{part.replace('{i}', layer).replace('{e}', expert)}.{kind}" for part in parts)
