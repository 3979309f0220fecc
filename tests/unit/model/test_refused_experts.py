"""Sparse checkpoints that contradict themselves are refused before a weight is read, by the names of their tensors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from command_line import twostroke
from model_folders import write_random_model
from sparse_gguf import write_gguf
from twostroke import LLM
from twostroke.errors import CorruptCheckpoint, TwostrokeError, UnsupportedModel
from twostroke.model.loader import check_weights
from twostroke.model.model_files import find_model
from twostroke.model.quantize_folder import quantize_folder

Tensors = dict[str, Tensor]
MLP = "model.layers.0.mlp"
GRANITE = "model.layers.0.block_sparse_moe"


def edit_tensors(folder: Path, change: Callable[[Tensors], object]) -> None:
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def refusal_of(path: Path) -> tuple[type[TwostrokeError], str]:
    """Check the weights, of which none is read."""
    with pytest.raises(TwostrokeError) as error:
        check(path)
    return type(error.value), str(error.value)


def check(path: Path) -> None:
    files = find_model(str(path))
    config = files.config()
    check_weights(files.weights(config, None), config, None)


def put(name: str, *shape: int) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: torch.zeros(shape)})


def without(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


FOLDERS: dict[str, tuple[str, Callable[[Tensors], object], str]] = {
    "a router of fewer rows": (
        "qwen3_moe",
        put(f"{MLP}.gate.weight", 7, 64),
        f"wrong shape: {MLP}.gate.weight is [7, 64] instead of [8, 64]",
    ),
    "a correction of more numbers": (
        "glm4_moe",
        put("model.layers.1.mlp.gate.e_score_correction_bias", 9),
        "wrong shape: model.layers.1.mlp.gate.e_score_correction_bias is [9] instead of [8]",
    ),
    "an expert is missing": (
        "qwen3_moe",
        without(f"{MLP}.experts.3.down_proj.weight"),
        f"missing: {MLP}.experts.3.down_proj.weight",
    ),
    "an expert of another shape": (
        "qwen3_moe",
        put(f"{MLP}.experts.3.up_proj.weight", 32, 64),
        f"wrong shape: {MLP}.experts.3.up_proj.weight is [32, 64] instead of [64, 64]",
    ),
    "an expert too many": (
        "qwen3_moe",
        put(f"{MLP}.experts.8.up_proj.weight", 64, 64),
        f"not of this architecture: {MLP}.experts.8.up_proj.weight",
    ),
    "a stack of fewer experts": (
        "granite_moe",
        put(f"{GRANITE}.output_linear.weight", 3, 64, 96),
        f"{GRANITE}.output_linear.weight is [3, 64, 96], 3 experts; config.json says 4",
    ),
    "a stack is missing": (
        "granite_moe",
        without("model.layers.1.block_sparse_moe.input_linear.weight"),
        "missing: model.layers.1.block_sparse_moe.input_linear.weight.",
    ),
    "a stack of an odd number of rows": (
        "granite_moe",
        put(f"{GRANITE}.input_linear.weight", 4, 191, 64),
        f"{GRANITE}.input_linear.weight is [4, 191, 64] instead of [4, 192, 64], as config.json requires",
    ),
    "a stack that is none": (
        "qwen3_moe",
        put(f"{MLP}.experts.down_proj", 64, 64),
        f"{MLP}.experts.down_proj is [64, 64] instead of [8, 64, 64], as config.json requires",
    ),
    "an expert beside its stack": (
        "granite_moe",
        put(f"{GRANITE}.experts.1.down_proj.weight", 64, 96),
        f"{GRANITE}.experts.1.down_proj.weight is stored twice: by itself and within {GRANITE}.output_linear.weight",
    ),
    "a stack beside its experts": (
        "qwen3_moe",
        put(f"{MLP}.experts.gate_up_proj", 4, 128, 64),
        f"{MLP}.experts.0.gate_proj.weight is stored twice",
    ),
    "a stack of other matrices": (
        "granite_moe",
        put(f"{GRANITE}.output_linear.weight", 4, 64, 80),
        (
            "do not fit config.json (GraniteMoeForCausalLM); wrong shape: "
            f"{GRANITE}.output_linear.weight is [4, 64, 80], where down_proj of an expert is [64, 80] instead of"
        ),
    ),
    "two stacks of other matrices": (
        "granite_moe",
        put(f"{GRANITE}.input_linear.weight", 4, 160, 64),
        (
            f"{GRANITE}.input_linear.weight is [4, 160, 64], where gate_proj of an expert is [80, 64] instead of "
            f"[96, 64], {GRANITE}.input_linear.weight is [4, 160, 64], where up_proj of an expert is [80, 64] instead"
        ),
    ),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_folders(case: str, tmp_path: Path) -> None:
    family, change, said = FOLDERS[case]
    folder = write_random_model(tmp_path, family)
    edit_tensors(folder, change)
    error, message = refusal_of(folder)
    assert error is CorruptCheckpoint
    assert said in message
    assert re.search(r"(Download the model again|Remove one)", message), "no remedy"


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("qwen3_moe", {"num_experts": 12, "num_local_experts": 12}, r"gate.weight is \[8, 64\] instead of \[12, 64\]"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok 9 is more than num_(local_)?experts 8"),
        ("qwen3_moe", {"num_experts": 10**9, "num_local_experts": 10**9}, "num_local_experts must be .*at most 4096"),
        ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok 5 is more than num_local_experts 4"),
        ("qwen2_moe", {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 2 layers"),
        ("qwen3_moe", {"layer_types": ["full_attention"] * 4}, "layer_types has 4 entries for 3 layers"),
        ("glm4_moe", {"n_group": 3}, "n_routed_experts 8 is no multiple of n_group 3"),
        ("glm4_moe", {"topk_group": 5}, "topk_group 5 is more than n_group 4"),
        ("glm4_moe", {"first_k_dense_replace": 4}, "first_k_dense_replace must be an integer from 0 to 3, found 4"),
        ("gpt_oss", {"experts_per_token": 3}, "experts_per_token 3 contradicts num_experts_per_tok 2"),
        ("qwen3_moe", {"num_experts": 4}, "num_local_experts 8 contradicts num_experts 4"),
        ("qwen3_moe", {"mlp_only_layers": [1, 3]}, r"mlp_only_layers must be .*, 0 to 2, found \[1, 3\]"),
        ("hunyuan_v1_moe", {"moe_topk": [3, 3, 3]}, "moe_topk has 3 entries for 2 layers"),
        ("minimax_m2", {"attn_type_list": [1]}, "attn_type_list has 1 entries for 2 layers"),
        ("gpt2", {"num_attention_heads": 8}, "num_attention_heads 8 contradicts n_head 4"),
    ],
)
def test_configs_that_contradict_themselves_or_the_tensors(
    family: str, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    folder = write_random_model(tmp_path, family)
    edit_config(folder, **changes)
    with pytest.raises(CorruptCheckpoint, match=f"{folder}: .*{said}.*([Cc]orrect config.json|Download the model)"):
        LLM(str(folder))


@pytest.mark.parametrize("command", [["generate", "x"], ["serve", "--port", "0"], ["plan"]], ids=" ".join)
@pytest.mark.parametrize("stored", ["folder", "file"])
def test_commands_end_with_one_line(command: list[str], stored: str, tmp_path: Path) -> None:
    if stored == "folder":
        path = write_random_model(tmp_path, "glm4_moe")
        edit_config(path, n_group=3)
        said = "n_routed_experts 8 is no multiple of n_group 3. Correct config.json, or download the model again."
    else:
        path = write_gguf(tmp_path / "model.gguf", numbers={"expert_used_count": 9})
        said = "qwen3moe.expert_used_count 9 is more than qwen3moe.expert_count 8. Convert the model again."
    model = [str(path)] if command == ["plan"] else ["--model", str(path)]
    done = twostroke(*command, *model)
    assert done.returncode == 1, done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("twostroke: ")
    assert line.endswith(said)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            f"{MLP}.experts.5.down_proj",
            f"{MLP}.experts.5.down_proj.weight has F16, {MLP}.experts.0.down_proj.weight F32",
        ),
        (f"{MLP}.experts.0.up_proj", f"{MLP}.experts.1.up_proj.weight has F32, {MLP}.experts.0.up_proj.weight F16"),
    ],
)
def test_an_expert_in_another_type_of_floats(name: str, said: str, tmp_path: Path) -> None:
    folder = write_random_model(tmp_path, "qwen3_moe")
    edit_tensors(folder, lambda tensors: tensors.update({f"{name}.weight": tensors[f"{name}.weight"].half()}))
    error, message = refusal_of(folder)
    assert error is UnsupportedModel
    assert said in message
    assert message.endswith("Store or quantize them alike.")


def test_a_projection_of_all_experts_may_have_another_type_of_floats(tmp_path: Path) -> None:
    folder = write_random_model(tmp_path, "qwen3_moe")

    def halve(tensors: Tensors) -> None:
        tensors |= {name: one.half() for name, one in tensors.items() if ".experts." in name and "down" in name}

    edit_tensors(folder, halve)
    check(folder)


@pytest.fixture
def quantized(tmp_path: Path) -> Path:
    write_random_model(tmp_path / "floats", "qwen3_moe")
    quantize_folder(str(tmp_path / "floats"), tmp_path / "int4", "int4")
    return tmp_path / "int4"


def test_an_expert_in_another_format(quantized: Path) -> None:
    """Served one by one it would be slow; published models have none."""
    name = f"{MLP}.experts.5.down_proj"
    path = quantized / "config.json"
    given = json.loads(path.read_text())
    given["quantization_config"]["ignore"] = [*given["quantization_config"].get("ignore", []), name]
    path.write_text(json.dumps(given))

    def as_floats(tensors: Tensors) -> None:
        for part in [part for part in tensors if part.startswith(f"{name}.")]:
            del tensors[part]
        tensors[f"{name}.weight"] = torch.ones(64, 64)

    edit_tensors(quantized, as_floats)
    error, message = refusal_of(quantized)
    assert error is UnsupportedModel
    assert f"{name}.weight has F32, {MLP}.experts.0.down_proj.weight 4 bits in groups of 32" in message
    with pytest.raises(UnsupportedModel, match="experts of one layer must have one format"):
        LLM(str(quantized))


def test_maps_may_differ_where_they_do_so_in_all_experts(quantized: Path) -> None:
    """Gate and up of the first layer are floats, down is not."""
    path = quantized / "config.json"
    given = json.loads(path.read_text())
    names = [f"{MLP}.experts.{expert}.{part}_proj" for expert in range(8) for part in ("gate", "up")]
    given["quantization_config"]["ignore"] = [*given["quantization_config"].get("ignore", []), *names]
    path.write_text(json.dumps(given))

    def as_floats(tensors: Tensors) -> None:
        for name in names:
            for part in [part for part in tensors if part.startswith(f"{name}.")]:
                del tensors[part]
            tensors[f"{name}.weight"] = torch.ones(64, 64)

    edit_tensors(quantized, as_floats)
    check(quantized)


def test_a_gguf_file_with_gate_and_up_in_two_formats(tmp_path: Path) -> None:
    check(write_gguf(tmp_path / "model.gguf"))


GGUF_FILES: dict[str, tuple[Callable[[Tensors], object], dict[str, int], str]] = {
    "a router of fewer rows": (
        put("blk.1.ffn_gate_inp.weight", 7, 64),
        {},
        "blk.1.ffn_gate_inp.weight is [7, 64] instead of [8, 64]",
    ),
    "a stack is missing": (without("blk.1.ffn_up_exps.weight"), {}, "missing: blk.1.ffn_up_exps.weight"),
    "a stack of fewer experts": (
        put("blk.1.ffn_up_exps.weight", 7, 64, 64),
        {},
        "blk.1.ffn_up_exps.weight is [7, 64, 64], 7 experts; its metadata say 8",
    ),
    "a stack of more experts": (
        put("blk.2.ffn_down_exps.weight", 9, 64, 64),
        {},
        "blk.2.ffn_down_exps.weight is [9, 64, 64], 9 experts; its metadata say 8",
    ),
    "a stack of other matrices": (
        put("blk.0.ffn_down_exps.weight", 8, 64, 32),
        {},
        (
            "do not fit its metadata (Qwen3MoeForCausalLM); wrong shape: blk.0.ffn_down_exps.weight is [8, 64, 32], "
            "where down_proj of an expert is [64, 32] instead of [64, 64]."
        ),
    ),
    "an expert beside its stack": (
        put("blk.0.ffn_down.3.weight", 64, 64),
        {},
        "blk.0.ffn_down.3.weight is stored twice: by itself and within blk.0.ffn_down_exps.weight",
    ),
    "metadata of far too many experts": (lambda _: None, {"expert_count": 10**9}, "4096"),
    "metadata of more experts": (lambda _: None, {"expert_count": 9}, ", 8 experts; its metadata say 9"),
    "no experts": (
        lambda _: None,
        {"expert_count": 0},
        "qwen3moe.expert_count is 0; models of this architecture have experts, 1 to 4096 in a layer. Convert the model",
    ),
    "no number of experts": (lambda _: None, {"expert_count": -1}, "qwen3moe.expert_count is missing; models of this"),
    "none chosen": (lambda _: None, {"expert_used_count": 0}, "qwen3moe.expert_used_count"),
    "no number of chosen experts": (lambda _: None, {"expert_used_count": -1}, "qwen3moe.expert_used_count"),
    "experts of no rows": (lambda _: None, {"expert_feed_forward_length": 0}, "qwen3moe.expert_feed_forward_length"),
    "too many chosen": (
        lambda _: None,
        {"expert_used_count": 9},
        "model.gguf: qwen3moe.expert_used_count 9 is more than qwen3moe.expert_count 8. Convert the model again.",
    ),
}


@pytest.mark.parametrize("case", GGUF_FILES)
def test_gguf_files(case: str, tmp_path: Path) -> None:
    change, numbers, said = GGUF_FILES[case]
    error, message = refusal_of(write_gguf(tmp_path / "model.gguf", change, numbers=numbers))
    assert error is CorruptCheckpoint
    assert said in message
    assert "config.json" not in message


@pytest.mark.parametrize("key", ["expert_group_count", "expert_group_used_count", "expert_weights_scale"])
def test_keys_of_gguf_files_that_the_architecture_does_not_read(key: str, tmp_path: Path) -> None:
    check(write_gguf(tmp_path / "usual.gguf", numbers={key: 1}))
    error, message = refusal_of(write_gguf(tmp_path / "model.gguf", numbers={key: 2}))
    assert error is UnsupportedModel
    assert f"qwen3moe.{key}=2 is not implemented for 'qwen3moe'; known: 0 and 1" in message
