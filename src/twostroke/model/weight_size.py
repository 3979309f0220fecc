"""Exact size of a model's loaded weights in bytes, computed before any is read.

The backend gives the packed size of a shape and a format (`Operators.packed_sizes`): our kernels pad their panels
and keep biases in float32; torch's keep tensors unchanged. Tables and norms are tensors of the model's dtype, except
wide norms (Parameter.is_wide).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from twostroke.config.load import DEFAULT_GROUP_SIZE, Quantization
from twostroke.config.model import ModelConfig
from twostroke.kernels.interface import Operators
from twostroke.kernels.quantized_weight import QuantizedFormat
from twostroke.layers.row_split import SINGLE_RANK, RankSplit, rows_of
from twostroke.model.decoder import Parameter
from twostroke.model.registry import is_of_expert, parameter_multiplicities, parameters_of, parts_of
from twostroke.model.weight_pieces import Piece, is_one_weight, is_packed, pieces_of
from twostroke.model.weight_source import WeightSource


def weight_bytes(
    source: WeightSource,
    config: ModelConfig,
    dtype: torch.dtype,
    operators: Operators,
    quantization: Quantization | None = None,
    group_size: int = DEFAULT_GROUP_SIZE,
    split: RankSplit = SINGLE_RANK,
) -> int:
    """Return the bytes of all loaded weights on the rank that has most; tied weights count once.

    Args:
        source: source of the weights, which passed `check_weights`.
        config: config of the same model.
        dtype: type of floats.
        operators: operators of the backend.
        quantization: quantization on load of float matrices that are multiplied.
        group_size: group size for int4.
        split: scheme by which weights are split across ranks.
    """
    counts = _SizeCounter(source, config, dtype, operators, format_on_load(quantization, group_size))
    return max(counts.of_rank(rank, split) for rank in range(split.num_ranks))


def expert_bytes(
    source: WeightSource,
    config: ModelConfig,
    dtype: torch.dtype,
    operators: Operators,
    quantization: Quantization | None = None,
    group_size: int = DEFAULT_GROUP_SIZE,
) -> int:
    """Return the bytes of all routed experts' weights, without shared experts; arguments as for `weight_bytes`."""
    counts = _SizeCounter(source, config, dtype, operators, format_on_load(quantization, group_size))
    return counts.of_parameters(filter(is_of_expert, counts.names))


def format_on_load(quantization: Quantization | None, group_size: int) -> QuantizedFormat | None:
    """Return the format of floats quantized on load; None if the checkpoint's own format is kept."""
    if quantization in ("int8", "fp8"):
        return QuantizedFormat(8, 128, is_fp8=quantization == "fp8")
    return QuantizedFormat(4, group_size) if quantization == "int4" else None


