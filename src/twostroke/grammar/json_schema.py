"""JSON schemas without what constrains nothing: llguidance refuses every keyword and format that it does not know.

A schema may hold more than rules: formats that are notes to people (`password`, `byte`), keywords that only concern
values of another type, and rules that every value keeps (`uniqueItems` false, `contains` beside `minContains` 0).
Leaving these out changes no answer. A keyword that does constrain stays, and is refused by name where it cannot be
followed.

See JSON Schema 2020-12, https://json-schema.org/draft/2020-12/json-schema-validation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

Schema = dict[str, Any]

KNOWN_FORMATS = frozenset({"date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"})
"""Formats that answers are held to; all others are annotations, as the standard has it by default."""

_NOTES = frozenset({"title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly"})
_ONE = ("additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then",
        "unevaluatedItems", "unevaluatedProperties")  # fmt: skip
_SEVERAL = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_NAMED = ("$defs", "definitions", "dependentSchemas", "dependencies", "patternProperties", "properties")
"""Keywords whose value is a schema, a list of schemas, or schemas by name."""


def constraining(schema: Any) -> Any:
    """Return a schema of the same values, without keywords and formats that constrain nothing.

    Args:
        schema: JSON. What is no schema is returned as it is: whoever compiles it says so.
    """
    if not isinstance(schema, dict):
        return schema
    found = _with_constraining_parts(cast(Schema, schema))
    for name, constrains_nothing in _RULES.items():
        if name in found and constrains_nothing(found):
            del found[name]
    return found


def _with_constraining_parts(schema: Schema) -> Schema:
    found: Schema = {}
    for name, value in schema.items():
        if name in _NAMED and isinstance(value, dict):
            found[name] = {key: constraining(part) for key, part in cast(Schema, value).items()}
        elif name in _SEVERAL and isinstance(value, list):
            found[name] = [constraining(part) for part in cast(list[Any], value)]
        elif name in _ONE:
            found[name] = constraining(value)
        elif name == "$dynamicAnchor":
            found.setdefault("$anchor", value)  # to `$ref` it is one; `$dynamicRef`, to which it is more, is refused
        else:
            found[name] = value
    return found


def _accepts_all(schema: Any) -> bool:
    """Whether every value fits."""
    return schema is True or (isinstance(schema, dict) and not set(cast(Schema, schema)) - _NOTES)


def _excludes(schema: Schema, kind: str) -> bool:
    """Whether no value of a type fits, because the schema names other types."""
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return kinds != kind
    return isinstance(kinds, list) and kind not in kinds


def _names_need_nothing(schema: Schema) -> bool:
    """Whether every name of a property fits: names are texts."""
    names = schema["propertyNames"]
    if isinstance(names, dict):
        names = {key: value for key, value in cast(Schema, names).items() if key != "type" or value != "string"}
    return _accepts_all(names)


def _accepts_none(schema: Any) -> bool:
    """Whether no value fits, because the schema says so in so many words."""
    return schema is False or (isinstance(schema, dict) and _accepts_all(cast(Schema, schema).get("not", False)))


def _has_no_type_of(schema: Schema, other: Any) -> bool:
    """Whether no value of a type that `schema` names fits `other`, because that one names other types."""
    kinds = schema.get("type")
    named = [kinds] if isinstance(kinds, str) else cast(list[Any], kinds) if isinstance(kinds, list) else []
    if not named or not all(isinstance(kind, str) for kind in named) or not isinstance(other, dict):
        return False
    alike = {"integer": ("integer", "number"), "number": ("integer", "number")}
    return all(_excludes(cast(Schema, other), each) for kind in named for each in alike.get(kind, (kind,)))


def _all_are_evaluated(schema: Schema, name: str) -> bool:
    """Whether a keyword for what no other keyword has looked at finds nothing, or takes all that it finds."""
    if name == "unevaluatedProperties":
        return "additionalProperties" in schema or _accepts_all(schema[name])
    items = schema.get("items")
    return isinstance(items, (bool, dict)) or _accepts_all(schema[name])


def _holds_at_most_one_item(schema: Schema) -> bool:
    most, first = schema.get("maxItems"), schema.get("prefixItems", [])
    if schema.get("items") is False and isinstance(first, list):
        number = len(cast(list[Any], first))
        most = min(number, most) if isinstance(most, int) else number
    return isinstance(most, int) and most <= 1


def _needs_no_item(schema: Schema) -> bool:
    """Whether `contains` with its bounds is kept by every list."""
    return schema.get("minContains") == 0 and "maxContains" not in schema


def _dependents_are_required(schema: Schema) -> bool:
    required = schema.get("required")
    known = cast(list[Any], required) if isinstance(required, list) else []
    return _all_named(
        schema["dependentRequired"],
        lambda names: isinstance(names, list) and all(name in known for name in cast(list[Any], names)),
    )


def _dependencies_are_kept(schema: Schema) -> bool:
    return _all_named(schema["dependencies"], lambda part: part == [] or _accepts_all(part))


def _all_named(parts: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(parts, dict) and all(fits(part) for part in cast(Schema, parts).values())


def _branches_accept_all(schema: Schema) -> bool:
    return all(_accepts_all(schema.get(name, True)) for name in ("then", "else"))


_RULES: Mapping[str, Callable[[Schema], bool]] = {
    "format": lambda s: s["format"] not in [*KNOWN_FORMATS] or _excludes(s, "string"),
    "propertyNames": lambda s: _excludes(s, "object") or _names_need_nothing(s),
    "dependentRequired": lambda s: _excludes(s, "object") or _dependents_are_required(s),
    "dependentSchemas": lambda s: _excludes(s, "object") or _all_named(s["dependentSchemas"], _accepts_all),
    "dependencies": lambda s: _excludes(s, "object") or _dependencies_are_kept(s),
    "unevaluatedProperties": lambda s: _excludes(s, "object") or _all_are_evaluated(s, "unevaluatedProperties"),
    "unevaluatedItems": lambda s: _excludes(s, "array") or _all_are_evaluated(s, "unevaluatedItems"),
    "additionalItems": lambda s: _excludes(s, "array") or _accepts_all(s["additionalItems"]),
    "uniqueItems": lambda s: s["uniqueItems"] is False or _excludes(s, "array") or _holds_at_most_one_item(s),
    "contains": lambda s: _excludes(s, "array") or _needs_no_item(s),
    # these two follow "contains": without it they say nothing
    "minContains": lambda s: "contains" not in s,
    "maxContains": lambda s: "contains" not in s,
    "not": lambda s: _accepts_none(s["not"]) or _has_no_type_of(s, s["not"]),
    "if": _branches_accept_all,
    # these two follow "if"
    "then": lambda s: "if" not in s,
    "else": lambda s: "if" not in s,
    "$recursiveAnchor": lambda s: True,  # only `$recursiveRef` looks for it, and that one is refused
}
"""Keyword to whether it constrains nothing in this schema, in the order in which they are looked at."""
