"""Bounded dictionary for facts that arrive before or after the events they belong to."""

from __future__ import annotations

from typing import Generic, TypeVar

MAX_BOUNDED_ENTRIES = 4096
"""Maximum number of entries, far more than can be in transit at once."""

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class BoundedDict(dict[_Key, _Value], Generic[_Key, _Value]):
    """Dictionary that drops its oldest entries beyond a limit, because the matching event may never come."""

    def put(self, key: _Key, value: _Value) -> None:
        """Add an entry and drop the oldest ones beyond the limit."""
        self[key] = value
        while len(self) > MAX_BOUNDED_ENTRIES:
            del self[next(iter(self))]
