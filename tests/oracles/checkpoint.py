"""A checkpoint folder as numpy arrays, read from the safetensors specification: 8 bytes of length, a JSON header, data.

The oracles share no line with the loader they judge, so this reader is theirs too (and numpy has no bfloat16).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
Float32Array: TypeAlias = NDArray[np.float32]
Int32Array: TypeAlias = NDArray[np.int32]

_DTYPES = {"F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I8": "i1", "BF16": "<u2"}


def read_tensors(folder: Path) -> dict[str, Array]:
    """Every tensor of every shard, by name; bfloat16 comes widened to float32, which is exact."""
    tensors: dict[str, Array] = {}
    for path in sorted(folder.glob("*.safetensors")):
        content = path.read_bytes()
        data_start = 8 + int.from_bytes(content[:8], "little")
        header: dict[str, dict[str, Any]] = json.loads(content[8:data_start])
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            flat = np.frombuffer(content[data_start + begin : data_start + end], _DTYPES[entry["dtype"]])
            if entry["dtype"] == "BF16":
                flat = (flat.astype(np.uint32) << 16).view(np.float32)
            tensors[name] = flat.reshape(entry["shape"])
    return tensors


def read_quantization_config(folder: Path) -> dict[str, Any]:
    """Return the entry of `config.json` about the weights' format."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config["quantization_config"]


def unpack_fields(words: Int32Array, num_bits: int) -> Int32Array:
    """Unsigned fields of `num_bits`, lowest bits first: [..., num_words] -> [..., num_words * 32 / num_bits].

    >>> [hex(field) for field in unpack_fields(np.array([0x76543210], np.int32), 8)]
    ['0x10', '0x32', '0x54', '0x76']
    """
    shifts = np.arange(0, 32, num_bits, dtype=np.uint32)
    fields = (words.view(np.uint32)[..., None] >> shifts) & np.uint32(2**num_bits - 1)
    return fields.reshape(*words.shape[:-1], -1).astype(np.int32)
