"""GGUF files of the older and rarer architectures: the logits are transformers'.

The files are written with the names of tensors that the `gguf` package knows for each architecture, and with what
llama.cpp's converter does to them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import GGUFWriter

from fixtures.gguf.layout import interleaved
from oracle import naive_model
from oracle.paged_driver import PagedDriver
from twostroke.errors import CorruptCheckpoint, UnsupportedModel
from twostroke.kernels.dispatch import operators_for
from twostroke.layers.elementwise import inverse_frequencies
from twostroke.model.decoder import Placement
from twostroke.model.gguf.weights import GGUFWeights
from twostroke.model.loader import load_model
from twostroke.model.model_files import find_model

CPU = torch.device("cpu")
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Case:
    """A model, and what the converter does with it."""

    kind: str
    """transformers' name."""
    architecture: str
    """llama.cpp's name."""
    changes: dict[str, Any] = field(default_factory=dict[str, Any])
    tensor: Callable[[Any, str, Floats], Floats] = lambda config, name, array: array
    """Changes a tensor."""
    keys: Callable[[GGUFWriter, Any], None] = lambda writer, config: None
    """Adds keys."""
    layer_norm: bool = False


def permuted(config: Any, name: str, array: Floats) -> Floats:
    """Interleave rows for llama.cpp's rotation."""
    num = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    part = name.split(".")[-2]
    return interleaved(array, num[part]) if part in num else array


def nemotron(config: Any, name: str, array: Floats) -> Floats:
    return array + 1 if name.endswith("norm.weight") else array


def neox(config: Any, name: str, array: Floats) -> Floats:
    """Reorder q, k and v of each head: all of q, then k, then v."""
    if "query_key_value" not in name:
        return array
    heads = array.reshape(config.num_attention_heads, 3, -1, *array.shape[1:])
    return np.concatenate([heads[:, part].reshape(-1, *array.shape[1:]) for part in range(3)])


def falcon(config: Any, name: str, array: Floats) -> Floats:
    if "query_key_value" not in name:
        return array
    num_kv = config.num_kv_heads if config.new_decoder_architecture else 1
    group = config.num_attention_heads // num_kv
    heads = array.reshape(num_kv, group + 2, -1, *array.shape[1:])
    parts = heads[:, :-2], heads[:, -2:-1], heads[:, -1:]
    return np.concatenate([part.reshape(-1, *array.shape[1:]) for part in parts])


def gpt2(config: Any, name: str, array: Floats) -> Floats:
    is_matrix = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
    return np.ascontiguousarray(array.T) if is_matrix else array


def partly(share: float) -> Callable[[GGUFWriter, Any], None]:
    def add(writer: GGUFWriter, config: Any) -> None:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        writer.add_rope_dimension_count(int(head_dim * share))

    return add


def phi3(writer: GGUFWriter, config: Any) -> None:
    writer.add_rope_dimension_count(16)
    writer.add_sliding_window(config.sliding_window or 0)


def longrope(writer: GGUFWriter, config: Any) -> None:
    rope = config.rope_parameters
    phi3(writer, config)
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_rope_scaling_attn_factors(rope["attention_factor"])
    writer.add_tensor("rope_factors_long.weight", np.array(rope["long_factor"], np.float32))
    writer.add_tensor("rope_factors_short.weight", np.array(rope["short_factor"], np.float32))


def cohere(writer: GGUFWriter, config: Any) -> None:
    writer.add_logit_scale(config.logit_scale)


def cohere2(writer: GGUFWriter, config: Any) -> None:
    cohere(writer, config)
    writer.add_sliding_window(config.sliding_window)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)


def residual(writer: GGUFWriter, config: Any) -> None:
    writer.add_parallel_residual(config.use_parallel_residual)


def stablelm(writer: GGUFWriter, config: Any) -> None:
    residual(writer, config)
    partly(0.25)(writer, config)