class _SizeCounter:
    """Sizes of one model's weights, loaded with one set of options."""

    def __init__(
        self,
        source: WeightSource,
        config: ModelConfig,
        dtype: torch.dtype,
        operators: Operators,
        on_load: QuantizedFormat | None,
    ) -> None:
        self._source, self._config, self._dtype, self._on_load = source, config, dtype, on_load
        self._sizes = operators.packed_sizes
        self._parameters, self._parts = parameters_of(config), parts_of(config)
        self._times = parameter_multiplicities(config)

    def of_rank(self, rank: int, split: RankSplit) -> int:
        """Return the bytes of all weights of a rank."""
        own, names = partial(rows_of, rank, split.num_ranks), list(self.names)
        total = self._of_slopes(own)
        if split.splits_by_expert:
            total += self._of_whole_experts([name for name in names if is_of_expert(name)], own)
            names = [name for name in names if not is_of_expert(name)]
        return total + self.of_parameters(names, rank, split.num_ranks)

    def _of_whole_experts(self, names: Iterable[str], own: Callable[[int], range]) -> int:
        """Return the bytes of a rank's whole experts, from the parameters of each layer's first one."""
        return sum(
            len(own(self._times[name])) * self._of_parameter(name, range, 1)
            for name in names
            if not self._is_bias_of_product(name)
        )

    @property
    def names(self) -> Iterable[str]:
        """Names of the parameters that count (`parameter_multiplicities`)."""
        return self._times

    def of_parameters(self, names: Iterable[str], rank: int = 0, num_ranks: int = 1) -> int:
        """Return the bytes that a rank has of some parameters."""
        own = partial(rows_of, rank, num_ranks)
        return sum(
            self._times[name] * self._of_parameter(name, own, num_ranks)
            for name in names
            if not self._is_bias_of_product(name)
        )

    def _of_parameter(self, name: str, own: Callable[[int], range], num_ranks: int) -> int:
        parameter = self._parameters[name]
        if is_packed(name, self._config, parameter, self._source, self._parts[name]):
            return self._of_matrix(name, parameter, own)
        return self._of_tensor(name, parameter, own, num_ranks)

    def _of_slopes(self, own: Callable[[int], range]) -> int:
        """Return the bytes of ALiBi slopes, which each layer keeps in float32."""
        num_slopes = sum(len(own(spec.num_heads)) for spec in self._config.layers if spec.has_alibi)
        return num_slopes * torch.float32.itemsize

    def _is_bias_of_product(self, name: str) -> bool:
        """Return whether a parameter is the bias of a product; norms have biases, too."""
        matrix = self._parameters.get(name.removesuffix("bias") + "weight")
        return name.endswith(".bias") and matrix is not None and matrix.columns is not None

    def _of_matrix(self, name: str, parameter: Parameter, own: Callable[[int], range]) -> int:
        """Return the bytes of a packed matrix with its bias."""
        assert parameter.columns is not None, name
        pieces = pieces_of(self._source, self._parts[name], parameter, own)
        maps = self._maps(pieces)
        gated = parameter.is_gated and len(maps) == 1
        total = sum(
            self._sizes.weight((num_rows, parameter.columns), weight_format, self._dtype, gated=gated)
            for num_rows, weight_format in maps
        )
        if self._has_bias(name):
            total += sum(self._sizes.bias(num_rows, self._dtype, gated=gated) for num_rows, _ in maps)
        return total

    def _of_tensor(self, name: str, parameter: Parameter, own: Callable[[int], range], num_ranks: int) -> int:
        if parameter.is_router:
            return self._of_router(name, parameter)
        num_rows = sum(len(parameter.own_rows(rows, own)) for rows in parameter.rows)
        num_copies = max(1, parameter.num_copies // num_ranks)
        dtype = torch.float32 if parameter.is_wide else self._dtype
        return num_copies * num_rows * (parameter.columns or 1) * dtype.itemsize

    def _of_router(self, name: str, parameter: Parameter) -> int:
        """Return the bytes of a router's product in float32 with its bias, or of a correction of scores."""
        (num_rows,) = parameter.rows
        if parameter.columns is None:
            return num_rows * torch.float32.itemsize
        bias = self._sizes.bias(num_rows, torch.float32, gated=False) if self._has_bias(name) else 0
        return bias + self._sizes.weight((num_rows, parameter.columns), None, torch.float32, gated=False)

    def _has_bias(self, name: str) -> bool:
        """Return whether a matrix is packed with a bias."""
        return name.removesuffix("weight") + "bias" in self._parameters

    def _maps(self, pieces: Sequence[Piece]) -> list[tuple[int, QuantizedFormat | None]]:
        """Return rows and format of each separately packed weight (kernels.stacked_weight.stack)."""
        formats = [self._source.weights[piece.name].format or self._on_load for piece in pieces]
        if is_one_weight(self._source, pieces) or len(set(formats)) == 1:
            return [(sum(piece.num_rows for piece in pieces), formats[0])]
        return [(piece.num_rows, weight_format) for piece, weight_format in zip(pieces, formats, strict=True)]
