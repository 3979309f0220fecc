"""Loading of a model from a weight source: checks every name and shape first, then reads, converts and packs."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import partial
from pathlib import Path
from typing import NoReturn, get_args

import torch
from torch import Tensor

from twostroke.config.load import DEFAULT_GROUP_SIZE, GROUP_SIZES, Quantization, QuantizationOnLoad
from twostroke.config.model import ModelConfig
from twostroke.config.quantization import Fp8Config, Mxfp4Config, QuantizationConfig, StoredQuantization
from twostroke.errors import CorruptCheckpoint, InvalidParameter, ModelNotFound, SetupError
from twostroke.kernels.interface import Operators, Weight
from twostroke.kernels.memory import return_unused
from twostroke.kernels.quantized_weight import QuantizedWeight, quantize_fp8
from twostroke.kernels.stacked_weight import StackedWeight, stack
from twostroke.kernels.stored_rows import StoredRows
from twostroke.kernels.streamed_weight import StreamedWeight
from twostroke.log import get_logger
from twostroke.model.checkpoint import Checkpoint
from twostroke.model.decoder import DecoderModel, Placement
from twostroke.model.expert_formats import check_formats, check_stacks
from twostroke.model.float_weights import FloatWeights
from twostroke.model.mxfp4_checkpoint import Mxfp4Weights
from twostroke.model.packed_cache import CachedWeights, PackedCache
from twostroke.model.quantized_checkpoint import Fp8Weights, QuantizedCheckpoint
from twostroke.model.registry import architecture, model_class, parameters_of, parts_of
from twostroke.model.rotary_order import in_rotary_order
from twostroke.model.stacked_experts import UnstackedExperts
from twostroke.model.stacked_norms import StackedNorms
from twostroke.model.stored_shapes import check_shapes
from twostroke.model.tied_head import with_embedding
from twostroke.model.transposed import Transposed
from twostroke.model.weight_map import checkpoint_names
from twostroke.model.weight_pieces import Piece, is_multiplied, is_one_weight, is_packed, pieces_of, with_whole_experts
from twostroke.model.weight_size import weight_bytes
from twostroke.model.weight_source import ALL_ROWS, ROWS_TOGETHER, StoresRows, WeightSource

log = get_logger(__name__)

_NUMBERS_BEFORE_TRIM = 8 << 20
"""Numbers of weights read between two trims of memory; a single expert is too small to trigger one."""


def open_weights(folder: Path, config: ModelConfig, quantization: Quantization | None = None) -> WeightSource:
    """Return the weights of a model folder, not read yet.

    Args:
        folder: folder with the safetensors files.
        config: config of that folder (checkpoint.read_model_config).
        quantization: quantization that the user asks for.

    Raises:
        UnsupportedModel: the weights are of a type that is not implemented.
        ModelNotFound: there are no safetensors files.
        CorruptCheckpoint: unreadable files, or packed tensors that contradict each other.
        SetupError: `quantization` differs from the folder's, or would quantize a second time.
    """
    try:
        checkpoint = Checkpoint(folder)
    except ModelNotFound as error:
        remedy = "Download them, or use --load-format dummy: random weights of the same shape, to plan and measure."
        raise ModelNotFound(f"{error} {remedy}") from error
    source = _as_stored(checkpoint, config.quantization)
    entry = architecture(config.architecture)
    if entry.has_transposed_matrices and source.quantization is None:
        source = Transposed(source)
    if entry.has_norms_by_head:
        source = StackedNorms(source)
    experts = next((layer.experts for layer in config.layers if layer.experts is not None), None)
    if experts is not None:
        source = UnstackedExperts(source, entry.expert_stacks, config.hidden_size, experts)
    if config.tie_word_embeddings:
        (head,), (embedding,) = (checkpoint_names(entry.names, f"{name}.weight") for name in ("lm_head", "embedding"))
        source = with_embedding(source, head, embedding)
    check_quantization(source, quantization)
    return source


def _as_stored(checkpoint: Checkpoint, stored: StoredQuantization | None) -> WeightSource:
    match stored:
        case None:
            return FloatWeights(checkpoint)
        case Fp8Config():
            return Fp8Weights(checkpoint, stored)
        case QuantizationConfig():
            return QuantizedCheckpoint(checkpoint, stored)
        case Mxfp4Config():
            return Mxfp4Weights(checkpoint)


def check_quantization(source: WeightSource, asked: Quantization | None) -> None:
    """Raise if weights would be quantized a second time, or are not stored in the format asked for.

    Raises:
        SetupError: `asked` is one of these.
    """
    if asked is None or asked == source.quantization:
        return
    if source.quantization is not None:
        raise SetupError(
            f"quantization={asked}: {source.path} is quantized already ({source.quantization}). Leave it out."
        )
    if asked not in get_args(QuantizationOnLoad):
        raise SetupError(
            f"quantization={asked}: {source.path} is not stored in that format. Leave it out, or quantize while "
            f"loading ({', '.join(get_args(QuantizationOnLoad))})."
        )


def load_model(
    source: WeightSource,
    config: ModelConfig,
    placement: Placement,
    *,
    quantization: Quantization | None = None,
    group_size: int = DEFAULT_GROUP_SIZE,
    cache: PackedCache | None = None,
) -> DecoderModel:
    """Load a model.

    Args:
        source: source of the weights.
        config: config of the same model.
        placement: operators, dtype, device and ranks; stored floats are converted to its dtype.
        quantization: quantization of float matrices that are multiplied; None keeps them in the placement's dtype.
        group_size: weights per scale, for int4.
        cache: keeps the packed weights; None: nothing is kept.

    Raises:
        UnsupportedModel: the architecture or the layout of a weight is not implemented.
        CorruptCheckpoint: unreadable files, errors of `check_weights`, or NaN or infinity in a tensor.
        InvalidParameter: errors of `check_weights`.
        SetupError: weights too large for the placement's dtype.
    """
    start_s = time.perf_counter()
    kind, parameters, parts = model_class(config.architecture), parameters_of(config), parts_of(config)
    check_weights(source, config, quantization, group_size)
    source = in_rotary_order(source, config)
    if placement.split.splits_by_expert:
        parameters = with_whole_experts(parameters, config, placement.split.own)
    packed = {name for name, shape in parameters.items() if is_packed(name, config, shape, source, parts[name])}
    dtype, operators = placement.dtype, placement.operators
    pieces = {
        name: pieces_of(source, parts[name], parameter, placement.split.own) for name, parameter in parameters.items()
    }
    wide = {name for name, shape in parameters.items() if shape.is_router}
    weights = _Weights(
        source, pieces, dtype, placement.device, packed, wide, _quantizer(quantization, group_size, operators)
    )
    weights = weights if cache is None else CachedWeights(weights, packed, cache)
    if config.tie_word_embeddings:
        _check_tied_head(source, parts["embedding.weight"][0], dtype)
    with contextlib.nullcontext() if cache is None else cache:
        model = kind(config, weights, placement)
    mib = weight_bytes(source, config, dtype, operators, quantization, group_size) >> 20
    log.info("%s: %d MiB of weights in %.1f s", source.path.name, mib, time.perf_counter() - start_s)
    return model


def check_weights(
    source: WeightSource, config: ModelConfig, quantization: Quantization | None, group_size: int = DEFAULT_GROUP_SIZE
) -> None:
    """Make all checks that are possible before the first weight is read.

    Args:
        source: source of the weights.
        config: config of the same model.
        quantization: quantization of float matrices that are multiplied; None keeps them.
        group_size: weights per scale, for int4.

    Raises:
        CorruptCheckpoint: tensors that are missing, extra or misshapen; all of them are named.
        UnsupportedModel: experts of one layer in several formats.
        InvalidParameter: a group size that does not divide the width of a weight.
    """
    check_stacks(source, config)
    check_shapes(source, config)
    check_formats(source, parts_of(config))
    if quantization == "int4":
        _check_widths(source, multiplied_parts(config), group_size)


def multiplied_parts(config: ModelConfig) -> set[str]:
    """Return checkpoint names of the matrices that are multiplied, which quantization applies to."""
    parts = parts_of(config)
    multiplied = (name for name, one in parameters_of(config).items() if is_multiplied(name, config, one))
    return {part for name in multiplied for part in parts[name]}


def router_parts(config: ModelConfig) -> set[str]:
    """Return checkpoint names of routers and gates of shared experts, which stay floats in quantized models."""
    parts = parts_of(config)
    return {part for name, one in parameters_of(config).items() if one.is_router for part in parts[name]}


def read_float(source: WeightSource, name: str, dtype: torch.dtype) -> Tensor:
    """Return one weight of an unquantized source in `dtype`, possibly as a view of the mapped file.

    Raises:
        CorruptCheckpoint: it has NaN or infinity.
        SetupError: it is too large for `dtype`.
    """
    stored = source.read(name, dtype)
    assert isinstance(stored, Tensor), name
    found = stored.to(dtype).contiguous()
    if not _is_finite(found):
        _refuse_not_finite(source, name, dtype)
    return found


def _quantizer(
    quantization: Quantization | None, group_size: int, operators: Operators
) -> Callable[[Tensor], QuantizedWeight] | None:
    """Return the backend's quantizer; None if the checkpoint's own format is kept."""
    if quantization == "int8":
        return operators.quantize_per_channel
    if quantization == "fp8":
        return quantize_fp8
    if quantization == "int4":
        return lambda weight: operators.quantize_in_groups(weight, group_size)
    return None


class _Weights(Mapping[str, Weight]):
    """A model's weights by our names, read on access and not kept, so that packing needs no second copy."""

    def __init__(
        self,
        source: WeightSource,
        pieces: Mapping[str, Sequence[Piece]],
        dtype: torch.dtype,
        device: torch.device,
        packed: Set[str],
        wide: Set[str],
        quantize: Callable[[Tensor], QuantizedWeight] | None,
    ) -> None:
        self._source, self._pieces = source, pieces
        # checked once: isinstance with a protocol takes longer than packing a small matrix
        self._rows_of_files = source if isinstance(source, StoresRows) else None
        self._num_read = 0
        """Numbers read since memory was last trimmed."""
        self._dtype, self._device = dtype, device
        self._packed, self._wide, self._quantize = packed, wide, quantize

    def __getitem__(self, name: str) -> Weight:
        pieces = self._pieces[name]
        self._give_back(pieces)
        if name in self._wide:
            return self._read_float32(pieces[0].name)
        if name not in self._packed:
            found = stack([self._read_piece(piece, copy=True) for piece in pieces])
            assert not isinstance(found, StackedWeight), name
            return _plain(found)
        if is_one_weight(self._source, pieces):
            return self._streamed(pieces, self._stored(pieces))
        stored = [self._stored([piece]) for piece in pieces]
        if all(found is not None for found in stored):
            if (together := self._stored(pieces)) is not None:
                return self._streamed(pieces, together)
            if len({self._source.weights[piece.name].format for piece in pieces}) > 1:
                parts = (self._streamed([piece], found) for piece, found in zip(pieces, stored, strict=True))
                return StackedWeight(tuple(parts))
        # `stack` compares the formats of all pieces
        return stack([self._on_load(self._read_piece(piece)) for piece in pieces])

    def _give_back(self, pieces: Sequence[Piece]) -> None:
        """Return unused memory to the system at intervals; holes too small for the next weight would add up."""
        self._num_read += sum(
            piece.num_rows * math.prod(self._source.weights[piece.name].shape[1:]) for piece in pieces
        )
        if self._num_read >= _NUMBERS_BEFORE_TRIM:
            return_unused()
            self._num_read = 0

    def _streamed(self, pieces: Sequence[Piece], stored: StoredRows | None) -> StreamedWeight:
        shape = (sum(piece.num_rows for piece in pieces), self._source.weights[pieces[0].name].shape[1])
        return StreamedWeight(shape, self._dtype, partial(self._rows, pieces), stored)

    def _stored(self, pieces: Sequence[Piece]) -> StoredRows | None:
        """Return where pieces are stored; None if not in files as packed, or in blocks of several types."""
        found: list[StoredRows] = []
        for piece in pieces:
            rows = None if self._rows_of_files is None else self._rows_of_files.stored_rows(piece.name)
            if rows is None:
                return None
            found.append(rows.select_rows(slice(piece.begin, piece.begin + piece.num_rows)))
        return StoredRows.stack(found)

    def _rows(self, pieces: Sequence[Piece], begin: int, end: int) -> Tensor | QuantizedWeight:
        """Return rows [begin, end) of stacked pieces."""
        found: list[Tensor | QuantizedWeight] = []
        for piece in pieces:
            first, last = max(begin, 0), min(end, piece.num_rows)
            if first < last:
                found.append(self._read_rows(piece.name, slice(piece.begin + first, piece.begin + last)))
            begin, end = begin - piece.num_rows, end - piece.num_rows
        rows = stack(found)
        assert not isinstance(rows, StackedWeight), pieces
        return self._on_load(rows)

    def _read_piece(self, piece: Piece, *, copy: bool = False) -> Tensor | QuantizedWeight:
        """Return the rows of a piece; a weight that is not stored by rows is read whole."""
        if piece.is_whole:
            return self._read(piece.name, copy=copy)
        rows = slice(piece.begin, piece.begin + piece.num_rows)
        if self._source.weights[piece.name].is_by_rows:
            return self._read_rows(piece.name, rows, copy=copy)
        return _rows_of(self._read(piece.name), rows)

    def _read_rows(self, name: str, rows: slice, *, copy: bool = False) -> Tensor | QuantizedWeight:
        """Return some rows, whatever their begin: packed layouts hold up to ROWS_TOGETHER of them in a word."""
        before = rows.start % ROWS_TOGETHER
        found = self._read(name, slice(rows.start - before, rows.stop), copy=copy)
        return _rows_of(found, slice(before, None)) if before else found

    def _on_load(self, weight: Tensor | QuantizedWeight) -> Tensor | QuantizedWeight:
        return self._quantize(weight) if self._quantize is not None and isinstance(weight, Tensor) else weight

    def _read_float32(self, name: str) -> Tensor:
        """Return a whole weight in float32."""
        found = _plain(self._source.read(name, torch.float32)).to(self._device, torch.float32, copy=True)
        if not _is_finite(found):
            _refuse_not_finite(self._source, name, torch.float32)
        return found

    def _read(self, name: str, rows: slice = ALL_ROWS, *, copy: bool = False) -> Tensor | QuantizedWeight:
        """Return a weight, or some rows of it, on the device.

        With `copy` it has its own memory, because a view of the mapped file would change with the file. Packing
        copies in any case.
        """
        stored = self._source.read(name, self._dtype, rows)
        if isinstance(stored, QuantizedWeight):
            found = stored.to(self._device)
            is_finite = found.is_finite
        else:
            found = stored.to(device=self._device, dtype=self._dtype, copy=copy).contiguous()
            is_finite = _is_finite(found)
        if not is_finite:
            _refuse_not_finite(self._source, name, self._dtype)
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._pieces  # Mapping's default would read the weight

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)


