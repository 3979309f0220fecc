"""The quantized checkpoints under fixtures/, read by independent oracles, and copies of them that are changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from oracles import awq, compressed_tensors, gptq
from twostroke.config.load import Quantization
from twostroke.model.checkpoint import read_model_config
from twostroke.model.loader import open_weights

FIXTURES = Path(__file__).parent / "fixtures" / "quantized"
NAMES = sorted(path.name for path in FIXTURES.iterdir() if (path / "config.json").is_file())
ACT_ORDER, ASYMMETRIC = "gptq-4bit-g32-actorder-qwen3", "gptq-4bit-g32-asym-llama"
PACKED, AWQ = "ct-pack-4bit-g32-llama", "awq-g32-llama"


def oracle_weights(folder: Path) -> dict[str, Tensor]:
    method = json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"]
    oracle = {"awq": awq, "gptq": gptq, "compressed-tensors": compressed_tensors}[method]
    return {name: torch.from_numpy(weight) for name, weight in oracle.dequantize(folder).items()}


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))


def open_folder(folder: Path, quantization: Quantization | None = None) -> Any:
    return open_weights(folder, read_model_config(folder), quantization)
