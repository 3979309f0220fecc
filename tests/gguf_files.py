"""GGUF files of tests: the fixtures that llama.cpp made, and changed copies of them, written by the package `gguf`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, dequantize
from numpy.typing import NDArray

from oracle.gguf_blocks import TYPES_BY_NAME, random_blocks
from twostroke.gguf.container import TYPES

FIXTURES = Path(__file__).parent / "fixtures" / "gguf"
NAMES = sorted(path.stem for path in FIXTURES.glob("*.gguf"))
WIDE = "llama-wide-q6_k"
"""Its matrices divide into super-blocks."""


def fixture(name: str) -> Path:
    """Return the path of a file that llama.cpp made, such as "llama-q4_0"."""
    return FIXTURES / f"{name}.gguf"


def changed(
    name: str,
    path: Path,
    values: Mapping[str, Any] | None = None,
    tensors: Mapping[str, NDArray[Any] | None] | None = None,
    renamed: Mapping[str, str] | None = None,
    raw_type: GGMLQuantizationType = GGMLQuantizationType.Q8_0,
) -> Path:
    """A copy of a fixture.

    Args:
        name: of the fixture.
        path: of the copy.
        values: metadata to set; None leaves a key out.
        tensors: tensors to set, floats as they are and bytes as `raw_type`; None leaves one out.
        renamed: other names for some keys' prefixes, such as {"llama.": "qwen2."}.
        raw_type: what bytes are.
    """
    reader = GGUFReader(fixture(name))
    writer = GGUFWriter(path, "")
    found = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    kinds = {key: field.types for key, field in reader.fields.items()}
    for key, value in (found | dict(values or {})).items():
        if value is None:
            continue
        for old, new in (renamed or {}).items():
            key = key.replace(old, new, 1) if key.startswith(old) else key  # noqa: PLW2901
        writer.add_key_value(key, value, *_types(value, kinds.get(key)))
    kept = {tensor.name: tensor for tensor in reader.tensors if tensor.name not in (tensors or {})}
    for tensor in kept.values():
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    for tensor_name, data in (tensors or {}).items():
        if data is not None:
            is_float = data.dtype != np.uint8
            writer.add_tensor(tensor_name, data, raw_dtype=None if is_float else raw_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _types(value: Any, known: list[GGUFValueType] | None) -> tuple[GGUFValueType, GGUFValueType | None]:
    if isinstance(value, list):
        return GGUFValueType.ARRAY, known[-1] if known else GGUFValueType.get_type(value[0])
    is_same = bool(known) and not isinstance(value, str) and known[0] not in (GGUFValueType.STRING, GGUFValueType.ARRAY)
    return (known[0] if is_same and known else GGUFValueType.get_type(value)), None


def of_type(name: str, path: Path, values: Mapping[str, Any] | None = None, **others: NDArray[np.float32]) -> Path:
    """Return the model WIDE with random blocks of one type in place of every matrix, with numbers of similar size.

    Args:
        name: name of the type, such as "Q4_K".
        path: path of the file.
        values: metadata to set.
        others: tensors to add beside each matrix, by the last part of its name.
    """
    kind, matrices = TYPES[TYPES_BY_NAME[name]], dict[str, Any]()
    for i, tensor in enumerate(GGUFReader(fixture(WIDE)).tensors):
        if len(tensor.shape) == 2:
            num_columns, num_rows = (int(size) for size in tensor.shape)
            shape = (num_rows, num_columns // kind.block_size)
            size = 1.0
            for _ in range(2):  # the second time with the type that the first one returned
                blocks = random_blocks(kind, (size / 2, size), shape, seed=1 + i)
                if name == "NVFP4":  # scales up to 1/8, or up to 2^8 below one of the whole tensor
                    of_groups = blocks.reshape(num_rows, -1, kind.block_bytes)[..., :4]
                    of_groups[...] = (of_groups & 0x1F) + (0x58 if others else 0)
                size *= 0.15 / dequantize(blocks, GGMLQuantizationType[name]).std()
            matrices[tensor.name] = blocks
            stem = tensor.name.removesuffix("weight")
            matrices |= {f"{stem}{part}": number * (1 + i / 8) for part, number in others.items()}
    return changed(WIDE, path, values, matrices, raw_type=GGMLQuantizationType[name])
