"""Rows of stored weights that make up a weight of a model, for the loader and for computing its size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from twostroke.config.model import ModelConfig
from twostroke.model.decoder import Parameter
from twostroke.model.weight_source import WeightSource


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows [begin, begin + num_rows) of a stored weight."""

    name: str
    begin: int
    num_rows: int
    is_whole: bool


def is_multiplied(name: str, config: ModelConfig, parameter: Parameter) -> bool:
    """Return whether a parameter is a matrix multiplied in the model's dtype.

    Tables are not, unless the table is also the head; norms' weights and routers are not.
    """
    is_other = parameter.is_wide or parameter.is_table or parameter.is_router
    is_matrix = parameter.columns is not None and not is_other
    return is_matrix and (name != "embedding.weight" or config.tie_word_embeddings)


def is_packed(name: str, config: ModelConfig, parameter: Parameter, source: WeightSource, parts: Sequence[str]) -> bool:
    """Return whether an operator packs a parameter: a multiplied matrix, or a table that is stored quantized.

    Args:
        name: our name.
        config: config of the model.
        parameter: its shape.
        source: source of the weights.
        parts: names of its stored parts.
    """
    if is_multiplied(name, config, parameter):
        return True
    is_table = parameter.columns is not None and parameter.is_split and not parameter.is_wide
    return is_table and all(source.weights[part].format is not None for part in parts)


def with_whole_experts(
    parameters: Mapping[str, Parameter], config: ModelConfig, own: Callable[[int], range]
) -> dict[str, Parameter]:
    """Return the parameters of a rank that has some whole experts of each layer.

    Args:
        parameters: parameters of the model.
        config: config of the same model.
        own: returns the experts that the rank has of a given number.
    """
    found: dict[str, Parameter] = {}
    for name, parameter in parameters.items():
        layer, is_of_one, rest = name.partition(".experts.")
        if not is_of_one:
            found[name] = parameter
            continue
        spec = config.layers[int(layer.removeprefix("layers."))].experts
        assert spec is not None, name
        if int(rest.partition(".")[0]) in own(spec.num_experts):
            found[name] = replace(parameter, is_split=False)
    return found


def pieces_of(
    source: WeightSource, parts: Sequence[str], parameter: Parameter, own: Callable[[int], range]
) -> tuple[Piece, ...]:
    """Return the rows of stored parts that a rank has, for example its rows of q, of k and of v.

    Args:
        source: source of the weights.
        parts: names of the stored parts, in order.
        parameter: the parameter that they make up.
        own: returns the rows that the rank has of a given number.
    """
    found: list[Piece] = []
    num_stored = [source.weights[part].shape[0] for part in parts]
    offset = 0
    for num_rows in parameter.rows:
        mine = parameter.own_rows(num_rows, own)
        wanted, offset = range(offset + mine.start, offset + mine.stop), offset + num_rows
        start = 0
        for part, size in zip(parts, num_stored, strict=True):
            begin, end = max(wanted.start - start, 0), min(wanted.stop - start, size)
            if begin < end:
                found.append(Piece(part, begin, end - begin, end - begin == size))
            start += size
    return _joined(found, dict(zip(parts, num_stored, strict=True)))


def is_one_weight(source: WeightSource, pieces: Sequence[Piece]) -> bool:
    """Return whether the pieces are read a few rows at a time into one packed weight, whatever their formats."""
    stored = [source.weights[piece.name] for piece in pieces]
    is_of_floats = all(part.format is None for part in stored)
    return is_of_floats or (len({piece.name for piece in pieces}) == 1 and stored[0].is_by_rows)


def _joined(pieces: Sequence[Piece], num_stored: Mapping[str, int]) -> tuple[Piece, ...]:
    """Merge adjacent pieces of one stored weight."""
    found: list[Piece] = []
    for piece in pieces:
        last = found[-1] if found else None
        if last is not None and last.name == piece.name and last.begin + last.num_rows == piece.begin:
            num_rows = last.num_rows + piece.num_rows
            found[-1] = Piece(piece.name, last.begin, num_rows, num_rows == num_stored[piece.name])
        else:
            found.append(piece)
    return tuple(found)
