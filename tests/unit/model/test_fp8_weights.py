"""Checkpoints whose matrices are 8-bit floats with scales, as they are published: their numbers, what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from oracle import naive_model
from oracle.paged_driver import PagedDriver
from twostroke.errors import CorruptCheckpoint, SetupError, UnsupportedModel
from twostroke.kernels.dispatch import operators_for
from twostroke.llm import LLM
from twostroke.model.checkpoint import read_model_config
from twostroke.model.decoder import Placement
from twostroke.model.loader import load_model, open_weights

CPU = torch.device("cpu")
BLOCK = [16, 32]
TOKEN_IDS = [(11 * i * i + 5 * i) % 96 for i in range(40)]
Tensors = dict[str, Tensor]

BLOCKS: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": BLOCK}
WHOLE: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}


def compressed(strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "dynamic": False, "symmetric": True, **more}
    activations = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


CHECKPOINTS: dict[str, tuple[dict[str, Any], str, Callable[[Tensor], Tensor]]] = {
    "blocks": (BLOCKS, "weight_scale_inv", lambda weight: of_blocks(weight)),
    "one for all": (WHOLE, "weight_scale_inv", lambda weight: weight.abs().amax().view(()) / 448),
    "one for all, an older name": (WHOLE, "weight_scale", lambda weight: weight.abs().amax().view(1) / 448),
    "one for all, as a matrix": (WHOLE, "weight_scale", lambda weight: weight.abs().amax().view(1, 1) / 448),
    "of a tensor": (compressed("tensor"), "weight_scale", lambda weight: weight.abs().amax().view(1) / 448),
    "of channels": (compressed("channel"), "weight_scale", lambda weight: weight.abs().amax(1, keepdim=True) / 448),
    "compressed blocks": (
        compressed("block", block_structure=BLOCK),
        "weight_scale",
        lambda weight: of_blocks(weight),
    ),
}


def of_blocks(weight: Tensor) -> Tensor:
    """A scale for each block, those at the edges smaller."""
    rows, columns = (range(0, size, step) for size, step in zip(weight.shape, BLOCK, strict=True))
    largest = [[weight[i : i + BLOCK[0], j : j + BLOCK[1]].abs().amax() for j in columns] for i in rows]
    return torch.tensor(largest) / 448


def write(folder: Path, name: str, change: Callable[[Tensors], None] | None = None) -> Tensors:
    """Write a checkpoint in fp8, and return its tensors."""
    quantization, suffix, scale_of = CHECKPOINTS[name]
    naive_model.build(folder, "Llama", hidden_size=40, intermediate_size=72, vocab_size=4096, num_hidden_layers=1)
    (file,) = folder.glob("*.safetensors")
    stored: Tensors = {}
    for key, tensor in load_file(file).items():
        stored[key] = tensor.float()
        if key.endswith("_proj.weight"):
            of_map = key.removesuffix("weight")
            stored[key] = (448 * stored[key] / stored[key].abs().max()).to(torch.float8_e4m3fn)
            stored |= {of_map + suffix: scale_of(tensor.float()), f"{of_map}input_scale": torch.tensor(0.5)}
    if change is not None:
        change(stored)
    save_file(stored, file)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return stored


def numbers_of(stored: Tensors) -> Tensors:
    """Return what the tensors of a checkpoint stand for, by the definition, a number at a time."""
    found: Tensors = {}
    for key, tensor in stored.items():
        scale = next((stored[one] for one in (f"{key}_scale_inv", f"{key}_scale") if one in stored), None)
        if key.endswith("weight"):
            found[key] = tensor if scale is None else scaled(tensor.float(), scale)
    return found


def scaled(codes: Tensor, scale: Tensor) -> Tensor:
    def scale_at(row: int, column: int) -> float:
        match tuple(scale.shape):
            case () | (1,) | (1, 1):
                return float(scale.view(()))
            case (_, 1):
                return float(scale[row, 0])
            case _:
                return float(scale[row // BLOCK[0], column // BLOCK[1]])

    num_rows, num_columns = codes.shape
    return codes * torch.tensor([[scale_at(row, column) for column in range(num_columns)] for row in range(num_rows)])


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_weight_is_the_code_times_its_scale(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    numbers = numbers_of(write(folder, name))
    source = open_weights(folder, read_model_config(folder))
    assert source.quantization is None
    assert set(source.weights) == set(numbers)
    for key, expected in numbers.items():
        assert source.weights[key].shape == expected.shape
        found = source.read(key, torch.bfloat16)
        assert isinstance(found, Tensor)
        assert torch.equal(found.float(), expected)
        some = slice(8, min(24, len(expected)))
        part = source.read(key, torch.bfloat16, some)
        assert isinstance(part, Tensor)
        assert torch.equal(part, found[some])


def test_logits_are_those_of_transformers(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    numbers = numbers_of(write(folder, "blocks"))
    config = read_model_config(folder)
    model = load_model(
        open_weights(folder, config),
        config,
        Placement(operators_for(CPU, torch.float32, "reference"), torch.float32, CPU, 64),
    )
    driver = PagedDriver(model, num_blocks=8)
    found = driver.logits(driver.step([(driver.add(TOKEN_IDS), len(TOKEN_IDS))])[0])
    plain = json.loads((folder / "config.json").read_text())
    del plain["quantization_config"]
    kind = transformers.AutoConfig.for_model(**plain)
    theirs = transformers.AutoModelForCausalLM.from_config(kind, attn_implementation="eager").float().eval()
    theirs.load_state_dict(numbers, strict=False)
    assert (found - naive_model.logits(theirs, TOKEN_IDS)).abs().max() < 1e-4


def test_it_is_served_and_can_be_quantized_on_load(tmp_path: Path) -> None:
    write(folder := tmp_path / "folder", "one for all")
    for quantization in (None, "int8"):
        with LLM(str(folder), tokenizer="embedded", threads=1, quantization=quantization, num_kv_blocks=8) as llm:
            (output,) = llm.generate([{"prompt_token_ids": TOKEN_IDS}])
            assert output.outputs[0].token_ids


def test_scales_of_a_kv_cache_are_not_read(tmp_path: Path) -> None:
    def add_scales(tensors: Tensors) -> None:
        tensors |= {f"model.layers.0.self_attn.{name}": torch.tensor(0.5) for name in ("k_scale", "v_scale")}

    stored = write(folder := tmp_path / "folder", "of a tensor", add_scales)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": "float"}
    path.write_text(json.dumps(config))
    assert set(open_weights(folder, read_model_config(folder)).weights) == set(numbers_of(stored))


def test_an_older_name_of_quantization_config_is_read(tmp_path: Path) -> None:
    write(folder := tmp_path / "folder", "of channels")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    expected = read_model_config(folder)
    config["compression_config"] = config.pop("quantization_config")
    path.write_text(json.dumps(config))
    assert read_model_config(folder) == expected


def test_a_shape_alone_is_enough_to_plan(tmp_path: Path) -> None:
    write(folder := tmp_path / "folder", "blocks")
    shutil.copytree(folder, tmp_path / "shape", ignore=shutil.ignore_patterns("*.safetensors"))
    with LLM(str(tmp_path / "shape"), tokenizer="embedded", threads=1, load_format="dummy", num_kv_blocks=8) as llm:
        assert llm.generate([{"prompt_token_ids": TOKEN_IDS}])


Q_PROJ = "model.layers.0.self_attn.q_proj."


def without_scale(tensors: Tensors) -> None:
    del tensors[f"{Q_PROJ}weight_scale_inv"]


def without_codes(tensors: Tensors) -> None:
    tensors[f"{Q_PROJ}weight"] = tensors[f"{Q_PROJ}weight"].float()


def misshapen(tensors: Tensors) -> None:
    tensors[f"{Q_PROJ}weight_scale_inv"] = torch.ones(2, 3)


def scale_of_integers(tensors: Tensors) -> None:
    scale = tensors[f"{Q_PROJ}weight_scale_inv"]
    tensors[f"{Q_PROJ}weight_scale_inv"] = scale.to(torch.int32)


def scale_of_powers(tensors: Tensors) -> None:
    scale = tensors[f"{Q_PROJ}weight_scale_inv"]
    tensors[f"{Q_PROJ}weight_scale_inv"] = scale.to(torch.float8_e8m0fnu)


def two_scales(tensors: Tensors) -> None:
    tensors[f"{Q_PROJ}weight_scale"] = tensors[f"{Q_PROJ}weight_scale_inv"].clone()


def other_floats(tensors: Tensors) -> None:
    tensors[f"{Q_PROJ}weight"] = tensors[f"{Q_PROJ}weight"].float().to(torch.float8_e5m2)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (without_scale, CorruptCheckpoint, "q_proj.weight_scale_inv is missing"),
        (without_codes, CorruptCheckpoint, "q_proj.weight_scale_inv does not belong to a matrix of type F8_E4M3"),
        (misshapen, CorruptCheckpoint, r"has shape \[2, 3\]; for \[40, 40\] it must be \[3, 2\]"),
        (scale_of_integers, UnsupportedModel, "has type I32, which is not implemented; known: F32"),
        (scale_of_powers, UnsupportedModel, "has type F8_E8M0, which is not implemented; known: F32"),
        (two_scales, CorruptCheckpoint, "q_proj.weight_scale_inv and .*q_proj.weight_scale scale one matrix"),
        (other_floats, CorruptCheckpoint, "does not belong to a matrix"),
    ],
)
def test_tensors_that_contradict_each_other_are_refused(
    change: Callable[[Tensors], None], error: type[Exception], words: str, tmp_path: Path
) -> None:
    write(folder := tmp_path / "folder", "blocks", change)
    with pytest.raises(error, match=words):
        open_weights(folder, read_model_config(folder))


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        (BLOCKS | {"fmt": "e5m2"}, "fmt='e5m2' is not implemented; known: e4m3"),
        (BLOCKS | {"weight_block_size": [128]}, r"weight_block_size=\[128\] .* known: \[rows, columns\]"),
        (BLOCKS | {"weight_block_size": [0, 128]}, "weight_block_size"),
        (BLOCKS | {"weight_block_size": "128x128"}, "quantization_config: weight_block_size='128x128'"),
        (compressed("group", group_size=32), "weights.strategy='group' .* known: tensor, channel, block"),
        (compressed("tensor", num_bits=4), "weights.num_bits=4"),
        (compressed("block"), r"weights.block_structure=null .* known: \[rows, columns\]"),
        (compressed("tensor") | {"transform_config": {"R1": {}}}, "transform_config"),
        (compressed("tensor") | {"config_groups": {}}, "config_groups"),
    ],
)
def test_what_is_stored_in_another_way_is_refused(quantization: dict[str, Any], words: str, tmp_path: Path) -> None:
    write(folder := tmp_path / "folder", "blocks")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    with pytest.raises(UnsupportedModel, match=words):
        read_model_config(folder)


def test_a_method_that_it_is_not_of_is_refused(tmp_path: Path) -> None:
    write(folder := tmp_path / "folder", "blocks")
    with pytest.raises(SetupError, match=r"quantization=awq: .* is not stored in that format"):
        open_weights(folder, read_model_config(folder), "awq")
