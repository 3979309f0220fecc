"""Every field of every route that takes a text or a list, found in the published schema, and a body around each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

Schema = Mapping[str, Any]
Build = Callable[[Any], Any]
"""Puts a value into a body."""

_PART: Schema = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text", "type": "string"}, "text": {"type": "string"}},
}
_CONVERSATION: Schema = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["role", "content"],
        "properties": {
            "role": {"const": "user", "type": "string"},
            "content": {
                "anyOf": [
                    {"type": "string"},
                    {"type": "array", "items": {"anyOf": [_PART, {"type": "string"}]}},
                ]
            },
            "name": {"type": "string"},
            "refusal": {"type": "string"},
            "reasoning_content": {"type": "string"},
            "tool_call_id": {"type": "string"},
            "tool_calls": {
                "type": "array",
                "items": {
                    "type": "object",
                    "required": ["function"],
                    "properties": {
                        "id": {"type": "string"},
                        "function": {
                            "type": "object",
                            "required": ["name"],
                            "properties": {
                                "name": {"type": "string"},
                                "arguments": {"anyOf": [{"type": "string"}, {"type": "object"}]},
                            },
                        },
                    },
                },
            },
        },
    },
}
"""What the schema says nothing of: messages go to the model's template as they came."""
_CHATS = frozenset({"/v1/chat/completions", "/tokenize"})
_MARK = object()


@dataclass(frozen=True, slots=True)
class Field:
    """One field of one route."""

    route: str
    path: str
    """As errors name it: messages.0.content."""
    kinds: frozenset[str]
    """JSON types that it takes."""
    item_kinds: frozenset[str]
    """Of the elements of its list, where it takes one."""
    build: Build
    """Returns a body that is right but for the field's value."""

    def __str__(self) -> str:
        return f"{self.route} {self.path}"

    def body(self, value: bytes) -> bytes:
        """Return the body with this JSON as the field's value."""
        return _written(self.build(_MARK), value)


def fields_of(schema: Schema) -> list[Field]:
    """Return the fields of all routes that take a body, each once.

    Args:
        schema: OpenAPI's, as the server publishes it.
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
    """Through the schema of one route."""

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
        """Yield what a value may be, each by itself."""
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
        """Return a small value that is right."""
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
    """Return a value as JSON, with `mark` where _MARK stands."""
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
