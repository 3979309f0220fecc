"""Another value of a key of config.json that transformers reads changes our logits as theirs, or is refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from model_folders import SHAPES
from oracle import naive_model
from oracle.paged_driver import PagedDriver
from twostroke.config.model import ModelConfig
from twostroke.errors import TwostrokeError
from twostroke.kernels.dispatch import operators_for
from twostroke.model.checkpoint import read_model_config
from twostroke.model.decoder import Placement
from twostroke.model.loader import check_weights, load_model, open_weights

CPU = torch.device("cpu")
IDS = np.random.default_rng(0).integers(0, naive_model.SMALL["vocab_size"], 50).tolist()
MAX_ERROR = 1e-3
"""Limit for log-probabilities in float32; ignoring a key changes them by 0.1 and more."""

NUMBERS_OF_EXPERTS = (
    "num_experts num_local_experts n_routed_experts moe_num_experts num_experts_per_tok experts_per_token "
    "moe_topk moe_k top_k_experts"
)
SWITCHES = (
    "attention_bias mlp_bias use_bias bias enable_bias use_qkv_bias qkv_bias attention_out_bias use_qk_norm "
    "qk_layernorm tie_word_embeddings norm_topk_prob use_sliding_window is_causal enable_moe_block use_double_wide_mlp "
    "alibi attention_k_eq_v use_parallel_residual parallel_attn multi_query new_decoder_architecture "
    "slow_but_exact apply_residual_connection_post_layernorm scale_attn_weights scale_attn_by_inverse_layer_idx "
    "do_layer_norm_before _remove_final_layer_norm layer_norm_elementwise_affine add_cross_attention "
    "use_bidirectional_attention"
)
ACTIVATIONS = "hidden_act hidden_activation activation activation_function"
EPSILONS = "rms_norm_eps layer_norm_eps layer_norm_epsilon norm_epsilon norm_eps"
ROPE: Mapping[str, Any] = {
    "rope_theta": 500.0,
    "partial_rotary_factor": 0.5,
    "factor": 3.0,
    "attention_factor": 0.7,
    "beta_fast": 4.0,
    "beta_slow": 2.0,
    "mscale": 0.5,
    "mscale_all_dim": 0.5,
    "truncate": True,
    "original_max_position_embeddings": 128,
    "llama_4_scaling_beta": 0.5,
    "low_freq_factor": 1.5,
    "high_freq_factor": 3.0,
    "alpha": 4.0,
}
ROPES: tuple[Mapping[str, Any], ...] = (
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "mscale": 0.3, "beta_slow": 2.0},
    {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    {"rope_type": "none of these"},
)
VALUES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(NUMBERS_OF_EXPERTS.split(), (1, 3, 4)),
    **dict.fromkeys(SWITCHES.split(), (True, False)),
    **dict.fromkeys(
        ACTIVATIONS.split(), ("silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "relu", "relu2", "none of these")
    ),
    **dict.fromkeys(EPSILONS.split(), (0.1,)),
    "vocab_size": (150,),
    "hidden_size": (32, 96),
    "n_embd": (32,),
    **dict.fromkeys(("num_hidden_layers", "n_layer"), (1, 2, 4)),
    **dict.fromkeys(("num_attention_heads", "n_head"), (2, 8)),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), (1, 4)),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"), (32,)),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), (128, 2048)),
    "head_dim": (8, 32),
    "moe_intermediate_size": (32,),
    "shared_expert_intermediate_size": (32,),
    "n_shared_experts": (0, 2),
    "moe_num_shared_experts": (0, 1, 3),
    "n_group": (1, 2, 3),
    "topk_group": (1, 3, 9),
    "routed_scaling_factor": (0.5, 0.0),
    "first_k_dense_replace": (0, 2, 9),
    "decoder_sparse_step": (2, 0),
    "mlp_only_layers": ([0], [], [0, 99], [-1]),
    "moe_layer_start_index": (0, 2),
    "moe_layer_end_index": (0, 1),
    "moe_layer_interval": (2,),
    "moe_norm_min": (0.9,),
    "sliding_window": (7, None, 0),
    "max_window_layers": (0, 1),
    "sliding_window_pattern": (2,),
    "attention_chunk_size": (16,),
    "query_pre_attn_scalar": (5,),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), (2.5, None)),
    **dict.fromkeys(("logit_scale", "logits_scaling", "embedding_multiplier", "attention_multiplier"), (0.3,)),
    "residual_multiplier": (0.3,),
    "rotary_dim": (4, 16, 0),
    "clip_qkv": (0.5,),
    "swiglu_alpha": (1.0,),
    "swiglu_limit": (0.1,),
    "num_ln_in_parallel_attn": (1, 2),
    "no_rope_layers": ([0, 0, 0, 0], [1, 0]),
    "no_rope_layer_interval": (2,),
    "num_kv_shared_layers": (0, 1),
    "hidden_size_per_layer_input": (0, 16),
    "vocab_size_per_layer_input": (100,),
    "per_layer_config": ({"0": {"num_key_value_heads": 4}}, {"0": {"head_dim": 8}}, {"0": {"rms_norm_eps": 0.1}}),
    "word_embed_proj_dim": (32,),
    "rope_theta": (500.0,),
    "partial_rotary_factor": (0.5, 1.0),
    "original_max_position_embeddings": (64,),
    "rope_scaling": tuple({**rope, "rope_theta": 500.0} for rope in ROPES),
}
"""Other values, by key."""
EVERYWHERE = (
    "is_causal head_dim layer_types sliding_window num_experts num_local_experts num_experts_per_tok experts_per_token "
    "partial_rotary_factor rope_theta original_max_position_embeddings rope_scaling rope_parameters per_layer_config"
)
"""Keys that are read, or refused, without being among those of the class."""
WITHOUT_EFFECT = (
    # training, and what is asked of transformers
    "initializer_range init_std attention_dropout hidden_dropout resid_pdrop embd_pdrop attn_pdrop dropout layerdrop "
    "activation_dropout residual_dropout embedding_dropout classifier_dropout router_jitter_noise router_aux_loss_coef "
    "output_router_logits reorder_and_upcast_attn use_cache pretraining_tp "
    # parts that are not of this model: token ids, pooled outputs, further layers
    "pad_token_id bos_token_id eos_token_id eod_token_id sep_token_id image_token_id summary_type summary_use_proj "
    "summary_activation summary_proj_to_labels summary_first_dropout num_mtp_layers num_nextn_predict_layers "
    # keys of every config of transformers, about other kinds of models
    "architectures model_type dtype transformers_version chunk_size_feed_forward id2label label2id is_decoder "
    "is_encoder_decoder output_attentions output_hidden_states problem_type return_dict"
)


def written(family: str) -> tuple[str, dict[str, Any]]:
    """Return transformers' kind of a family, and the config.json of a small model."""
    kind, shape = SHAPES[family]
    changes = {**naive_model.SMALL, **shape}
    if "vocab_size_per_layer_input" in shape:
        changes["vocab_size_per_layer_input"] = changes["vocab_size"]
    config = naive_model.config_class(kind)(**changes)
    given = json.loads(config.to_json_string(use_diff=False))
    return kind, {**given, "architectures": [naive_model.model_class(kind).__name__], "dtype": "float32"}


