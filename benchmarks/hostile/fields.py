"""Fields of every route that take a string or a list, found in the published schema, and a request body for each.

And JSON values of one size and different types for these fields: at least one is wrong for any field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

Schema = Mapping[str, Any]
Build = Callable[[Any], Any]
"""Function that puts a value into a body."""

_TEXT: Schema = {"type": "string"}


def _fixed(text: str) -> Schema:
    return {"const": text, **_TEXT}


def _any_of(*options: Schema) -> Schema:
    return {"anyOf": list(options)}


def _list_of(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _object_of(*required: str, **properties: Schema) -> Schema:
    return {"type": "object", "required": list(required), "properties": properties}


_PART = _object_of("type", "text", type=_fixed("text"), text=_TEXT)
_FUNCTION = _object_of("name", name=_TEXT, arguments=_any_of(_TEXT, {"type": "object"}))
_CONVERSATION = _list_of(
    _object_of(
        "role",
        "content",
        role=_fixed("user"),
        content=_any_of(_TEXT, _list_of(_any_of(_PART, _TEXT))),
        name=_TEXT,
        refusal=_TEXT,
        reasoning_content=_TEXT,
        tool_call_id=_TEXT,
        tool_calls=_list_of(_object_of("function", id=_TEXT, function=_FUNCTION)),
    )
)
"""Schema of messages, which the published one leaves open because they go to the model's template unchanged."""
_CHATS = frozenset({"/v1/chat/completions", "/tokenize"})
_MARK = object()


@dataclass(frozen=True, slots=True)
class Field:
    """One field of one route."""

    route: str
    path: str
    """Path of the field in errors: messages.0.content."""
    kinds: frozenset[str]
    """JSON types that it takes."""
    item_kinds: frozenset[str]
    """JSON types of its elements, if it takes a list."""
    build: Build
    """Function that returns a body that is valid except for the field's value."""

    def __str__(self) -> str:
        return f"{self.route} {self.path}"

    def body(self, value: bytes) -> bytes:
        """Return the body with this JSON as the field's value."""
        return _written(self.build(_MARK), value)


def fields_of(schema: Schema) -> list[Field]:
    """Return the fields of all routes that take a body, each once.

    Args:
        schema: OpenAPI schema that the server publishes.
    """
    found: dict[tuple[str, str], Field] = {}
    for route, operations in schema["paths"].items():
        post = operations.get("post", {})
        if "requestBody" not in post:
            continue
        body = post["requestBody"]["content"]["application/json"]["schema"]
        for found_field in _Walk(schema, route).fields(body, (), lambda value: value):
            found.setdefault((route, found_field.path), found_field)
    return list(found.values())


class _Walk:
    """Walk through the schema of one route."""

    def __init__(self, schema: Schema, route: str) -> None:
        self._schema = schema
        self._route = route

    def fields(self, node: Schema, path: tuple[str, ...], build: Build) -> Iterator[Field]:
        """Yield each field at or below a node."""
        options = list(self._options(node))
        kinds = self._kinds(options)
        items = [option["items"] for option in options if option.get("type") == "array" and "items" in option]
        if path and kinds & {"string", "array"}:
            item_kinds = self._kinds(self._options({"anyOf": items}))
            yield Field(self._route, ".".join(path), kinds, item_kinds, build)
        if items:
            yield from self.fields({"anyOf": items}, (*path, "0"), lambda value: build([value]))
        for option in options:
            for name, member in self._members(option).items():
                base = self._sample(option)

                def within(value: Any, name: str = name, base: Any = base) -> Any:
                    return build({**base, name: value})

                yield from self.fields(member, (*path, name), within)

    def _kinds(self, options: Iterable[Schema]) -> frozenset[str]:
        return frozenset(str(option.get("type", "any")) for option in options)

    def _options(self, node: Schema) -> Iterator[Schema]:
        """Yield each alternative of a value's schema."""
        if "$ref" in node:
            place: Any = self._schema
            for part in str(node["$ref"]).removeprefix("#/").split("/"):
                place = place[part]
            yield from self._options(place)
        elif "anyOf" in node or "oneOf" in node:
            for option in [*node.get("anyOf", ()), *node.get("oneOf", ())]:
                yield from self._options(option)
        else:
            yield node

    def _members(self, option: Schema) -> Mapping[str, Schema]:
        members: dict[str, Schema] = dict(option.get("properties", {}))
        if "messages" in members and self._route in _CHATS:
            members["messages"] = _CONVERSATION
        return members

    def _sample(self, node: Schema) -> Any:
        """Return a small valid value."""
        option = next(self._options(node))
        if "const" in option:
            return option["const"]
        if "enum" in option:
            return option["enum"][0]
        match option.get("type"):
            case "object":
                members = self._members(option)
                needed = cast(Sequence[str], option.get("required", ()))
                return {name: self._sample(members[name]) for name in needed}
            case "array":
                return [self._sample(option["items"])]
            case "integer" | "number":
                return max(1, option.get("minimum", 1))
            case "boolean":
                return False
            case "null":
                return None
            case _:
                return "x"


def _written(value: Any, mark: bytes) -> bytes:
    """Return a value as JSON, with `mark` in place of _MARK."""
    if value is _MARK:
        return mark
    if isinstance(value, dict):
        items = cast(dict[str, Any], value).items()
        return b"{" + b",".join(b'"%b":%b' % (key.encode(), _written(item, mark)) for key, item in items) + b"}"
    if isinstance(value, list):
        return b"[" + b",".join(_written(item, mark) for item in cast(list[Any], value)) + b"]"
    if isinstance(value, str):
        return b'"%b"' % value.encode()  # the samples need no escapes
    return b"null" if value is None else str(value).lower().encode()


def _items_of(item: bytes) -> Callable[[int], bytes]:
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
    "numbers": ("array", _items_of(b"1.5")),
    "whole numbers": ("array", _items_of(b"7")),
    "texts": ("array", _items_of(b'"ab"')),
    "objects": ("array", _items_of(b"{}")),
    "lists": ("array", _items_of(b"[]")),
    "nulls": ("array", _items_of(b"null")),
    "switches": ("array", _items_of(b"true")),
    "wrong at the end": ("array", _wrong_at_the_end),
    "nested lists": ("array", _nested_lists),
    "nested objects": ("object", _nested_objects),
    "keys": ("object", _keys),
    "digits": ("number", lambda size: b"9" * size),
    "text": ("string", lambda size: b'"%b"' % (b"a" * size)),
    "escapes": ("string", lambda size: b'"%b"' % (b"\\u0041" * (size // 6))),
}
"""JSON type and a function that makes a value of a given size, by name."""

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
"""JSON types of a value's elements, if it has elements."""


def wrong_for(field: Field) -> list[str]:
    """Return the names of values that are wrong for a field, or whose elements may be wrong."""
    return [name for name, (kind, _) in VALUES.items() if kind == "array" or kind not in field.kinds]


def is_right_within(field: Field, name: str) -> bool:
    """Return whether a field takes the elements of a value, though fewer of them, or takes any elements."""
    kinds = field.item_kinds if "array" in field.kinds else frozenset[str]()
    return "any" in kinds or bool(kinds & _ELEMENTS.get(name, frozenset()))


def value_of(name: str, size: int) -> bytes:
    """Return a value of about `size` bytes.

    >>> value_of("texts", 15)
    b'["ab","ab","ab"]'
    """
    return VALUES[name][1](size)