def _rows_of(weight: Tensor | QuantizedWeight, rows: slice) -> Tensor | QuantizedWeight:
    """Return some rows in memory of their own."""
    return weight[rows].clone() if isinstance(weight, Tensor) else weight.select_rows(rows)


def _is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor has neither NaN nor infinity; usually one cheap pass, since both survive a sum.

    If only the sum overflows, the elements are checked.
    """
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())


def _refuse_not_finite(source: WeightSource, name: str, dtype: torch.dtype) -> NoReturn:
    stored, name = source.read(name, dtype), source.weights[name].stored_name or name
    if isinstance(stored, QuantizedWeight) or not _is_finite(stored):
        raise CorruptCheckpoint(f"{source.path}: NaN or infinity in {name}. Download the model again.")
    raise SetupError(
        f"dtype={str(dtype).removeprefix('torch.')}: {name} has numbers beyond the dtype's maximum, "
        f"{torch.finfo(dtype).max:g}. Use a wider one (--dtype bfloat16, --dtype float32)."
    )


def _check_widths(source: WeightSource, names: Set[str], group_size: int) -> None:
    for name in sorted(names):
        k = source.weights[name].shape[-1]
        if k % group_size:
            dividing = [str(size) for size in GROUP_SIZES if k % size == 0]
            remedy = (
                f"Use {' or '.join(dividing)}, or"
                if dividing
                else f"None of {', '.join(map(str, GROUP_SIZES))} does; use"
            )
            raise InvalidParameter(
                "group_size",
                group_size,
                f"does not divide the {k} inputs of {name}, as it must for int4",
                f"{remedy} int8, whose scales are for whole rows.",
            )


def _check_tied_head(source: WeightSource, embedding: str, dtype: torch.dtype) -> None:
    if "lm_head.weight" not in source.weights:
        return
    head, table = (_plain(source.read(name, dtype)) for name in ("lm_head.weight", embedding))
    if not torch.equal(head, table):
        raise CorruptCheckpoint(
            "config.json ties lm_head.weight to the embedding, but the checkpoint has a different lm_head.weight. "
            "Set tie_word_embeddings to false to use it."
        )


def _plain(weight: Tensor | QuantizedWeight) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.dequantize()
