"""The keys of a GGUF file, each read as what it has to be."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from twostroke.errors import CorruptCheckpoint, shown

MAX_COUNT = 2**31 - 1


class Metadata:
    """Values by key. A key that is asked for without a default must be there.

    Every method raises CorruptCheckpoint, with file, key and value, where the value is of another kind.
    """

    def __init__(self, file_name: str, values: Mapping[str, Any]) -> None:
        self.file_name = file_name
        self._values = values

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def is_list(self, key: str) -> bool:
        """Whether its value is a list; False where there is none."""
        return isinstance(self._values.get(key), list)

    def plain(self, prefix: str) -> dict[str, Any]:
        """The numbers and flags whose keys begin with a prefix, by the rest of the key; not checked."""
        return {
            key.removeprefix(prefix): value
            for key, value in self._values.items()
            if key.startswith(prefix) and isinstance(value, bool | int | float)
        }

    def text(self, key: str, default: str | None = None) -> str:
        """A text."""
        return self._get(key, default, "a text", lambda value: isinstance(value, str))

    def flag(self, key: str, default: bool | None = None) -> bool:
        """True or false."""
        return self._get(key, default, "true or false", lambda value: isinstance(value, bool))

    def count(self, key: str, default: int | None = None, *, least: int = 1, most: int = MAX_COUNT) -> int:
        """A whole number."""

        def is_one(value: Any) -> bool:
            return _is_whole(value) and least <= value <= most

        return self._get(key, default, f"a whole number, {least} to {most}", is_one)

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number; GGUF has most of them in float32, so 1e-6 comes as 9.99999997e-07."""

        def is_one(value: Any) -> bool:
            return _is_whole(value) or (isinstance(value, float) and math.isfinite(value))

        return float(self._get(key, default, "a finite number", is_one))

    def number_or_flag(self, key: str) -> float | bool:
        """A finite number, whole or not, or true or false; as it is stored."""
        found = self._values.get(key)
        if not isinstance(found, bool):
            self.number(key)
        return cast(float | bool, found)

    def texts(self, key: str) -> list[str]:
        """A list of texts."""
        return self._list(key, "texts", str)

    def flags(self, key: str) -> list[bool]:
        """A list of booleans."""
        return self._list(key, "booleans", bool)

    def whole_numbers(self, key: str) -> list[int]:
        """A list of whole numbers."""
        return self._list(key, "whole numbers", int)

    def numbers(self, key: str) -> list[float]:
        """A list of numbers."""
        return self._list(key, "numbers", int, float)

    def refuse(self, key: str, wanted: str) -> CorruptCheckpoint:
        """What to raise when a value is not `wanted`."""
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
        # one type for all of an array's values, so the first speaks for them
        if found and type(cast(object, found[0])) not in kinds:
            raise self.refuse(key, f"a list of {wanted}")
        return found


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
