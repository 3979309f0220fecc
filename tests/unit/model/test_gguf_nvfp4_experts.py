"""Stacks of experts in NVFP4, each with a scale of its own for each expert, as converters write them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, dequantize

from sparse_gguf import Tensors, write_gguf
from twostroke.errors import CorruptCheckpoint
from twostroke.kernels.quantized_weight import QuantizedWeight
from twostroke.model.gguf.weights import GGUFWeights
from twostroke.model.model_files import find_model

STACK = "blk.1.ffn_gate_exps"
SCALES = torch.linspace(0.02, 0.5, 8)


def with_scales(tensors: Tensors) -> None:
    for layer in range(3):
        tensors[f"blk.{layer}.ffn_gate_exps.scale"] = SCALES + layer
        tensors[f"blk.{layer}.ffn_gate_exps.input_scale"] = torch.ones(1)


def test_each_expert_has_a_scale_of_its_own(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", with_scales, gate="NVFP4")
    files = find_model(str(path))
    source = files.weights(files.config(), None)
    assert isinstance(source, GGUFWeights)
    (stored,) = (tensor for tensor in GGUFReader(path).tensors if tensor.name == f"{STACK}.weight")
    numbers = torch.from_numpy(np.array(dequantize(stored.data, GGMLQuantizationType.NVFP4))).view(8, 64, 64)
    for expert in range(8):
        name = f"model.layers.1.mlp.experts.{expert}.gate_proj.weight"
        expected = numbers[expert] * (SCALES[expert] + 1)
        torch.testing.assert_close(source.read_float32(name), expected)
        found = source.read(name, torch.float32)
        assert isinstance(found, QuantizedWeight)
        torch.testing.assert_close(found.dequantize(), expected, rtol=1e-3, atol=1e-5)
        some = source.read(name, torch.float32, slice(8, 24))
        assert isinstance(some, QuantizedWeight)
        assert torch.equal(some.dequantize(), found.dequantize()[8:24])


def test_stacks_without_scales_are_read_as_they_lie(tmp_path: Path) -> None:
    files = find_model(str(write_gguf(tmp_path / "model.gguf", gate="NVFP4")))
    source = files.weights(files.config(), None)
    assert isinstance(source, GGUFWeights)
    assert source.stored_rows("model.layers.1.mlp.experts.5.gate_proj.weight") is not None


@pytest.mark.parametrize("scales", [torch.ones(1), torch.ones(9), torch.full((8,), torch.nan)])
def test_scales_that_are_not_one_for_each_expert_are_refused(scales: torch.Tensor, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", lambda t: t.update({f"{STACK}.scale": scales}), gate="NVFP4")
    files = find_model(str(path))
    with pytest.raises(
        CorruptCheckpoint, match=f"{STACK}.scale (must be 8 finite numbers, one for|is .*metadata say 8)"
    ):
        files.weights(files.config(), None)
