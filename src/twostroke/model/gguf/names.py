"""Names in GGUF files of tensors in Hugging Face checkpoints: one table for all architectures.

    model.layers.7.self_attn.q_proj.weight              ─►  blk.7.attn_q.weight
    gpt_neox.layers.7.attention.query_key_value.bias    ─►  blk.7.attn_qkv.bias

Deviating names of an architecture are in `architectures.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

ModuleNames = Mapping[str, str | tuple[str, ...]]
"""Modules of GGUF files by those of checkpoints. Among several names, the first that a file has is used."""

_TOP: ModuleNames = {
    "model.embed_tokens": "token_embd",
    "gpt_neox.embed_in": "token_embd",
    "transformer.word_embeddings": "token_embd",
    "transformer.word_embeddings_layernorm": "token_embd_norm",
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "model.norm": "output_norm",
    "model.final_layernorm": "output_norm",
    "gpt_neox.final_layer_norm": "output_norm",
    "transformer.ln_f": "output_norm",
    "lm_head": "output",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
}

_OF_A_LAYER: ModuleNames = {
    "input_layernorm": "attn_norm",
    "attention_layernorm": "attn_norm",
    "ln_1": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attention.query_key_value": "attn_qkv",
    "attention.query_key_value": "attn_qkv",
    "attn.c_attn": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.dense": "attn_output",
    "self_attention.dense": "attn_output",
    "attention.dense": "attn_output",
    "attn.c_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "self_attn.query_layernorm": "attn_q_norm",
    "self_attn.key_layernorm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "feedforward_layernorm": "ffn_norm",
    "ln_2": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.dense_h_to_4h": "ffn_up",
    "mlp.c_fc": "ffn_up",
    "mlp.fc1": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.dense_4h_to_h": "ffn_down",
    "mlp.c_proj": "ffn_down",
    "mlp.fc2": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate.wg": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "mlp.shared_mlp.gate_proj": "ffn_gate_shexp",
    "mlp.shared_mlp.up_proj": "ffn_up_shexp",
    "mlp.shared_mlp.down_proj": "ffn_down_shexp",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "router.proj": "ffn_gate_inp",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
}

_WHOLE = {
    "layer_scalar": "layer_output_scale.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.moe_statics.e_score_correction_bias": "exp_probs_b.bias",
    "block_sparse_moe.e_score_correction_bias": "exp_probs_b.bias",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "self_attn.sinks": "attn_sinks.weight",
}
"""Tensors of a layer that do not belong to a module."""

_OF_AN_EXPERT = {
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
    "w1": "ffn_gate",
    "w3": "ffn_up",
    "w2": "ffn_down",
}
_EXPERT = re.compile(r"(?:(?:mlp|block_sparse_moe)\.)?experts\.(?P<expert>\d+)\.(?P<part>\w+)\.(?P<kind>\w+)")

_LAYER = re.compile(r"(?:model\.layers|gpt_neox\.layers|transformer\.h)\.(?P<layer>\d+)\.(?P<module>.+)")


def gguf_names(name: str, own_modules: ModuleNames | None = None) -> tuple[str, ...]:
    """Return the names that GGUF files may give a checkpoint's tensor, by priority; empty if none is known.

    Args:
        name: name in the checkpoint.
        own_modules: deviating module names of an architecture.

    >>> gguf_names("transformer.h.0.ln_1.bias"), gguf_names("model.layers.0.mlp.act_fn.beta")
    (('blk.0.attn_norm.bias',), ())
    """
    place = of_layer(name)
    if place is not None and place[1] in _WHOLE:
        return (f"blk.{place[0]}.{_WHOLE[place[1]]}",)
    expert = None if place is None else _EXPERT.fullmatch(place[1])
    if place is not None and expert is not None:
        part = _OF_AN_EXPERT[expert["part"]]
        return (f"blk.{place[0]}.{part}.{expert['expert']}.{expert['kind']}",)
    module, _, kind = name.rpartition(".")
    found = _LAYER.fullmatch(module)
    prefix = "" if found is None else f"blk.{found['layer']}."
    known = _TOP if found is None else {**_OF_A_LAYER, **(own_modules or {})}
    theirs = known.get(module if found is None else found["module"], ())
    return tuple(f"{prefix}{one}.{kind}" for one in ((theirs,) if isinstance(theirs, str) else theirs))


def gguf_name(name: str, own_modules: ModuleNames | None = None) -> str:
    """Return the name that GGUF files give a checkpoint's tensor.

    >>> gguf_name("model.layers.7.self_attn.q_proj.weight")
    'blk.7.attn_q.weight'
    """
    return gguf_names(name, own_modules)[0]


def stack_of_experts(name: str) -> tuple[str, int] | None:
    """Return the GGUF stack that holds an expert's tensor, and the expert's index; None: not an expert's tensor.

    >>> stack_of_experts("model.layers.7.mlp.experts.3.up_proj.weight")
    ('blk.7.ffn_up_exps.weight', 3)
    """
    place = of_layer(name)
    expert = None if place is None else _EXPERT.fullmatch(place[1])
    if place is None or expert is None:
        return None
    return f"blk.{place[0]}.{_OF_AN_EXPERT[expert['part']]}_exps.{expert['kind']}", int(expert["expert"])


def of_layer(name: str) -> tuple[int, str] | None:
    """Return the layer of a checkpoint's tensor, and the tensor's name within it; None: it does not belong to a layer.

    >>> of_layer("model.layers.7.mlp.act_fn.alpha_p")
    (7, 'mlp.act_fn.alpha_p')
    """
    found = _LAYER.fullmatch(name)
    return None if found is None else (int(found["layer"]), found["module"])
