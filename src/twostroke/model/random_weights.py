"""RandomWeights: a source without files, of the shape that config.json tells, for who measures and reads no answers.

A model of 16 GB takes minutes to fetch and to read, and its speed does not depend on what its numbers are. They are
those of a model before its first training step: matrices normal around 0, norms 1, biases 0, so that activations stay
finite. Experts that config.json says are stored in MXFP4 have random codes, so that gpt-oss takes the bytes it has.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from zlib import crc32

import torch
from torch import Tensor

from twostroke.config.model import ModelConfig
from twostroke.config.quantization import Mxfp4Config
from twostroke.kernels.quantized_weight import QuantizedFormat, QuantizedWeight
from twostroke.model.mxfp4_checkpoint import MXFP4
from twostroke.model.registry import parameters_of, parts_of
from twostroke.model.weight_source import ALL_ROWS, StoredWeight

_DEVIATION = 0.02
"""Of matrices, as most models are initialised."""
_SCALE_OF_CODES = 2.0**-8
_OF_EXPERTS = re.compile(r"\.experts\.\d+\.\w+\.weight\Z")
_ROWS_ALIKE = 64
"""Rows that are drawn from one seed: whoever reads some of a matrix's rows gets what they are in the whole."""


class RandomWeights:
    """Floats that are drawn when they are read, on the device that they are for; a WeightSource.

    A row depends on the weight's name, its place and the kind of device alone: not on who else was read, so that ranks
    that have a share of the rows each are one model.

    Args:
        path: the model's folder, for messages.
        config: of the model.
        device: where they are made.
    """

    def __init__(self, path: Path, config: ModelConfig, device: torch.device) -> None:
        self.path = path
        self._device, self._norm_weight = device, 1.0 - config.norm_offset
        stored = parts_of(config)
        self.quantization = "mxfp4" if isinstance(config.quantization, Mxfp4Config) else None
        self.weights: Mapping[str, StoredWeight] = {
            part: StoredWeight(parameter.shape(num_rows), self._format(part))
            for name, parameter in parameters_of(config).items()
            for part, num_rows in _parts(stored[name], parameter.rows)
        }

    def _format(self, name: str) -> QuantizedFormat | None:
        return MXFP4 if self.quantization is not None and _OF_EXPERTS.search(name) else None

    def read(self, name: str, dtype: torch.dtype, rows: slice = ALL_ROWS) -> Tensor | QuantizedWeight:
        """See WeightSource; [num_rows, columns] or [num_rows], in `dtype`, on the device."""
        shape = self.weights[name].shape
        begin, end, _ = rows.indices(shape[0])
        if len(shape) == 1:
            value = 0.0 if name.endswith(".bias") else self._norm_weight
            return torch.full((end - begin,), value, dtype=dtype, device=self._device)
        if self.weights[name].format is not None:
            return self._codes(name, begin, end, dtype)
        found = torch.empty(end - begin, shape[1], dtype=dtype, device=self._device)
        generator = torch.Generator(self._device)
        for first in range(begin // _ROWS_ALIKE * _ROWS_ALIKE, end, _ROWS_ALIKE):
            low, high = max(first, begin), min(first + _ROWS_ALIKE, end)
            # all of them and in float32, whatever is wanted: other types would draw other numbers
            drawn = torch.empty(_ROWS_ALIKE, shape[1], dtype=torch.float32, device=self._device)
            drawn.normal_(0.0, _DEVIATION, generator=generator.manual_seed(_seed(name, first)))
            found[low - begin : high - begin].copy_(drawn[low - first : high - first])
        return found

    def _codes(self, name: str, begin: int, end: int, dtype: torch.dtype) -> QuantizedWeight:
        """Return rows [begin, end) of an expert's matrix in 4 bits; their deviation is that of matrices of floats."""
        generator, num_columns = torch.Generator(self._device), self.weights[name].shape[1]
        first, drawn = begin // _ROWS_ALIKE * _ROWS_ALIKE, list[Tensor]()
        for row in range(first, end, _ROWS_ALIKE):
            size, seeded = (_ROWS_ALIKE, num_columns), generator.manual_seed(_seed(name, row))
            drawn.append(torch.randint(16, size, generator=seeded, dtype=torch.uint8, device=self._device))
        codes = torch.cat(drawn)[begin - first : end - first]
        groups = len(codes), num_columns // MXFP4.group_size
        scales = torch.full(groups, _SCALE_OF_CODES, dtype=torch.float16, device=self._device)
        return QuantizedWeight(codes, scales, None, MXFP4.bits, MXFP4.group_size, dtype, table=MXFP4.table)


def _parts(names: tuple[str, ...], rows: tuple[int, ...]) -> list[tuple[str, int]]:
    """What is stored of one of our parameters, each with its rows: apart, or all under one name."""
    return list(zip(names, rows if len(names) == len(rows) else (sum(rows),), strict=True))


def _seed(name: str, first_row: int) -> int:
    """The same in every process, which `hash` is not."""
    return crc32(f"{name} {first_row}".encode())
