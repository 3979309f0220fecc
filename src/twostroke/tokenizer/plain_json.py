"""Copies out of plain JSON types: all that a chat template is allowed to see of what a client sends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from twostroke.errors import InvalidPrompt

JSON = dict[str, Any]

MAX_DEPTH = 64
"""Levels of lists and objects within messages and tools."""


def plain_json(value: Any, where: str, depth: int = 0) -> Any:
    """Return a copy out of plain JSON types; objects with methods could do things that the sandbox does not know of.

    Raises:
        InvalidPrompt: a value of another type, or nested too deep; `where` says where it is.
    """
    if depth > MAX_DEPTH:
        raise InvalidPrompt(f"{where} is nested more than {MAX_DEPTH} levels deep.")
    if value is None or isinstance(value, bool):
        return value
    for kind, copy in ((str, str.__str__), (int, int.__int__), (float, float.__float__)):
        if isinstance(value, kind):
            return cast(Any, copy)(value)
    if isinstance(value, Mapping):
        items = cast(Mapping[Any, Any], value).items()
        return {_key(key, where): plain_json(item, f"{where}.{key}", depth + 1) for key, item in items}
    if isinstance(value, (list, tuple)):
        return [plain_json(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(cast(Sequence[Any], value))]
    raise InvalidPrompt(f"{where} is no JSON value; nothing else can be put into a prompt.")


def _key(key: Any, where: str) -> str:
    if not isinstance(key, str):
        raise InvalidPrompt(f"{where} has the key {key!r}; keys must be texts.")
    return str.__str__(key)
