"""Names of config.json's keys in GGUF metadata, so that an error about a file's settings names the keys of the file."""

from __future__ import annotations

import re
from collections.abc import Mapping

from twostroke.config.architecture_traits import ArchitectureTraits

_OWN: Mapping[str, str] = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "rope_theta": "rope.freq_base",
    "partial_rotary_factor": "rope.dimension_count",
    "sliding_window": "attention.sliding_window",
    "layer_types": "attention.sliding_window_pattern",
    "num_nextn_predict_layers": "nextn_predict_layers",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "moe_num_shared_experts": "expert_shared_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "moe_layer_start_index": "leading_dense_block_count",
    "moe_layer_interval": "interleave_moe_layer_step",
}


def in_own_keys(message: str, prefix: str, traits: ArchitectureTraits, numbers: Mapping[str, str]) -> str:
    """Return an error about a config.json with the keys that GGUF files have for the same settings.

    Args:
        message: the error's message.
        prefix: architecture in the file, which its keys begin with.
        traits: traits of the architecture.
        numbers: further keys of the architecture's files (without the prefix), and their keys in config.json.

    >>> in_own_keys("config.json: n_group 3 is more than hidden_size 2.", "glm4moe", ArchitectureTraits(), {})
    'glm4moe.expert_group_count 3 is more than glm4moe.embedding_length 2.'
    """
    own = {**_OWN, **{theirs: key for key, theirs in numbers.items()}}
    own[traits.epsilon_key] = (
        "attention.layer_norm_rms_epsilon" if traits.norm == "rms" else "attention.layer_norm_epsilon"
    )
    if traits.experts is not None:
        own |= {traits.experts.num_experts_key: "expert_count", traits.experts.chosen_key: "expert_used_count"}
    names = "|".join(map(re.escape, own))
    found = re.sub(rf"\b({names})\b", lambda match: f"{prefix}.{own[match[1]]}", message)
    return found.removeprefix("config.json: ").replace("config.json", "the metadata")
