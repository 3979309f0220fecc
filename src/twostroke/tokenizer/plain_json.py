"""Copies out of plain JSON types: all that a chat template is allowed to see of what a client sends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any, cast

from twostroke.errors import InvalidPrompt, shown

JSON = dict[str, Any]

MAX_DEPTH = 64
"""Levels of lists and objects within messages and tools."""
_PLAIN = frozenset({str, int, float, bool, NoneType})
_MAX_KEY = 64
"""Characters of a key that a message shows."""


class _Unfit(Exception):
    """A value that cannot be copied; who holds it adds the place.

    Args:
        told: what is wrong with it.
    """

    def __init__(self, told: str) -> None:
        super().__init__(told)
        self.told = told
        self.place: list[str] = []
        """Keys and indices, the innermost first."""


def plain_json(value: Any, where: str, depth: int = 0) -> Any:
    """Return a copy out of plain JSON types; objects with methods could do things that the sandbox does not know of.

    Raises:
        InvalidPrompt: a value of another type, or nested too deep; `where` says where it is.
    """
    try:
        return _copied(value, depth)
    except _Unfit as error:
        raise InvalidPrompt(f"{where}{''.join(reversed(error.place))} {error.told}") from None


def _copied(value: Any, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise _Unfit(f"is nested more than {MAX_DEPTH} levels deep.")
    if type(value) in _PLAIN:
        return value
    for kind, copy in ((str, str.__str__), (int, int.__int__), (float, float.__float__)):
        if isinstance(value, kind):
            return cast(Any, copy)(value)
    if isinstance(value, Mapping):
        return _copied_object(cast(Mapping[Any, Any], value), depth)
    if isinstance(value, (list, tuple)):
        return _copied_list(cast(Sequence[Any], value), depth)
    raise _Unfit("is no JSON value; nothing else can be put into a prompt.")


def _copied_object(given: Mapping[Any, Any], depth: int) -> JSON:
    copy: JSON = {}
    for key, item in given.items():
        if not isinstance(key, str):
            raise _Unfit(f"has the key {shown(key)}; keys must be texts.")
        try:
            copy[str.__str__(key)] = _copied(item, depth + 1)
        except _Unfit as error:
            error.place.append(f".{key[:_MAX_KEY]}")
            raise
    return copy


def _copied_list(given: Sequence[Any], depth: int) -> list[Any]:
    copy: list[Any] = []
    for index, item in enumerate(given):
        try:
            copy.append(_copied(item, depth + 1))
        except _Unfit as error:
            error.place.append(f"[{index}]")
            raise
    return copy
