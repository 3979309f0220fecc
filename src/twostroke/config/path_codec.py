"""Paths in messages: settings hold them, and msgspec knows no paths."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def plain_path(value: Any) -> str:
    """Return a path as a text: an `enc_hook` of msgspec.

    Raises:
        NotImplementedError: it is no path.
    """
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} does not travel")


def read_path(kind: type, value: Any) -> Any:
    """Return a text as a path: a `dec_hook` of msgspec.

    Raises:
        NotImplementedError: another type is wanted.
    """
    if issubclass(kind, Path):
        return Path(value)
    raise NotImplementedError(f"{kind.__name__} does not travel")
