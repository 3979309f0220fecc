"""Remembered: what is known before, or after, the events that it belongs to."""

from __future__ import annotations

from typing import Generic, TypeVar

MAX_REMEMBERED = 4096
"""Far more than can be on its way at once."""

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class Remembered(dict[_Key, _Value], Generic[_Key, _Value]):
    """A dict that forgets the oldest when there are too many, because the event may never come."""

    def put(self, key: _Key, value: _Value) -> None:
        """Keeps it."""
        self[key] = value
        while len(self) > MAX_REMEMBERED:
            del self[next(iter(self))]
