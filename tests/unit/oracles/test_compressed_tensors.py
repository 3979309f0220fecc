"""The oracle of compressed-tensors gives, bit for bit, what the package that wrote the fixtures decompresses."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from fixtures.random_models import random_weights
from oracles import compressed_tensors
from oracles.checkpoint import Float32Array, read_tensors

_FOLDER = Path(compressed_tensors.__file__).parents[1] / "fixtures" / "quantized"
_FIXTURES = sorted(path.name for path in _FOLDER.glob("ct-*"))


def _sha256_in_bfloat16(weight: Float32Array) -> str:
    rounded = torch.from_numpy(weight.copy()).to(torch.bfloat16)
    return hashlib.sha256(rounded.view(torch.int16).numpy().tobytes()).hexdigest()


def test_there_are_fixtures() -> None:
    assert len(_FIXTURES) == 10


@pytest.mark.parametrize("name", _FIXTURES)
def test_the_oracle_gives_what_the_package_decompresses(name: str) -> None:
    """The package multiplies in bfloat16: one rounding of the exact product, which is what the oracle gives."""
    record = json.loads((_FOLDER / name / "decompressed.json").read_text())
    found = compressed_tensors.dequantize(_FOLDER / name)
    assert {parameter: _sha256_in_bfloat16(found[parameter]) for parameter in record["sha256"]} == record["sha256"]


@pytest.mark.parametrize("name", _FIXTURES)
def test_every_parameter_of_the_model_is_there_and_no_other(name: str) -> None:
    config = json.loads((_FOLDER / name / "config.json").read_text())
    expected = random_weights(config, seed=0)
    found = compressed_tensors.dequantize(_FOLDER / name)
    assert {parameter: weight.shape for parameter, weight in found.items()} == {
        parameter: weight.shape for parameter, weight in expected.items()
    }


def test_activation_order_is_no_run_of_groups() -> None:
    tensors = read_tensors(_FOLDER / "ct-pack-4bit-g32-actorder-qwen3")
    q, o = (tensors[f"model.layers.0.self_attn.{name}_proj.weight_g_idx"] for name in "qo")
    for groups in (q, o):
        assert (np.diff(groups) < 0).any()
        assert (np.bincount(groups) == 32).all()


def test_zero_points_of_asymmetric_fixtures_are_not_all_the_middle() -> None:
    for name in (name for name in _FIXTURES if "asym" in name):
        tensors = read_tensors(_FOLDER / name)
        zeros = [tensor for tensor_name, tensor in tensors.items() if tensor_name.endswith("weight_zero_point")]
        assert len(zeros) == 14
        assert all(len(np.unique(zero)) > 1 for zero in zeros)
