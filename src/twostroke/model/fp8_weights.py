"""Fp8Weights: the source of a checkpoint whose matrices are stored as floats of 8 bits (e4m3) with scales.

    X.weight            float8_e4m3fn [N, K]
    X.weight_scale_inv  or X.weight_scale, floats: one, [N, 1], or [ceil(N / rows), ceil(K / columns)] for blocks
    X.activation_scale  or X.input_scale: how activations would be rounded, which is not done here
    X.k_scale           or X.v_scale: how a KV cache of 8-bit floats would be rounded; `--kv-cache-dtype` says what it
                        holds here

A weight is the product of both, in float32. What the model holds is that number in its own type: twice the file's size
in bfloat16. Weights of 8 bits again are `--quantization int8`, or fp8 where the operators have it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from twostroke.config.quantization import Fp8Config
from twostroke.errors import CorruptCheckpoint, UnsupportedModel
from twostroke.log import get_logger
from twostroke.model.checkpoint import Checkpoint
from twostroke.model.float_weights import FLOAT_TYPES, check_floats
from twostroke.model.weight_source import ALL_ROWS, StoredWeight

log = get_logger(__name__)

_FP8 = "F8_E4M3"
_SCALES = ("weight_scale_inv", "weight_scale")
_NOT_OF_WEIGHTS = ("activation_scale", "input_scale", "k_scale", "v_scale")


class Fp8Weights:
    """Gives the numbers that fp8 matrices and their scales stand for, and all other floats; a WeightSource."""

    quantization = None

    def __init__(self, checkpoint: Checkpoint, config: Fp8Config) -> None:
        """Finds the scales and checks their shapes.

        Raises:
            UnsupportedModel: a tensor of a type that is not implemented.
            CorruptCheckpoint: a matrix without its scale, a scale without its matrix, or of another shape.
        """
        self._checkpoint, self._config = checkpoint, config
        self._scale_of: dict[str, str] = {}
        found = {name: shape for name, shape in checkpoint.shapes.items() if not name.endswith(_NOT_OF_WEIGHTS)}
        for name, kind in checkpoint.types.items():
            if kind == _FP8:
                self._scale_of[name] = scale = self._scale(name)
                found.pop(scale, None)
        left = sorted(name for name in found if name.endswith(_SCALES))
        if left:
            raise CorruptCheckpoint(f"{self.path}: {left[0]} belongs to no matrix of type {_FP8}.")
        floats = {name: shape for name, shape in found.items() if name not in self._scale_of}
        check_floats(checkpoint, floats, f"Beside floats, matrices of type {_FP8} are read.")
        self.weights: Mapping[str, StoredWeight] = {name: StoredWeight(shape) for name, shape in found.items()}
        log.info("%s: %d matrices of 8-bit floats are held in the model's type", self.path.name, len(self._scale_of))

    @property
    def path(self) -> Path:
        return self._checkpoint.path

    def read(self, name: str, dtype: torch.dtype, rows: slice = ALL_ROWS) -> Tensor:
        del dtype
        found = self._checkpoint.read(name, rows)
        if name not in self._scale_of:
            return found
        scale = self._checkpoint.read(self._scale_of[name]).float()
        shape = self._checkpoint.shapes[name]
        begin, end, _ = rows.indices(shape[0])
        return found.float() * self._spread(scale, shape, begin, end)

    def _spread(self, scale: Tensor, shape: tuple[int, ...], begin: int, end: int) -> Tensor:
        """Return the scale of each number of rows [begin, end), or what broadcasts to that."""
        if scale.numel() == 1:
            return scale.view(1, 1)
        if self._config.block_size is None:
            return scale.view(-1, 1)[begin:end]
        height, width = self._config.block_size
        of_rows = scale[torch.arange(begin, end) // height]
        return of_rows.repeat_interleave(width, 1)[:, : shape[1]]

    def _scale(self, name: str) -> str:
        """Return the name of a matrix's scale."""
        shape = self._checkpoint.shapes[name]
        known = [f"{name.removesuffix('weight')}{suffix}" for suffix in _SCALES]
        scales = [one for one in known if one in self._checkpoint.shapes]
        if len(scales) > 1:
            raise CorruptCheckpoint(f"{self.path}: {' and '.join(scales)} scale one matrix; there must be one of them.")
        if not scales or len(shape) != 2:
            what = f"{name} has shape {list(shape)} and is no matrix" if scales else f"{known[0]} is missing"
            raise CorruptCheckpoint(f"{self.path}: {what}.")
        (scale,) = scales
        kind = self._checkpoint.types[scale]
        if kind not in FLOAT_TYPES:
            raise UnsupportedModel(
                f"{self.path}: {scale} has type {kind}, which is not implemented; known: {', '.join(FLOAT_TYPES)}."
            )
        found, allowed = self._checkpoint.shapes[scale], self._shapes_of_scale(shape)
        if found not in allowed:
            wanted = " or ".join(str(list(one)) for one in allowed)
            raise CorruptCheckpoint(f"{self.path}: {scale} has shape {list(found)}; for {list(shape)} it is {wanted}.")
        return scale

    def _shapes_of_scale(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        num_rows, num_columns = shape
        if self._config.block_size is None:
            return (), (1,), (1, 1), (num_rows, 1), (num_rows,)
        height, width = self._config.block_size
        return ((-(-num_rows // height), -(-num_columns // width)),)
