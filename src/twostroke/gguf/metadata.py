"""The keys of a GGUF file, with a checked accessor for each kind of value."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from twostroke.errors import CorruptCheckpoint, shown

MAX_COUNT = 2**31 - 1


class Metadata:
    """Metadata values by key. A key requested without a default must exist.

    Every method raises CorruptCheckpoint, with file, key and value, if the value is of another kind.
    """

    def __init__(self, file_name: str, values: Mapping[str, Any]) -> None:
        self.file_name = file_name
        self._values = values

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def is_list(self, key: str) -> bool:
        """Return whether the value is a list; False if the key is absent."""
        return isinstance(self._values.get(key), list)

    def plain(self, prefix: str) -> dict[str, Any]:
        """Return the numbers and flags whose keys begin with `prefix`, by the rest of the key, unchecked."""
        return {
            key.removeprefix(prefix): value
            for key, value in self._values.items()
            if key.startswith(prefix) and isinstance(value, bool | int | float)
        }

    def text(self, key: str, default: str | None = None) -> str:
        """Return the value of a key that holds a string."""
        return self._get(key, default, "a string", lambda value: isinstance(value, str))

    def flag(self, key: str, default: bool | None = None) -> bool:
        """Return the value of a key that holds a boolean."""
        return self._get(key, default, "true or false", lambda value: isinstance(value, bool))

    def count(self, key: str, default: int | None = None, *, least: int = 1, most: int = MAX_COUNT) -> int:
        """Return the value of a key that holds a whole number from `least` to `most`."""

        def is_one(value: Any) -> bool:
            return _is_whole(value) and least <= value <= most

        return self._get(key, default, f"a whole number, {least} to {most}", is_one)

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number; GGUF stores most in float32, so 1e-6 is read as 9.99999997e-07."""

        def is_one(value: Any) -> bool:
            return _is_whole(value) or (isinstance(value, float) and math.isfinite(value))

        return float(self._get(key, default, "a finite number", is_one))

    def number_or_flag(self, key: str) -> float | bool:
        """Return a finite number or a boolean as stored."""
        found = self._values.get(key)
        if not isinstance(found, bool):
            self.number(key)
        return cast(float | bool, found)

    def texts(self, key: str) -> list[str]:
        """Return the value of a key that holds a list of strings."""
        return self._list(key, "strings", str)

    def flags(self, key: str) -> list[bool]:
        """Return the value of a key that holds a list of booleans."""
        return self._list(key, "booleans", bool)

    def whole_numbers(self, key: str) -> list[int]:
        """Return the value of a key that holds a list of whole numbers."""
        return self._list(key, "whole numbers", int)

    def numbers(self, key: str) -> list[float]:
        """Return the value of a key that holds a list of numbers."""
        return self._list(key, "numbers", int, float)

    def refuse(self, key: str, wanted: str) -> CorruptCheckpoint:
        """Return the error for a value that is not `wanted`."""
        return CorruptCheckpoint(f"{self.file_name}: {key} must be {wanted}, found {shown(self._values[key])}.")

    def _get(self, key: str, default: Any, wanted: str, is_one: Callable[[Any], bool]) -> Any:
        if key not in self._values:
            if default is None:
                raise CorruptCheckpoint(f"{self.file_name}: the metadata has no {key}; it must be {wanted}.")
            return default
        if not is_one(self._values[key]):
            raise self.refuse(key, wanted)
        return self._values[key]

    def _list(self, key: str, wanted: str, *kinds: type) -> list[Any]:
        found = self._get(key, None, f"a list of {wanted}", lambda value: isinstance(value, list))
        # all values of an array have one type, so checking the first is enough
        if found and type(cast(object, found[0])) not in kinds:
            raise self.refuse(key, f"a list of {wanted}")
        return found


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
