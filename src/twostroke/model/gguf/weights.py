"""GGUFWeights: the source of a GGUF file's weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from twostroke.config.model import ModelConfig
from twostroke.errors import CorruptCheckpoint
from twostroke.gguf.container import GGUFFile, StoredTensor
from twostroke.kernels.quantized_weight import QuantizedFormat, QuantizedWeight
from twostroke.log import get_logger
from twostroke.model.checkpoint import shorten
from twostroke.model.gguf.blocks import REPACKED
from twostroke.model.gguf.model_config import ROPE_FREQS, gguf_architecture
from twostroke.model.registry import architecture, model_class
from twostroke.model.weight_map import checkpoint_names, gguf_name
from twostroke.model.weight_source import ALL_ROWS, StoredWeight

log = get_logger(__name__)

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GGUFWeights:
    """Tensors of a GGUF file; a WeightSource. Nothing is read before it is asked for."""

    def __init__(self, file: GGUFFile, config: ModelConfig) -> None:
        """Finds the tensors that the model needs.

        Raises:
            CorruptCheckpoint: some are missing, or there are others; all are named as in the file.
        """
        self._file = file
        spec = config.layers[0]  # its file says one number of heads for all layers
        self._num_heads, self._num_kv_heads = spec.num_heads, spec.kv.num_kv_heads
        theirs = gguf_architecture(file.metadata)
        self._has_permuted_heads, self._has_whole_norms = theirs.has_permuted_heads, theirs.has_whole_norms
        ours = model_class(config.architecture).parameters(config)
        names = architecture(config.architecture).names
        self._stored: dict[str, StoredTensor] = {}
        missing: list[str] = []
        for name in (part for parameter in ours for part in checkpoint_names(names, parameter)):
            stored = gguf_name(name, theirs.names)
            if stored in file.tensors:
                self._stored[name] = file.tensors[stored]
            else:
                missing.append(stored)
        known = {tensor.name for tensor in self._stored.values()} | {ROPE_FREQS}
        extra = [name for name in file.tensors if name not in known]
        problems = [f"{what}: {shorten(found)}" for what, found in (("missing", missing), ("unknown", extra)) if found]
        if problems:
            raise CorruptCheckpoint(
                f"{file.path}: the tensors do not fit its metadata ({config.architecture}); {'; '.join(problems)}."
            )
        self.weights: Mapping[str, StoredWeight] = {
            name: StoredWeight(tensor.shape, _format(tensor)) for name, tensor in self._stored.items()
        }
        counts = Counter(tensor.type.name for tensor in self._stored.values())
        self.quantization = "gguf" if counts.keys() - _FLOATS else None
        log.info("%s: %s", file.path.name, ", ".join(_described(name, count) for name, count in counts.items()))

    @property
    def path(self) -> Path:
        """See WeightSource."""
        return self._file.path

    def read(self, name: str, dtype: torch.dtype, rows: slice = ALL_ROWS) -> Tensor | QuantizedWeight:
        """See WeightSource."""
        if self._has_whole_norms and name.endswith("norm.weight"):
            return self.read_numbers(name, rows) - 1.0
        tensor = self._stored[name]
        # rows are put in order before they are taken apart: fewer bytes move
        data, places = torch.from_numpy(tensor.data), self._places(name, rows)
        if not tensor.type.is_quantized:
            return data.view(_FLOATS[tensor.type.name])[places]
        blocks = data[places].unflatten(-1, (-1, tensor.type.block_bytes))
        return REPACKED[tensor.type.name].repack(blocks, (len(blocks), tensor.shape[1]), dtype)

    def read_numbers(self, name: str, rows: slice = ALL_ROWS) -> Tensor:
        """Return the numbers that a weight encodes, by ggml's formulas in float32: no scale is rounded."""
        tensor = self._stored[name]
        data, places = torch.from_numpy(tensor.data), self._places(name, rows)
        if not tensor.type.is_quantized:
            return data.view(_FLOATS[tensor.type.name])[places].float()
        blocks = data[places].unflatten(-1, (-1, tensor.type.block_bytes))
        return REPACKED[tensor.type.name].numbers(blocks, (len(blocks), tensor.shape[1]))

    def _places(self, name: str, rows: slice) -> slice | Tensor:
        """Where in the file some rows of a weight are."""
        num_heads = {"q_proj": self._num_heads, "k_proj": self._num_kv_heads}.get(name.split(".")[-2])
        if num_heads is None or not self._has_permuted_heads:
            return rows
        return _in_halves(self._stored[name].shape[0], num_heads)[rows]


def _in_halves(num_rows: int, num_heads: int) -> Tensor:
    """The rows of each head in the order of Hugging Face: undoes the interleaving of llama.cpp's conversion.

    Stored are row 0 of the first half, row 0 of the second, row 1 of the first ... int64 [num_rows]

    >>> _in_halves(12, num_heads=2).tolist()
    [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
    """
    return torch.arange(num_rows).view(num_heads, -1, 2).transpose(1, 2).flatten()


def _format(tensor: StoredTensor) -> QuantizedFormat | None:
    return REPACKED[tensor.type.name].format if tensor.type.is_quantized else None


def _described(type_name: str, count: int) -> str:
    if type_name not in REPACKED:
        return f"{count} x {type_name}"
    layout = REPACKED[type_name]
    rounding = "exactly" if layout.is_exact else "scales rounded to float16"
    return f"{count} x {type_name} as {layout.bits} bits in groups of {layout.group_size}, {rounding}"
