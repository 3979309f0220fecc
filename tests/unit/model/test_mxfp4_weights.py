"""gpt-oss as it is published, experts in MXFP4: transformers' numbers, in their own 4 bits; what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from oracle import naive_model
from oracle.mxfp4 import write_mxfp4
from oracle.paged_driver import PagedDriver
from twostroke.config.load import ActivationQuantization, Kernels
from twostroke.errors import CorruptCheckpoint, SetupError, UnsupportedModel
from twostroke.kernels.dispatch import operators_for
from twostroke.kernels.quantized_weight import QuantizedWeight
from twostroke.model.checkpoint import read_model_config
from twostroke.model.decoder import Placement
from twostroke.model.loader import load_model, open_weights
from twostroke.model.model_files import find_model
from twostroke.model.weight_size import weight_bytes
from twostroke.model.weight_source import WeightSource

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "head_dim": 16,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "sliding_window": 37,
}
TOKEN_IDS = np.random.default_rng(0).integers(0, 199, 90).tolist()
STACK = "model.layers.1.mlp.experts.gate_up_proj"
Tensors = dict[str, Tensor]


def write(folder: Path, change: Callable[[Tensors], object] = lambda tensors: None) -> Any:
    """Return transformers' model with the numbers that are written."""
    theirs = naive_model.build(folder, "GptOss", **SHAPE)
    tensors = write_mxfp4(folder, theirs)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return theirs


def opened(folder: Path) -> WeightSource:
    return open_weights(folder, read_model_config(folder))


@pytest.mark.parametrize("form", [("reference", None), ("auto", "none")])
def test_logits_are_those_of_transformers(form: tuple[Kernels, ActivationQuantization | None], tmp_path: Path) -> None:
    theirs = write(tmp_path)
    config, operators = read_model_config(tmp_path), operators_for(CPU, torch.float32, *form)
    source = opened(tmp_path)
    assert source.quantization == "mxfp4"
    model = load_model(source, config, Placement(operators, torch.float32, CPU, 128))
    driver = PagedDriver(model, num_blocks=16)
    found = driver.logits(driver.step([(driver.add(TOKEN_IDS), len(TOKEN_IDS))])[0])
    assert (found - naive_model.logits(theirs, TOKEN_IDS)).abs().max() < 1e-3


def test_an_experts_rows_are_its_codes_times_their_scales(tmp_path: Path) -> None:
    theirs = write(tmp_path)
    source = opened(tmp_path)
    experts = theirs.model.layers[1].mlp.experts
    for expert in range(5):
        both = experts.gate_up_proj[expert].t()
        for part, expected in (("gate", both[::2]), ("up", both[1::2]), ("down", experts.down_proj[expert].t())):
            name = f"model.layers.1.mlp.experts.{expert}.{part}_proj.weight"
            found = source.read(name, torch.float32)
            assert isinstance(found, QuantizedWeight)
            assert found.format == source.weights[name].format
            assert torch.equal(found.dequantize(), expected)
            some = source.read(name, torch.float32, slice(8, 21))
            assert isinstance(some, QuantizedWeight)
            assert torch.equal(some.dequantize(), expected[8:21])


def test_experts_take_four_bits_and_a_quarter(tmp_path: Path) -> None:
    write(tmp_path)
    config, operators = read_model_config(tmp_path), operators_for(CPU, torch.bfloat16, "native")
    found = weight_bytes(opened(tmp_path), config, torch.bfloat16, operators)
    floats = weight_bytes(_as_floats(tmp_path / "floats"), config, torch.bfloat16, operators)
    numbers = 2 * 5 * (2 * 160 * 96 + 96 * 160)  # inner sizes fill panels up, hidden sizes those of down to 128 rows
    filled = 2 * 5 * (2 * 160 * 96 + 128 * 160)
    assert numbers < filled
    assert floats - found == filled * 16 // 8 - filled * (4 + 16 / 32) / 8


def _as_floats(folder: Path) -> WeightSource:
    naive_model.build(folder, "GptOss", **SHAPE)
    return opened(folder)


