"""JSON values of one size, each of another type: at least one is wrong for any field."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from benchmarks.hostile.fields import Field


def _list_of(item: bytes) -> Callable[[int], bytes]:
    def make(size: int) -> bytes:
        return b"[%b]" % b",".join([item] * max(1, size // (len(item) + 1)))

    return make


def _wrong_at_the_end(size: int) -> bytes:
    return b'[%b,"x",{}]' % b",".join([b"7"] * max(1, size // 2))


def _nested_lists(size: int) -> bytes:
    return b"[" * (size // 2) + b"]" * (size // 2)


def _nested_objects(size: int) -> bytes:
    return b'{"a":' * (size // 6) + b"7" + b"}" * (size // 6)


def _keys(size: int) -> bytes:
    return b"{%b}" % b",".join(b'"k%06d":7' % number for number in range(max(1, size // 12)))


VALUES: Mapping[str, tuple[str, Callable[[int], bytes]]] = {
    "numbers": ("array", _list_of(b"1.5")),
    "whole numbers": ("array", _list_of(b"7")),
    "texts": ("array", _list_of(b'"ab"')),
    "objects": ("array", _list_of(b"{}")),
    "lists": ("array", _list_of(b"[]")),
    "nulls": ("array", _list_of(b"null")),
    "switches": ("array", _list_of(b"true")),
    "wrong at the end": ("array", _wrong_at_the_end),
    "nested lists": ("array", _nested_lists),
    "nested objects": ("object", _nested_objects),
    "keys": ("object", _keys),
    "digits": ("number", lambda size: b"9" * size),
    "text": ("string", lambda size: b'"%b"' % (b"a" * size)),
    "escapes": ("string", lambda size: b'"%b"' % (b"\\u0041" * (size // 6))),
}
"""Name to the JSON type, and what makes one of so many bytes."""

_ELEMENTS: Mapping[str, frozenset[str]] = {
    "numbers": frozenset({"number"}),
    "whole numbers": frozenset({"number", "integer"}),
    "wrong at the end": frozenset({"number", "integer"}),
    "texts": frozenset({"string"}),
    "objects": frozenset({"object"}),
    "lists": frozenset({"array"}),
    "nulls": frozenset({"null"}),
    "switches": frozenset({"boolean"}),
}
"""JSON types of the elements, where they have one."""


def wrong_for(field: Field) -> list[str]:
    """Return the names of values that are wrong for a field, or that are right as a whole and wrong within."""
    return [name for name, (kind, _) in VALUES.items() if kind == "array" or kind not in field.kinds]


def is_right_within(field: Field, name: str) -> bool:
    """Return whether a field takes the elements of a value, though not so many; or whether it takes any."""
    kinds = field.item_kinds if "array" in field.kinds else frozenset[str]()
    return "any" in kinds or bool(kinds & _ELEMENTS.get(name, frozenset()))


def value_of(name: str, size: int) -> bytes:
    """Return a value of about `size` bytes.

    >>> value_of("texts", 15)
    b'["ab","ab","ab"]'
    """
    return VALUES[name][1](size)