def neox_keys(writer: GGUFWriter, config: Any) -> None:
    residual(writer, config)
    partly(0.25)(writer, config)


def ministral3(writer: GGUFWriter, config: Any) -> None:
    rope = config.rope_parameters
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
    writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
    writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def gemma4(writer: GGUFWriter, config: Any) -> None:
    """Lists by layer; and divisors under which only the first pairs of a full layer's head turn."""
    windows = [kind == "sliding_attention" for kind in config.layer_types]
    full, window = (config.per_layer_config[windows.index(has)] for has in (False, True))
    writer.add_key_length(full.head_dim)
    writer.add_value_length(full.head_dim)
    writer.add_key_length_swa(window.head_dim)
    writer.add_value_length_swa(window.head_dim)
    writer.add_rope_dimension_count(full.head_dim)
    writer.add_rope_dimension_count_swa(window.head_dim)
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern(windows)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input or 0)
    num_own = len(windows) - config.num_kv_shared_layers
    if config.use_double_wide_mlp:
        inner = config.intermediate_size
        writer.add_feed_forward_length([inner if i < num_own else 2 * inner for i in range(len(windows))])
    if full.num_key_value_heads != window.num_key_value_heads:
        heads = [(window if has else full).num_key_value_heads for has in windows]
        writer.add_head_count_kv(heads)
    else:
        writer.add_head_count_kv(full.num_key_value_heads)
    if config.enable_moe_block:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    ropes = config.rope_parameters
    writer.add_rope_freq_base(ropes["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
    turning = int(full.head_dim * ropes["full_attention"]["partial_rotary_factor"] / 2)
    divisors = [1.0] * turning + [1e30] * (full.head_dim // 2 - turning)
    writer.add_tensor("rope_freqs.weight", np.array(divisors, np.float32))


def experts(writer: GGUFWriter, config: Any) -> None:
    """Return those keys that converters of sparse architectures write, as far as the config has them."""
    keys: dict[str, Callable[[Any], None]] = {
        "num_local_experts num_experts n_routed_experts moe_num_experts": writer.add_expert_count,
        "num_experts_per_tok moe_k": writer.add_expert_used_count,
        "moe_intermediate_size": writer.add_expert_feed_forward_length,
        "shared_expert_intermediate_size": writer.add_expert_shared_feed_forward_length,
        "n_shared_experts moe_num_shared_experts": writer.add_expert_shared_count,
        "routed_scaling_factor": writer.add_expert_weights_scale,
        "norm_topk_prob": writer.add_expert_weights_norm,
        "n_group": writer.add_expert_group_count,
        "topk_group": writer.add_expert_group_used_count,
        "first_k_dense_replace moe_layer_start_index": writer.add_leading_dense_block_count,
        "moe_layer_interval": writer.add_interleave_moe_layer_step,
        "attention_multiplier": writer.add_attention_scale,
        "embedding_multiplier": writer.add_embedding_scale,
        "residual_multiplier": writer.add_residual_scale,
        "logits_scaling": writer.add_logit_scale,
    }
    for names, add in keys.items():
        if (found := of(config, *names.split())) is not None:
            add(found)
    if (share := config.rope_parameters.get("partial_rotary_factor")) is not None:
        writer.add_rope_dimension_count(int((of(config, "head_dim") or 16) * share))


QWEN_MOE: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
GLM_MOE: dict[str, Any] = {
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [1.0 + i for i in range(8)],
    "original_max_position_embeddings": 64,
    "attention_factor": 1.2,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 10.0,
    "original_max_position_embeddings": 64,
    "llama_4_scaling_beta": 0.3,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
GEMMA4_EXPERTS: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 3,
    "moe_intermediate_size": 48,
    "tie_word_embeddings": True,
}
PAD: dict[str, Any] = {"pad_token_id": 0}
CASES: dict[str, Case] = {
    "llama": Case("Llama", "llama", tensor=permuted),
    "arcee": Case("Arcee", "arcee", tensor=permuted),
    "ministral3": Case(
        "Ministral3", "mistral3", {**PAD, "head_dim": 16, "rope_parameters": YARN}, permuted, ministral3
    ),
    "seed_oss": Case("SeedOss", "seed_oss", {"head_dim": 16}),
    "qwen2": Case("Qwen2", "qwen2"),
    "qwen3": Case("Qwen3", "qwen3", {"head_dim": 16}),
    "phi2": Case("Phi", "phi2", keys=partly(0.5), layer_norm=True),
    "phi3": Case("Phi3", "phi3", PAD, keys=phi3),
    "phi3-window": Case("Phi3", "phi3", {**PAD, "sliding_window": 24}, keys=phi3),
    "phi3-longrope": Case("Phi3", "phi3", {**PAD, "rope_parameters": LONG}, keys=longrope),
    "glm": Case("Glm", "chatglm", {**PAD, "head_dim": 16}, keys=partly(0.5)),
    "glm4": Case("Glm4", "glm4", {**PAD, "head_dim": 16}, keys=partly(0.5)),
    "cohere": Case("Cohere", "command-r", {"tie_word_embeddings": True}, keys=cohere, layer_norm=True),
    "cohere-norms": Case(
        "Cohere", "command-r", {"tie_word_embeddings": True, "use_qk_norm": True}, keys=cohere, layer_norm=True
    ),
    "cohere2": Case(
        "Cohere2",
        "cohere2",
        {**PAD, "num_hidden_layers": 4, "sliding_window": 24, "tie_word_embeddings": True},
        keys=cohere2,
        layer_norm=True,
    ),
    "starcoder2": Case("Starcoder2", "starcoder2", layer_norm=True),
    "stablelm": Case("StableLm", "stablelm", {"use_qkv_bias": True}, keys=stablelm, layer_norm=True),
    "stablelm-parallel": Case(
        "StableLm",
        "stablelm",
        {"use_parallel_residual": True, "qk_layernorm": True},
        keys=stablelm,
        layer_norm=True,
    ),
    "nemotron": Case("Nemotron", "nemotron", tensor=nemotron, keys=partly(0.5), layer_norm=True),
    "apertus": Case("Apertus", "apertus", {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}),
    "gpt_neox": Case("GPTNeoX", "gptneox", tensor=neox, keys=neox_keys, layer_norm=True),
    "gpt_neox-in-turn": Case(
        "GPTNeoX", "gptneox", {"use_parallel_residual": False}, tensor=neox, keys=neox_keys, layer_norm=True
    ),
    "falcon-7b": Case(
        "Falcon",
        "falcon",
        {"new_decoder_architecture": False, "multi_query": True, "parallel_attn": True, "bias": False, "alibi": False},
        tensor=falcon,
        layer_norm=True,
    ),
    "falcon-40b": Case(
        "Falcon",
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": False, "alibi": False},
        tensor=falcon,
        layer_norm=True,
    ),
    "bloom": Case("Bloom", "bloom", {"tie_word_embeddings": True}, tensor=neox, layer_norm=True),
    "bloom-six-heads-untied": Case(
        "Bloom",
        "bloom",
        {"hidden_size": 96, "num_attention_heads": 6, "tie_word_embeddings": False},
        tensor=neox,
        layer_norm=True,
    ),
    "gemma4": Case(
        "Gemma4",
        "gemma4",
        {
            "num_hidden_layers": 6,
            "head_dim": 16,
            "global_head_dim": 32,
            "num_key_value_heads": 1,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 199,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": True,
        },
        keys=gemma4,
    ),
    "gemma4-one-projection": Case(
        "Gemma4",
        "gemma4",
        {
            "num_hidden_layers": 7,
            "head_dim": 16,
            "global_head_dim": 64,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "sliding_window": 24,
            "tie_word_embeddings": True,
        },
        keys=gemma4,
    ),
    "gemma4-experts": Case("Gemma4", "gemma4", GEMMA4_EXPERTS, keys=gemma4),
    "mixtral": Case("Mixtral", "llama", {"num_local_experts": 4}, permuted, experts),
    "qwen2_moe": Case(
        "Qwen2Moe",
        "qwen2moe",
        {**QWEN_MOE, "shared_expert_intermediate_size": 80, "norm_topk_prob": False},
        keys=experts,
    ),
    "qwen3_moe": Case("Qwen3Moe", "qwen3moe", {**QWEN_MOE, "head_dim": 16, "norm_topk_prob": True}, keys=experts),
    "qwen3_vl_moe": Case("Qwen3Moe", "qwen3vlmoe", {**QWEN_MOE, "head_dim": 16, "norm_topk_prob": True}, keys=experts),
    "olmoe": Case("Olmoe", "olmoe", {"num_experts": 8, "num_experts_per_tok": 3}, keys=experts),
    "granite_moe": Case("GraniteMoe", "granitemoe", {"num_local_experts": 4}, permuted, experts),
    "glm4_moe": Case("Glm4Moe", "glm4moe", {**GLM_MOE, "use_qk_norm": True}, keys=experts),
    "minimax_m2": Case(
        "MiniMaxM2",
        "minimax-m2",
        {"head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 3, "rotary_dim": 8},
        keys=experts,
    ),
    "ernie4_5_moe": Case(
        "Ernie4_5_Moe",
        "ernie4_5-moe",
        {
            "num_hidden_layers": 4,
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_intermediate_size": 48,
            "moe_layer_interval": 2,
        },
        keys=experts,
    ),
    "dots1": Case("Dots1", "dots1", {**GLM_MOE, "head_dim": 16, "first_k_dense_replace": 1}, keys=experts),
    "hunyuan_v1_moe": Case(
        "HunYuanMoEV1", "hunyuan-moe", {"head_dim": 16, "num_experts": 8, "moe_topk": 3}, keys=experts
    ),
    "gpt2": Case("GPT2", "gpt2", tensor=gpt2, layer_norm=True),
}


BY_ITSELF = {
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "e_score_correction_bias": "exp_probs_b.bias",
    "block_sparse_moe.router.weight": "ffn_gate_inp.weight",
    "block_sparse_moe.experts.down_proj": "ffn_down_exps.weight",
}
"""What the converter names by itself, and what has another name in folders."""


def of(config: Any, *names: str, default: Any = None) -> Any:
    return next((found for name in names if (found := getattr(config, name, None)) is not None), default)


def add_usual_keys(writer: GGUFWriter, config: Any, case: Case) -> None:
    heads, hidden = of(config, "num_attention_heads", "n_head"), of(config, "hidden_size", "n_embd")
    writer.add_block_count(of(config, "num_hidden_layers", "n_layer"))
    writer.add_context_length(of(config, "max_position_embeddings", "n_positions"))
    writer.add_embedding_length(hidden)
    inner = {"Falcon": "ffn_hidden_size", "GPT2": "n_inner"}.get(case.kind, "intermediate_size")
    writer.add_feed_forward_length(4 * hidden if case.kind == "Bloom" else of(config, inner, default=4 * hidden))
    writer.add_head_count(heads)
    is_of_all = case.kind in ("GPTNeoX", "GPT2", "Gemma4", "Bloom")
    num_kv = heads if is_of_all else of(config, "num_key_value_heads", default=heads)
    if case.kind == "Falcon":
        num_kv = config.num_kv_heads if config.new_decoder_architecture else 1
    if case.kind != "Gemma4":
        writer.add_head_count_kv(num_kv)
    eps = of(config, "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
    (writer.add_layer_norm_eps if case.layer_norm else writer.add_layer_norm_rms_eps)(eps)
    if case.kind not in ("GPT2", "Falcon", "GPTNeoX", "Gemma4", "Bloom") and of(config, "head_dim"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    rope = of(config, "rope_parameters")
    if rope is not None and "rope_theta" in rope:
        writer.add_rope_freq_base(float(rope["rope_theta"]))


def stacked_norms(tensors: Mapping[str, Floats]) -> dict[str, Floats]:
    """StableLM's norms of q and k, of which a checkpoint has a tensor for each head, as one."""
    found: dict[str, list[Floats]] = {}
    for name, array in tensors.items():
        before, _, _ = name.partition(".norms.")
        found.setdefault(f"{before}.weight" if ".norms." in name else name, []).append(array)
    return {
        name: np.stack(arrays) if ".q_layernorm" in name or ".k_layernorm" in name else arrays[0]
        for name, arrays in found.items()
    }


def in_file(case: Case, names: gguf.TensorNameMap, name: str, array: Floats) -> list[tuple[str, Floats]]:
    """Return a tensor as the converter writes it."""
    layer = f"blk.{name.split('.')[2]}" if name.count(".") > 2 else ""
    if name.endswith("experts.gate_up_proj") and case.kind != "Gemma4":  # apart in folders, too
        gates, ups = np.split(array, 2, axis=1)
        return [(f"{layer}.ffn_gate_exps.weight", gates), (f"{layer}.ffn_up_exps.weight", ups)]
    for module, stored in BY_ITSELF.items():
        if name.endswith(module):
            return [(f"{layer}.{stored}", array.flatten() if "exp_probs" in stored else array)]
    known = f"{name}.weight" if name.endswith(("layer_scalar", "gate_up_proj", "down_proj")) else name
    known = known.removeprefix("transformer.") if case.kind == "Bloom" else known
    found = names.get_name(known, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return [(found, array)]


class Changed(GGUFWriter):
    """Writes another tensor in one's place, or none."""

    changed: Mapping[str, Floats | None] = {}

    def add_tensor(self, name: str, tensor: Any, *args: Any, **kwargs: Any) -> None:
        found = self.changed.get(name, tensor)
        if found is not None:
            super().add_tensor(name, found, *args, **kwargs)


def write(path: Path, case: Case, model: Any, changed: Mapping[str, Floats | None] | None = None) -> None:
    """Write a file of the model in float32, with tensors changed or left out."""
    config = model.config
    writer = Changed(str(path), case.architecture)
    writer.changed = changed or {}
    add_usual_keys(writer, config, case)
    case.keys(writer, config)
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == case.architecture)
    names = gguf.get_tensor_name_map(kind, of(config, "num_hidden_layers", "n_layer"))
    tensors = {name: weight.numpy().astype(np.float32) for name, weight in model.state_dict().items()}
    activations: dict[str, list[float]] = {}
    for name, array in stacked_norms(tensors).items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if "act_fn" in name:
            activations.setdefault(name.rpartition(".")[2], []).append(float(array.reshape(-1)[0]))
            continue
        if name.endswith((".attn.bias", "masked_bias", "rotary_emb.inv_freq")):
            continue
        for stored, part in in_file(case, names, name, array):
            writer.add_tensor(stored, np.ascontiguousarray(case.tensor(config, name, part)))
    for name, numbers in activations.items():
        getattr(writer, f"add_xielu_{name}")(numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def difference(path: Path, case: Case, theirs: Any, longest_request: int | None = None) -> float:
    """Return the largest distance of log-probabilities from transformers'."""
    write(path, case, theirs)
    files = find_model(str(path))
    config = files.config()
    model = load_model(
        files.weights(config, None),
        config.fixed_for(longest_request),
        Placement(operators_for(CPU, torch.float32, "reference"), torch.float32, CPU, 256),
    )
    driver = PagedDriver(model, num_blocks=64)
    token_ids = np.random.default_rng(1).integers(0, model.config.vocab_size, 60).tolist()
    found = driver.logits(driver.step([(driver.add(token_ids), len(token_ids))])[0]).log_softmax(-1)
    expected = naive_model.logits(theirs, token_ids).log_softmax(-1)
    return (found - expected).abs().max().item()


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    theirs = naive_model.build(tmp_path / "folder", case.kind, **case.changes)
    assert difference(tmp_path / "x.gguf", case, theirs, 64 if "longrope" in name else None) <= 1e-4


@pytest.mark.parametrize("name", ["llama", "nemotron", "gpt_neox", "gemma4"])
def test_numbers_are_those_that_are_read(name: str, tmp_path: Path) -> None:
    """A file of floats has the same numbers; `bench quality` measures from them."""
    case = CASES[name]
    write(tmp_path / "x.gguf", case, naive_model.build(tmp_path / "folder", case.kind, **case.changes))
    files = find_model(str(tmp_path / "x.gguf"))
    weights = files.weights(files.config(), None)
    assert isinstance(weights, GGUFWeights)
    for of_weight in weights.weights:
        read = weights.read(of_weight, torch.float32)
        assert isinstance(read, torch.Tensor)
        assert torch.equal(weights.read_float32(of_weight), read), of_weight


DIVISORS = "rope_freqs.weight"


@pytest.mark.parametrize("num_turned", [1, 4, 5, 15, 16])
def test_as_many_pairs_turn_as_the_file_says(num_turned: int, tmp_path: Path) -> None:
    case = CASES["gemma4"]
    divisors = np.array([1.0] * num_turned + [1e30] * (16 - num_turned), np.float32)
    write(tmp_path / "x.gguf", case, naive_model.build(tmp_path, case.kind, **case.changes), {DIVISORS: divisors})
    config = find_model(str(tmp_path / "x.gguf")).config()
    rope = next(layer.rope for layer in config.layers if layer.kv.window is None)
    assert rope is not None
    assert int(inverse_frequencies(rope, 32)[0].count_nonzero()) == num_turned


@pytest.mark.parametrize(
    ("divisors", "said"),
    [
        (None, "rope_freqs.weight is missing"),
        (np.array([1.0] * 4 + [2.0] * 12, np.float32), "1 for the first pairs"),
        (np.array([1e30] * 12 + [1.0] * 4, np.float32), "1 for the first pairs"),
        (np.array([1.0] * 16, np.float16), "has to be F32"),
        (np.array([1.0] * 15, np.float32), "for 16 pairs"),
        (np.array([1.0] * 4 + [np.nan] * 12, np.float32), "1 for the first pairs"),
    ],
)
def test_a_gemma_4_that_does_not_say_which_pairs_turn_is_refused(
    divisors: Floats | None, said: str, tmp_path: Path
) -> None:
    case = CASES["gemma4"]
    write(tmp_path / "x.gguf", case, naive_model.build(tmp_path, case.kind, **case.changes), {DIVISORS: divisors})
    with pytest.raises(CorruptCheckpoint, match=said):
        find_model(str(tmp_path / "x.gguf")).config()


def with_keys(case: Case, keys: Mapping[str, Any]) -> Case:
    """A case with more keys."""

    def add(writer: GGUFWriter, config: Any) -> None:
        case.keys(writer, config)
        for key, value in keys.items():
            kinds = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32, list: writer.add_array}
            kinds[type(value)](f"{case.architecture}.{key}", value)

    return replace(case, keys=add)


@pytest.mark.parametrize(
    ("name", "keys", "said"),
    [
        ("llama", {"rope.scaling.attn_factor": 1.3}, r"llama\.rope\.scaling\.attn_factor=1\.3 .*; known: 1\.0\."),
        ("gemma4", {"rope.scaling.attn_factor": 1.3}, r"attn_factor=1\.3"),
        (
            "phi3-longrope",
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
            "yarn' with a factor of 4 .*beside",
        ),
        ("phi3-longrope", {"rope.scaling.factor": 4.0}, "'linear' with a factor of 4 .* known: longrope"),
        ("gemma4", {"rope.scaling.factor": 4.0}, r"rope scaling \(linear\)"),
        ("gemma4", {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, r"rope scaling \(yarn\)"),
        ("bloom", {"attention.max_alibi_bias": 16.0}, r"bloom\.attention\.max_alibi_bias=16\.0 .*; known: 8\.0\."),
        ("llama", {"attention.max_alibi_bias": 8.0}, r"max_alibi_bias=8\.0 .*; known: 0\.0\."),
        ("cohere2", {"attention.key_length_swa": 8}, "key_length_swa=8 is not implemented; known: 16"),
        ("cohere2", {"attention.value_length_swa": 8}, "value_length_swa=8"),
        ("cohere2", {"rope.dimension_count_swa": 8}, "dimension_count_swa=8"),
    ],
)
def test_keys_that_change_what_is_computed_are_refused(
    name: str, keys: dict[str, Any], said: str, tmp_path: Path
) -> None:
    case = with_keys(CASES[name], keys)
    write(tmp_path / "x.gguf", case, naive_model.build(tmp_path, case.kind, **case.changes))
    with pytest.raises(UnsupportedModel, match=said):
        find_model(str(tmp_path / "x.gguf")).config()


@pytest.mark.parametrize("keys", [{}, {"attention.scale": 0.0}])
def test_a_granite_without_a_scale_has_the_usual_one(keys: dict[str, Any], tmp_path: Path) -> None:
    """llama.cpp reads such a file in the same way."""
    case = with_keys(Case("Granite", "granite", {"attention_multiplier": 0.25}, permuted), keys)
    theirs = naive_model.build(tmp_path / "folder", case.kind, **case.changes)
    assert theirs.config.hidden_size // theirs.config.num_attention_heads == 16
    assert difference(tmp_path / "x.gguf", case, theirs) <= 1e-4


def test_a_longrope_without_a_factor_of_attention_has_none(tmp_path: Path) -> None:
    case = CASES["phi3-longrope"]
    write(tmp_path / "x.gguf", case, naive_model.build(tmp_path, case.kind, **case.changes))
    content, key = (tmp_path / "x.gguf").read_bytes(), b"phi3.rope.scaling.attn_factor"
    (tmp_path / "x.gguf").write_bytes(content.replace(key, key.upper()))
    config = find_model(str(tmp_path / "x.gguf")).config()
    assert config.layers[0].rope is not None
    assert config.layers[0].rope.attention_factor == 1.0


def test_yarn_stretches_the_context_of_a_file_that_names_no_other(tmp_path: Path) -> None:
    case = with_keys(CASES["llama"], {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0})
    theirs = naive_model.build(tmp_path / "folder", case.kind)
    write(tmp_path / "x.gguf", case, theirs)
    config = find_model(str(tmp_path / "x.gguf")).config()
    assert config.layers[0].rope is not None
    assert config.layers[0].rope.original_max_position_embeddings == theirs.config.max_position_embeddings


def test_a_gemma_4_without_a_base_of_its_rotation_is_refused(tmp_path: Path) -> None:
    case = CASES["gemma4"]
    write(tmp_path / "x.gguf", case, naive_model.build(tmp_path, case.kind, **case.changes))
    content, key = (tmp_path / "x.gguf").read_bytes(), b"gemma4.rope.freq_base"
    (tmp_path / "x.gguf").write_bytes(content.replace(key, key.upper(), 1))
    with pytest.raises(CorruptCheckpoint, match=r"no gemma4\.rope\.freq_base"):
        find_model(str(tmp_path / "x.gguf")).config()


def test_a_glm_4_with_sections_of_positions_turns_halves(tmp_path: Path) -> None:
    """The converter puts the rows of such a model (GLM 4.1V) in that order."""

    def in_halves(config: Any, name: str, array: Floats) -> Floats:
        num = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        part, rotated = name.split(".")[-2], config.head_dim // 2
        if part not in num:
            return array
        heads = array.reshape(num[part], config.head_dim, -1)
        turned = heads[:, :rotated].reshape(num[part], rotated // 2, 2, -1).swapaxes(1, 2)
        return np.concatenate([turned.reshape(num[part], rotated, -1), heads[:, rotated:]], 1).reshape(array.shape)

    case = with_keys(CASES["glm4"], {"rope.dimension_sections": [2, 2, 0, 0]})
    theirs = naive_model.build(tmp_path / "folder", case.kind, **case.changes)
    assert difference(tmp_path / "x.gguf", replace(case, tensor=in_halves), theirs) <= 1e-4
    none = with_keys(CASES["glm4"], {"rope.dimension_sections": [0, 0, 0, 0]})
    assert difference(tmp_path / "y.gguf", none, theirs) <= 1e-4


def test_sections_of_positions_change_nothing_in_a_glm_4_5v(tmp_path: Path) -> None:
    """Its q and k are in halves like those of GLM 4.5; positions of text are equal in all sections."""
    case = with_keys(CASES["glm4_moe"], {"rope.dimension_sections": [1, 1, 2, 0]})
    theirs = naive_model.build(tmp_path / "folder", case.kind, **case.changes)
    assert difference(tmp_path / "x.gguf", case, theirs) <= 1e-4


@pytest.mark.parametrize("gone", ["blk.0.attn_norm_2.bias", "blk.1.attn_norm_2.weight"])
def test_one_norm_of_two_never_stands_for_the_other(gone: str, tmp_path: Path) -> None:
    case = CASES["falcon-40b"]
    write(tmp_path / "x.gguf", case, naive_model.build(tmp_path, case.kind, **case.changes), {gone: None})
    files = find_model(str(tmp_path / "x.gguf"))
    with pytest.raises(CorruptCheckpoint, match=f"missing: {gone}"):
        files.weights(files.config(), None)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"blk.0.ffn_down_exps.scale": None}, r"missing: blk\.0\.ffn_down_exps\.scale"),
        ({"blk.1.ffn_gate_inp.scale": None}, r"missing: blk\.1\.ffn_gate_inp\.scale"),
        ({"blk.1.ffn_gate_up_exps.weight": None}, r"missing: blk\.1\.ffn_gate_exps\.weight, "),
        (
            {"blk.0.ffn_gate_up_exps.weight": np.zeros((7, 96, 64), np.float32)},
            r"blk\.0\.ffn_gate_up_exps\.weight is .*, 7 experts; its metadata say 8",
        ),
    ],
)
def test_experts_that_are_not_whole_are_refused(changed: dict[str, Floats | None], said: str, tmp_path: Path) -> None:
    case = CASES["gemma4-experts"]
    write(tmp_path / "x.gguf", case, naive_model.build(tmp_path, case.kind, **case.changes), changed)
    files = find_model(str(tmp_path / "x.gguf"))
    with pytest.raises(CorruptCheckpoint, match=said):
        files.weights(files.config(), None)


@pytest.mark.parametrize("name", ["llama", "cohere2", "gemma4"])
def test_more_layers_than_any_model_has_are_refused_at_once(name: str, tmp_path: Path) -> None:
    """Before a list of so many is made."""
    case = CASES[name]
    write(tmp_path / "x.gguf", case, naive_model.build(tmp_path, case.kind, **case.changes))
    content, key = (tmp_path / "x.gguf").read_bytes(), f"{case.architecture}.block_count".encode()
    at = content.index(key) + len(key) + 4
    (tmp_path / "x.gguf").write_bytes(content[:at] + (2**31 - 1).to_bytes(4, "little") + content[at + 4 :])
    with pytest.raises(CorruptCheckpoint, match=r"block_count must be a whole number, 1 to 4096, found 2147483647"):
        find_model(str(tmp_path / "x.gguf")).config()