def theirs(kind: str, given: Mapping[str, Any]) -> Any:
    """Return transformers' model of a config, with the same random weights for the same shapes."""
    config = naive_model.config_class(kind).from_dict(deepcopy({**given}))
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = naive_model.model_class(kind)(config).eval()
    naive_model.randomize_vectors(model, kind)
    return model


def write_weights(model: Any, folder: Path) -> None:
    """Write transformers' weights, in the names of a checkpoint, unless they are there already."""
    sums = {name: ([*value.shape], value.double().sum().item()) for name, value in model.state_dict().items()}
    last, told = folder / "written.txt", str(sums)
    if not last.exists() or last.read_text() != told:
        model.save_pretrained(folder)
        last.write_text(told)


def ours(folder: Path) -> Tensor:
    """Return our logits of IDS."""
    config = read_model_config(folder)
    source = open_weights(folder, config)
    check_weights(source, config, None)
    placement = Placement(operators_for(CPU, torch.float32, "reference"), torch.float32, CPU, 64)
    driver = PagedDriver(load_model(source, config, placement))
    return driver.logits(driver.step([(driver.add(IDS), len(IDS))])[0])


def other_values(given: Mapping[str, Any], key: str) -> Iterator[Any]:
    """Yield the values of a key that this config does not have."""
    num_layers = given.get("num_hidden_layers", given.get("n_layer"))
    if key == "layer_types":
        for last in ("sliding_attention", "full_attention", "chunked_attention"):
            for first in ("sliding_attention", "full_attention"):
                yield [*[first] * (num_layers - 1), last]
        yield ["full_attention"] * (num_layers - 1)
        yield ["full_attention"] * (num_layers + 1)
    elif key == "rope_parameters":
        yield from other_ropes(given.get(key) or {"rope_type": "default", "rope_theta": 10_000.0})
    elif key == "moe_topk":
        yield from (2, [2] * num_layers, [2] * (num_layers - 1), [2, *[3] * (num_layers - 1)])
    else:
        yield from VALUES[key]


