"""The AWQ and GPTQ oracles give back what was quantized, and the committed fixtures are what their script writes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fixtures.quantized.make import FIXTURES, FOLDER, AwqFixture, quantized_model, write
from fixtures.quantized.rounding import QuantizedLinear
from fixtures.random_models import random_weights
from oracles import awq, gptq
from oracles.checkpoint import read_tensors


@pytest.mark.parametrize("name", FIXTURES)
def test_the_oracle_gives_what_was_quantized(name: str) -> None:
    config, linears, others = quantized_model(name)
    oracle = awq if isinstance(FIXTURES[name], AwqFixture) else gptq
    found = oracle.dequantize(FOLDER / name)
    expected = {f"{module}.weight": linear.weight for module, linear in linears.items()}
    expected |= {parameter: tensor.astype(np.float32) for parameter, tensor in others.items()}
    zero_biases = found.keys() - expected.keys()
    assert all(parameter.endswith(".bias") and not found[parameter].any() for parameter in zero_biases)
    assert found.keys() - zero_biases == expected.keys() == random_weights(config, seed=0).keys()
    for parameter, weight in expected.items():
        assert found[parameter].dtype == np.float32
        np.testing.assert_array_equal(found[parameter], weight, err_msg=parameter)


@pytest.mark.parametrize("name", FIXTURES)
def test_the_script_writes_what_is_committed(name: str, tmp_path: Path) -> None:
    write(name, tmp_path / name)
    assert (tmp_path / name / "config.json").read_text() == (FOLDER / name / "config.json").read_text()
    written, committed = read_tensors(tmp_path / name), read_tensors(FOLDER / name)
    assert written.keys() == committed.keys()
    for tensor_name, tensor in committed.items():
        assert written[tensor_name].dtype == tensor.dtype
        np.testing.assert_array_equal(written[tensor_name], tensor, err_msg=tensor_name)


def test_awq_interleaves_the_columns_of_a_word() -> None:
    """The word that AutoAWQ's order_map gives for columns 0 to 7 that hold 0 to 7."""
    columns = np.arange(8, dtype=np.int32)[:, None]
    linear = QuantizedLinear(columns, columns, np.ones((8, 1), np.float16), np.zeros(1, np.int32))
    tensors = AwqFixture("llama", 32).tensors("m", linear)
    assert tensors["m.qweight"].tolist() == tensors["m.qzeros"].tolist() == [[0x75316420]]


@pytest.mark.parametrize(
    ("name", "zero", "word"),
    [
        ("gptq-4bit-g32-llama", 8, 0x77777777),
        ("gptq-8bit-channel-llama", 128, 0x7F7F7F7F),
    ],
)
def test_gptq_v1_stores_a_zero_less_one(name: str, zero: int, word: int) -> None:
    """The words that every symmetric checkpoint of AutoGPTQ is full of."""
    _, linears, _ = quantized_model(name)
    assert all((linear.zeros == zero).all() for linear in linears.values())
    zeros = [tensor for tensor_name, tensor in read_tensors(FOLDER / name).items() if tensor_name.endswith(".qzeros")]
    assert len(zeros) == len(linears)
    assert all((words == word).all() for words in zeros)


def test_gptq_v2_says_that_a_zero_is_zero() -> None:
    _, linears, _ = quantized_model("gptq-4bit-g64-asym-v2-qwen3")
    zeros = np.concatenate([linear.zeros.ravel() for linear in linears.values()])
    assert (zeros.min(), zeros.max()) == (0, 15)


def test_gptq_v1_zeros_that_readers_read_differently_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "v2-called-v1"
    write("gptq-4bit-g64-asym-v2-qwen3", folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["checkpoint_format"] = "gptq"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="qzeros: 15 has no meaning"):
        gptq.dequantize(folder)


def test_activation_order_differs_between_inputs_and_is_no_run_of_groups() -> None:
    _, linears, _ = quantized_model("gptq-4bit-g32-actorder-qwen3")
    layer = "model.layers.0"
    q, k, o = (linears[f"{layer}.self_attn.{name}_proj"].group_of_input for name in "qko")
    np.testing.assert_array_equal(q, k)
    assert q.tolist() != linears["model.layers.1.self_attn.q_proj"].group_of_input.tolist()
    for groups in (q, o):
        assert (np.diff(groups) < 0).any()
        assert (np.bincount(groups) == 32).all()
