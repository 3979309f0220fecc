"""Quantization ahead of time: writes a folder in compressed-tensors' layouts, with the bits of quantizing on load.

int8 is `int-quantized` (a scale per channel), int4 `pack-quantized` (symmetric groups); both are described in
model/packed_layouts.py.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from tqdm.auto import tqdm

from twostroke.config.load import DEFAULT_GROUP_SIZE, GROUP_SIZES, QuantizationOnFile
from twostroke.config.model import ModelConfig
from twostroke.errors import InvalidParameter, SetupError
from twostroke.kernels.dispatch import operators_for
from twostroke.kernels.interface import Operators
from twostroke.kernels.quantized_weight import QuantizedWeight
from twostroke.model.checkpoint import read_model_config
from twostroke.model.loader import check_weights, multiplied_parts, open_weights, read_float
from twostroke.model.model_files import find_folder_only
from twostroke.model.registry import parameters_of, parts_of
from twostroke.model.weight_source import WeightSource

MAX_BYTES_PER_FILE = 4 << 30
_COPIED = (".json", ".jinja", ".txt", ".model", ".md")
_WEIGHT_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class QuantizedFolder:
    """Path and sizes of a written folder."""

    path: Path
    bytes_before: int
    bytes_after: int
    """Bytes of all weights in the files."""


def quantize_folder(
    model: str,
    out: Path,
    quantization: QuantizationOnFile,
    *,
    group_size: int | None = None,
    threads: int = 1,
    progress: bool = False,
) -> QuantizedFolder:
    """Write a quantized copy of a model. `out` appears complete or not at all.

    Args:
        model: a folder, a hub id, or "embedded".
        out: a folder that does not exist yet.
        quantization: int8 or int4.
        group_size: weights per scale in int4: 32 (the default), 64 or 128.
        threads: number of threads that quantize.
        progress: whether to show a progress bar.

    Raises:
        InvalidParameter: `out` exists or cannot be written, or the group size is invalid or does not divide a matrix.
        SetupError: no such model, a GGUF file, or a folder that is quantized already.
    """
    group_size = _checked_group_size(quantization, group_size)
    if out.exists():
        raise InvalidParameter("OUT", str(out), "exists already", "Give another folder, or remove it first.")
    folder = find_folder_only(model, "its weights run as stored, and only a folder's are quantized")
    config = read_model_config(folder)
    source = open_weights(folder, config)
    if source.quantization is not None:
        raise SetupError(f"{folder} is quantized already ({source.quantization}). Quantize the original.")
    quantized = multiplied_parts(config)
    check_weights(source, config, quantization, group_size)
    operators = operators_for(torch.device("cpu"), getattr(torch, config.dtype))
    operators.set_num_threads(threads)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise InvalidParameter("OUT", str(out), f"cannot be written ({error.strerror})") from error
    try:
        tensors = _tensors(source, config, quantized, quantization, group_size, operators, progress)
        before, after = _save(tensors, unfinished)
        _copy_others(folder, unfinished, _quantization_config(quantization, group_size, _routers(config)))
        unfinished.chmod(0o755)  # mkdtemp makes private folders
        unfinished.rename(out)
    except BaseException as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        if isinstance(error, OSError):
            raise InvalidParameter("OUT", str(out), f"cannot be written ({error.strerror or error})") from error
        raise
    return QuantizedFolder(out, before, after)


def _checked_group_size(quantization: QuantizationOnFile, group_size: int | None) -> int:
    if group_size is not None and quantization != "int4":
        raise InvalidParameter("group_size", group_size, "changes nothing without quantization int4")
    if group_size is not None and group_size not in GROUP_SIZES:
        raise InvalidParameter("group_size", group_size, f"must be one of {', '.join(map(str, GROUP_SIZES))}")
    return group_size or DEFAULT_GROUP_SIZE


def _tensors(
    source: WeightSource,
    config: ModelConfig,
    quantized: set[str],
    quantization: QuantizationOnFile,
    group_size: int,
    operators: Operators,
    progress: bool,
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Yield for each weight its bytes before, and the tensors it becomes."""
    dtype = getattr(torch, config.dtype)
    for name in tqdm(sorted(source.weights), desc=f"quantizing to {quantization}", unit="tensor", disable=not progress):
        weight = read_float(source, name, dtype)
        if name not in quantized:
            yield weight.nbytes, {name: weight}
        elif quantization == "int8":
            yield weight.nbytes, _int_quantized(name, operators.quantize_per_channel(weight))
        else:
            yield weight.nbytes, _pack_quantized(name, operators.quantize_in_groups(weight, group_size))