def other_ropes(rope: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    by_kind = {kind: own for kind, own in rope.items() if isinstance(own, dict)}
    if by_kind:
        for kind, own in by_kind.items():
            yield from ({**rope, kind: other} for other in other_ropes(own))
    else:
        always = ("rope_theta", "partial_rotary_factor", "alpha")
        yield from (
            {**rope, name: value} for name, value in ROPE.items() if name in {*rope, *always} or "factor" in rope
        )
        yield from ({"rope_theta": 500.0, **other} for other in ROPES)


def names(key: str, value: Any, error: TwostrokeError) -> bool:
    """Return whether an error names the key, one below it, a key that follows from it, or tensors."""
    below = (
        {part for one in value.values() if isinstance(one, dict) for part in one} if isinstance(value, dict) else set()
    )
    own = {key, *below, *(value if isinstance(value, dict) else ()), *FOLLOWS.get(key, ()), "do not fit config.json"}
    return any(name in str(error) for name in own)


FOLLOWS = {
    "head_dim": ("partial_rotary_factor",),
    "num_attention_heads": ("head_dim", "hidden_size"),
    "n_head": ("num_attention_heads", "hidden_size"),
    "hidden_size": ("head_dim",),
    "n_embd": ("hidden_size",),
    "rope_parameters": ("rope type",),
    "rope_scaling": ("rope type",),
    "num_hidden_layers": ("layer_types", "no_rope_layers", "mlp_only_layers"),
    "layer_types": ("num_kv_shared_layers",),
    "use_sliding_window": ("sliding_window",),
    "enable_moe_block": ("num_experts",),
    "hidden_size_per_layer_input": ("vocab_size_per_layer_input",),
    **dict.fromkeys(NUMBERS_OF_EXPERTS.split(), ("experts; config.json says", "n_group")),
}
"""Other words for a key."""


def fault(kind: str, given: Mapping[str, Any], key: str, value: Any, folder: Path) -> str:
    """Return what is wrong with our reading of a changed key; empty: nothing."""
    changed = {**given, key: value}
    try:
        ModelConfig.from_hf(changed)
    except TwostrokeError as error:
        return "" if names(key, value, error) else f"is refused with other names: {error}"
    try:
        model = theirs(kind, changed)
        expected = naive_model.logits(model, IDS)
    except Exception:
        return ""  # transformers has no such model
    write_weights(model, folder)
    (folder / "config.json").write_text(json.dumps(changed))
    try:
        found = ours(folder)
    except TwostrokeError as error:
        return "" if names(key, value, error) else f"is refused with other names: {error}"
    if found.shape != expected.shape:
        return f"gives logits {[*found.shape]} instead of {[*expected.shape]}"
    off = (found.log_softmax(-1) - expected.log_softmax(-1)).abs().max().item()
    return "" if off <= MAX_ERROR else f"gives other logits than transformers, off by {off:.2g}"


@pytest.mark.parametrize("family", SHAPES)
def test_another_value_is_honoured_or_refused(family: str, tmp_path: Path) -> None:
    kind, given = written(family)
    of_class = naive_model.config_class(kind)
    keys = {key for key in given if not key.startswith("_")} | {*of_class.attribute_map, *EVERYWHERE.split()}
    keys -= {*WITHOUT_EFFECT.split()}
    unknown = sorted(keys - {*VALUES, "layer_types", "rope_parameters"})
    assert not unknown, f"VALUES or WITHOUT_EFFECT must have {unknown}"
    found = [
        f"{key} {value!r} {told}"
        for key in sorted(keys)
        for value in other_values(given, key)
        if value != given.get(key, "absent") and (told := fault(kind, given, key, value, tmp_path))
    ]
    assert not found, "\n".join(found)
