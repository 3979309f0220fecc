"""Values of a parsed config.json, each checked for its type where it is read."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, TypeGuard, cast

from twostroke.errors import CorruptCheckpoint, UnsupportedModel, shown

MAX_COUNT = 2**31 - 1
"""Largest count of heads, rows or tokens: far above real configs, and products of a few stay within 64 bits."""


def with_defaults(defaults: Mapping[str, Any], given: Mapping[str, Any], left_out: Collection[str]) -> dict[str, Any]:
    """Return the config with defaults for absent keys.

    Args:
        defaults: by key.
        given: the config.
        left_out: keys for which null means the default; for other keys null is a value.

    >>> with_defaults({"rms_norm_eps": 1e-5, "sliding_window": 4096}, {"rms_norm_eps": None}, ["rms_norm_eps"])
    {'rms_norm_eps': 1e-05, 'sliding_window': 4096}
    """
    return {**defaults, **{key: value for key, value in given.items() if value is not None or key not in left_out}}


def read_count(given: Mapping[str, Any], name: str, default: int | None = None, *, most: int = MAX_COUNT) -> int:
    """Return a whole number from 1 to `most`.

    Raises:
        CorruptCheckpoint: the value is anything else, or absent without a default.
    """
    value = given.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
        wanted = f"an integer above 0 (at most {most})"
        raise CorruptCheckpoint(f"config.json: {name} must be {wanted}, found {shown(value)}.")
    return value


def read_count_or_0(given: Mapping[str, Any], name: str, most: int = MAX_COUNT) -> int:
    """Return a whole number from 0 to `most`, 0 if absent; raise CorruptCheckpoint for anything else."""
    value = given.get(name)
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise CorruptCheckpoint(f"config.json: {name} must be an integer from 0 to {most}, found {shown(value)}.")
    return value


def read_bool(given: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    """Return a boolean, the default if absent; raise CorruptCheckpoint for anything else."""
    value = given.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise CorruptCheckpoint(f"config.json: {name} must be true or false, found {shown(value)}.")
    return value


def one_value(given: Mapping[str, Any], name: str, others: Collection[str]) -> Any:
    """Return a value that configs have under one of several names; None if it is absent.

    Raises:
        CorruptCheckpoint: two of the names have different values.
    """
    found = {key: given[key] for key in (name, *others) if given.get(key) is not None}
    for key, value in found.items():
        first = next(iter(found))
        if value != found[first]:
            raise CorruptCheckpoint(
                f"config.json: {key} {shown(value)} contradicts {first} {shown(found[first])}; both are names of the "
                "same value."
            )
    return next(iter(found.values()), None)


def by_layer(given: Mapping[str, Any], name: str, num_layers: int) -> Any:
    """Return a value that configs may also give as a list with one equal entry for each layer.

    Raises:
        CorruptCheckpoint: the list has another length.
        UnsupportedModel: its entries differ.
    """
    value = given.get(name)
    if not isinstance(value, list):
        return value
    entries = read_list(given, name)
    if len(entries) != num_layers:
        raise CorruptCheckpoint(f"config.json: {name} has {len(entries)} entries for {num_layers} layers.")
    if any(entry != entries[0] for entry in entries):
        raise UnsupportedModel(f"config.json: {name} must be one value for all layers, found {shown(entries)}.")
    return entries[0]


def read_mapping(given: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return an object, empty if absent; raise CorruptCheckpoint for anything else."""
    value = given.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise CorruptCheckpoint(f"config.json: {name} must be an object, found {shown(value)}.")
    return cast(Mapping[str, Any], value)


def read_list(given: Mapping[str, Any], name: str) -> list[Any]:
    """Return a list, empty if absent; raise CorruptCheckpoint for anything else."""
    value = given.get(name)
    if value is None:
        return []
    if not isinstance(value, list | tuple):
        raise CorruptCheckpoint(f"config.json: {name} must be a list, found {shown(value)}.")
    return list(cast(list[Any], value))


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a value is a finite number and no boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -math.inf < value < math.inf