def drop(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def drop_of_all_layers(last: str) -> Callable[[Tensors], object]:
    return lambda tensors: [tensors.pop(name) for name in list(tensors) if name.endswith(last)]


def change(name: str, changed: Callable[[Tensor], Tensor]) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: changed(tensors[name])})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop(f"{STACK}_scales"), r"gate_up_proj_scales is missing \(mxfp4\)"),
        (drop(f"{STACK}_blocks"), "gate_up_proj_blocks is missing beside .*gate_up_proj_scales"),
        (
            change(f"{STACK}_scales", lambda scales: scales[..., :2]),
            r"gate_up_proj_scales has shape \[5, 320, 2\]; for \[5, 320, 3, 16\] of .*_blocks it must be \[5, 320, 3\]",
        ),
        (change(f"{STACK}_blocks", lambda blocks: blocks.flatten(2)), r"_blocks has shape \[5, 320, 48\]; it must be"),
        (change(f"{STACK}_blocks", lambda blocks: blocks[:, :319]), r"\[5, 319, 3, 16\]; it must be .*an even number"),
        (
            change(f"{STACK}_bias", lambda bias: bias[:, :318]),
            r"wrong shape: .*gate_up_proj_bias is \[5, 318\], where gate_proj of",
        ),
        (change(f"{STACK}_bias", lambda bias: bias[:, :319]), r"gate_up_proj_bias is \[5, 319\] instead of \[5, 320\]"),
        (drop(f"{STACK}_bias"), f"missing: {STACK}_bias."),
        (
            drop_of_all_layers("gate_up_proj_bias"),
            r"missing: .*layers.0.mlp.experts.gate_up_proj_bias, .*1.mlp.*_bias\.",
        ),
        (drop("model.layers.0.self_attn.sinks"), "missing: model.layers.0.self_attn.sinks"),
    ],
)
def test_damaged_checkpoints_are_refused(damage: Callable[[Tensors], object], message: str, tmp_path: Path) -> None:
    write(tmp_path, damage)
    with pytest.raises(CorruptCheckpoint, match=message):
        load(tmp_path)


def test_experts_that_are_missing_are_named(tmp_path: Path) -> None:
    def leave_one_out(tensors: Tensors) -> None:
        for kind in ("blocks", "scales", "bias"):
            tensors[f"{STACK}_{kind}"] = tensors[f"{STACK}_{kind}"][:4]

    write(tmp_path, leave_one_out)
    with pytest.raises(
        CorruptCheckpoint, match=r"gate_up_proj_(bias|blocks) is \[4, .*, 4 experts; config.json says 5"
    ):
        load(tmp_path)


@pytest.mark.parametrize(
    ("exponent", "error", "message"),
    [
        (255, CorruptCheckpoint, r"NaN or infinity in gate_proj of .*layers.1.mlp.experts.gate_up_proj_blocks\[2\]"),
        (144, UnsupportedModel, r"gate_up_proj_scales\[2\] reaches 2\^17; at most 2\^16"),
    ],
)
def test_scales_that_are_no_numbers_of_float16(
    exponent: int, error: type[Exception], message: str, tmp_path: Path
) -> None:
    def put(tensors: Tensors) -> None:
        tensors[f"{STACK}_scales"][2, 6, 1] = exponent

    write(tmp_path, put)
    with pytest.raises(error, match=message):
        load(tmp_path)


def test_codes_of_another_type_are_refused(tmp_path: Path) -> None:
    write(tmp_path, change(f"{STACK}_blocks", lambda blocks: blocks.to(torch.int16)))
    with pytest.raises(UnsupportedModel, match="gate_up_proj_blocks has type I16; known: U8"):
        opened(tmp_path)


def test_it_is_not_quantized_again(tmp_path: Path) -> None:
    write(tmp_path)
    config = read_model_config(tmp_path)
    assert open_weights(tmp_path, config, "mxfp4").quantization == "mxfp4"
    with pytest.raises(SetupError, match=r"quantized already \(mxfp4\)"):
        open_weights(tmp_path, config, "int8")


def load(folder: Path) -> None:
    config = read_model_config(folder)
    load_model(opened(folder), config, Placement(operators_for(CPU, torch.float32), torch.float32, CPU, 64))


def test_random_weights_of_a_published_config_take_its_bytes(tmp_path: Path) -> None:
    write(tmp_path)
    config, operators = read_model_config(tmp_path), operators_for(CPU, torch.bfloat16)
    random = find_model(str(tmp_path)).random_weights(config, CPU)
    assert random.quantization == "mxfp4"
    sizes = [weight_bytes(source, config, torch.bfloat16, operators) for source in (random, opened(tmp_path))]
    assert sizes[0] == sizes[1]
    name = "model.layers.0.mlp.experts.1.up_proj.weight"
    whole, some = random.read(name, torch.float32), random.read(name, torch.float32, slice(64, 130))
    assert isinstance(whole, QuantizedWeight)
    assert isinstance(some, QuantizedWeight)
    assert torch.equal(whole.dequantize()[64:130], some.dequantize())
    assert 0.015 < float(whole.dequantize().std()) < 0.03
    load_model(random, config, Placement(operators, torch.bfloat16, CPU, 64))
