"""Argument values written as plain text between tags, converted to JSON by the types of the tool's schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from twostroke.api.parsers.output import Output
from twostroke.api.parsers.python_calls import literal_as_json
from twostroke.api.parsers.source import Reading, Source, Stops

_WORDS = {
    "true": ("true", {"boolean"}),
    "false": ("false", {"boolean"}),
    "null": ("null", {"null"}),
    "none": ("null", {"null"}),
}
"""Words that models write as JSON, Python or in capitals, each with its JSON and the types that have it."""


def read_plain_value(source: Source, output: Output, schema: Any, ends: Stops) -> Reading[str]:
    """Read an argument's value up to the first of the ends, which stays unread and is returned; "" if none comes.

    Strings are emitted as they come, other values when complete. A value that is cut off is emitted unchanged.

    Args:
        source: source, positioned at the value.
        output: receives the value as JSON.
        schema: schema of the argument.
        ends: texts that may follow the value.
    """
    if types_of(schema) == {"string"}:
        output.arguments('"')
        end = yield from source.copy_until(ends, lambda text: output.arguments(_in_quotes(text)))
        output.arguments('"' if end else "")
    else:
        held: list[str] = []
        end = yield from source.copy_until(ends, held.append)
        text = "".join(held)
        output.arguments(as_json(text, types_of(schema)) if end else text)
    return end


def types_of(schema: Any) -> set[str]:
    """Return the JSON types that a schema allows; empty if it does not say.

    >>> sorted(types_of({"anyOf": [{"type": "string"}, {"type": "null"}]}))
    ['null', 'string']
    """
    types: set[str] = set()
    pending = [schema]
    while pending:
        match pending.pop():
            case str() as name:
                types.add(name)
            case list() as names_or_schemas:
                pending += names_or_schemas
            case Mapping() as part:
                pending += [part.get("type"), part.get("anyOf"), part.get("oneOf")]
                if "type" not in part and isinstance(part.get("enum"), list):
                    pending += ["string" for value in part["enum"] if isinstance(value, str)]
            case _:
                pass
    return types


def as_json(text: str, types: set[str]) -> str:
    """Return a plain-text value as JSON of one of the types.

    A text that matches none of them becomes a string; the client must refuse what does not fit.

    >>> as_json("3", {"integer"}), as_json("True", {"boolean"}), as_json("{'a': None}", {"object"})
    ('3', 'true', '{"a": null}')
    """
    bare = text.strip()
    if bare.lower() in _WORDS and types & _WORDS[bare.lower()][1]:
        return _WORDS[bare.lower()][0]
    if "string" in types:
        return _quoted(text)
    if _is_json(bare):
        return bare
    literal = literal_as_json(bare)
    return _quoted(text) if literal is None else literal


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _in_quotes(text: str) -> str:
    return _quoted(text)[1:-1]
