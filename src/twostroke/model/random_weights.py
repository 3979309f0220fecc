"""RandomWeights: a weight source without files, with the shapes of config.json, for measuring speed.

A model of 16 GB takes minutes to fetch and to read, and its speed does not depend on its numbers. The numbers are
those of a model before its first training step: matrices normal around 0, norms 1, biases 0, so that activations
stay finite. Experts that config.json declares as MXFP4 get random codes, so gpt-oss takes the bytes it has.
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

_STANDARD_DEVIATION = 0.02
"""Standard deviation of matrices, the usual one at initialization."""
_SCALE_OF_CODES = 2.0**-8
_OF_EXPERTS = re.compile(r"\.experts\.\d+\.\w+\.weight\Z")
_ROWS_PER_SEED = 64
"""Rows drawn from one seed, so that reading some rows of a matrix gives the same numbers as reading all."""


class RandomWeights:
    """Random floats, drawn when they are read, on the target device. Implements WeightSource.

    A row depends only on the weight's name, the row's index and the kind of device. It does not depend on other
    reads, so ranks that each have some of the rows form one consistent model.

    Args:
        path: the model's folder, for messages.
        config: config of the model.
        device: device on which the numbers are drawn.
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
        """Return [num_rows, columns] or [num_rows], in `dtype`, on the device."""
        shape = self.weights[name].shape
        begin, end, _ = rows.indices(shape[0])
        if len(shape) == 1:
            value = 0.0 if name.endswith(".bias") else self._norm_weight
            return torch.full((end - begin,), value, dtype=dtype, device=self._device)
        if self.weights[name].format is not None:
            return self._codes(name, begin, end, dtype)
        found = torch.empty(end - begin, shape[1], dtype=dtype, device=self._device)
        generator = torch.Generator(self._device)
        for first in range(begin // _ROWS_PER_SEED * _ROWS_PER_SEED, end, _ROWS_PER_SEED):
            low, high = max(first, begin), min(first + _ROWS_PER_SEED, end)
            # draw the whole range in float32, whatever is requested: other types would draw other numbers
            drawn = torch.empty(_ROWS_PER_SEED, shape[1], dtype=torch.float32, device=self._device)
            drawn.normal_(0.0, _STANDARD_DEVIATION, generator=generator.manual_seed(_seed(name, first)))
            found[low - begin : high - begin].copy_(drawn[low - first : high - first])
        return found

    def _codes(self, name: str, begin: int, end: int, dtype: torch.dtype) -> QuantizedWeight:
        """Return rows [begin, end) of an expert's matrix in 4 bits, with the deviation of float matrices."""
        generator, num_columns = torch.Generator(self._device), self.weights[name].shape[1]
        first, drawn = begin // _ROWS_PER_SEED * _ROWS_PER_SEED, list[Tensor]()
        for row in range(first, end, _ROWS_PER_SEED):
            size, seeded = (_ROWS_PER_SEED, num_columns), generator.manual_seed(_seed(name, row))
            drawn.append(torch.randint(16, size, generator=seeded, dtype=torch.uint8, device=self._device))
        codes = torch.cat(drawn)[begin - first : end - first]
        groups = len(codes), num_columns // MXFP4.group_size
        scales = torch.full(groups, _SCALE_OF_CODES, dtype=torch.float16, device=self._device)
        return QuantizedWeight(codes, scales, None, MXFP4.bits, MXFP4.group_size, dtype, table=MXFP4.table)


def _parts(names: tuple[str, ...], rows: tuple[int, ...]) -> list[tuple[str, int]]:
    """Return the stored parts of a parameter with the rows of each: separate, or all under one name."""
    return list(zip(names, rows if len(names) == len(rows) else (sum(rows),), strict=True))


def _seed(name: str, first_row: int) -> int:
    """Return a seed that is the same in every process, unlike `hash`."""
    return crc32(f"{name} {first_row}".encode())
