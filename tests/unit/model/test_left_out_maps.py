"""Checkpoints whose maps are not all stored alike: what config.json leaves out may be floats, nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from quantized_folders import ACT_ORDER, AWQ, PACKED, edit, edit_config, open_folder, oracle_weights
from twostroke.errors import UnsupportedModel

DOWN = "model.layers.1.mlp.down_proj"


def drop_packed(*ends: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(ends)]:
            del tensors[name]

    return change


@pytest.mark.parametrize("fixture", [AWQ, ACT_ORDER, PACKED])
def test_floats_that_config_json_does_not_know_of_are_refused(fixture: str, copy: Callable[[str], Path]) -> None:
    """Cases: one map of floats among quantized ones, and a folder of floats that is declared quantized."""
    folder = copy(fixture)
    weights = oracle_weights(folder)
    parts = ("qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_scale", "weight_shape")

    def one_of_floats(tensors: dict[str, Tensor]) -> None:
        drop_packed(*(f"{DOWN}.{part}" for part in parts))(tensors)
        tensors[f"{DOWN}.weight"] = weights[f"{DOWN}.weight"]

    edit(folder, one_of_floats)
    with pytest.raises(UnsupportedModel, match=rf"{DOWN}\.weight is stored as F32, but .* leaves out \("):
        open_folder(folder)
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=r"_proj\.weight is stored as F32, but config\.json says"):
        open_folder(folder)


@pytest.mark.parametrize(
    ("fixture", "said"),
    [
        (AWQ, {"modules_to_not_convert": ["down_proj"]}),
        (ACT_ORDER, {"dynamic": {r"-:.*\.1\.mlp\.down": {}}}),
        (ACT_ORDER, {"modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.up_proj", "mlp.gate_proj"]]}),
        (PACKED, {"ignore": ["lm_head", DOWN]}),
        (PACKED, {"ignore": [r"re:.*layers\.1\.mlp\.down_proj$"]}),
    ],
)
def test_floats_that_config_json_names_are_not(fixture: str, said: dict[str, Any], copy: Callable[[str], Path]) -> None:
    folder = copy(fixture)
    weight = oracle_weights(folder)[f"{DOWN}.weight"]

    def change(tensors: dict[str, Tensor]) -> None:
        drop_packed(*(name for name in tensors if name.startswith(DOWN)))(tensors)
        tensors[f"{DOWN}.weight"] = weight

    edit(folder, change)
    with pytest.raises(UnsupportedModel, match=rf"{DOWN}\.weight is stored as F32"):
        open_folder(folder)
    edit_config(folder, **said)
    assert torch.equal(open_folder(folder).read(f"{DOWN}.weight", torch.float32), weight)


def test_packed_tensors_without_a_config_say_what_is_missing(copy: Callable[[str], Path]) -> None:
    folder = copy(AWQ)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=r"has type I32; .*quantization_config in config\.json"):
        open_folder(folder)