def _int_quantized(name: str, weight: QuantizedWeight) -> dict[str, Tensor]:
    codes = (weight.codes ^ 128).view(torch.int8)
    return {name: codes, f"{name}_scale": weight.scales[:, :1].contiguous()}


def _pack_quantized(name: str, weight: QuantizedWeight) -> dict[str, Tensor]:
    octets = weight.codes[:, 0::2] | weight.codes[:, 1::2] << 4
    shape = torch.tensor(weight.shape, dtype=torch.int64)
    words = octets.contiguous().view(torch.int32)
    return {f"{name}_packed": words, f"{name}_scale": weight.scales, f"{name}_shape": shape}


def _routers(config: ModelConfig) -> list[str]:
    """Return the checkpoint modules that route to experts.

    They stay floats, and must be listed because transformers has them as linear layers.
    """
    parts = parts_of(config)
    routers = (name for name, one in parameters_of(config).items() if one.is_router and one.columns is not None)
    return [part.removesuffix(".weight") for name in routers for part in parts[name]]


def _quantization_config(quantization: QuantizationOnFile, group_size: int, left_out: Sequence[str]) -> dict[str, Any]:
    is_int8 = quantization == "int8"
    weights = {"num_bits": 8 if is_int8 else 4, "type": "int", "symmetric": True, "dynamic": False}
    scales = {"strategy": "channel", "group_size": None} if is_int8 else {"strategy": "group", "group_size": group_size}
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
    group = {"targets": ["Linear"], "weights": {**weights, **scales}, "input_activations": inputs if is_int8 else None}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if is_int8 else "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(left_out),
    }


def _save(tensors: Iterator[tuple[int, dict[str, Tensor]]], folder: Path) -> tuple[int, int]:
    """Write files of at most 4 GiB; return the bytes before and after."""
    before = after = 0
    names: list[list[str]] = []
    held: dict[str, Tensor] = {}

    def flush() -> None:
        try:
            save_file(held, folder / f"part-{len(names)}", metadata={"format": "pt"})
        except SafetensorError as error:  # the library's error for a full disk
            raise OSError(str(error)) from error
        names.append(list(held))
        held.clear()

    for num_bytes, made in tensors:
        before += num_bytes
        after += sum(tensor.nbytes for tensor in made.values())
        if held and sum(tensor.nbytes for tensor in (*held.values(), *made.values())) > MAX_BYTES_PER_FILE:
            flush()
        held |= made
    flush()
    if len(names) == 1:
        (folder / "part-0").rename(folder / "model.safetensors")
        return before, after
    weight_map: dict[str, str] = {}
    for i, of_file in enumerate(names):
        file_name = f"model-{i + 1:05}-of-{len(names):05}.safetensors"
        (folder / f"part-{i}").rename(folder / file_name)
        weight_map |= dict.fromkeys(of_file, file_name)
    index = {"metadata": {"total_size": after}, "weight_map": weight_map}
    (folder / _WEIGHT_INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    return before, after


def _copy_others(folder: Path, out: Path, quantization_config: dict[str, Any]) -> None:
    """Copy tokenizer, templates and licence, and write config.json with the quantization added."""
    for path in sorted(folder.iterdir()):
        wanted = path.suffix in _COPIED or path.name.upper().startswith(("LICENSE", "NOTICE"))
        if path.is_file() and wanted and path.name not in ("config.json", _WEIGHT_INDEX):
            shutil.copyfile(path, out / path.name)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = quantization_config
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
