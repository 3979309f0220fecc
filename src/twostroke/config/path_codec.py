"""Hooks for paths in messages: settings contain paths, and msgspec has no type for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def plain_path(value: Any) -> str:
    """Return a path as a string: an `enc_hook` of msgspec.

    Raises:
        NotImplementedError: the value is no path.
    """
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} cannot be serialized")


def read_path(kind: type, value: Any) -> Any:
    """Return a string as a path: a `dec_hook` of msgspec.

    Raises:
        NotImplementedError: another type is wanted.
    """
    if issubclass(kind, Path):
        return Path(value)
    raise NotImplementedError(f"{kind.__name__} cannot be serialized")
