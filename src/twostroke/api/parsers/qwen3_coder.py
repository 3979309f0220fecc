"""Calls as Qwen3-Coder writes them: tags around plain text, to be made JSON by the types of the tool's schema.

<tool_call>
<function=write_file>
<parameter=path>
a.txt
</parameter>
</function>
</tool_call>

Some write the arguments as a JSON object in the place of parameters; any other text there is no call's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from twostroke.api.parsers.json_calls import is_function_name, read_arguments
from twostroke.api.parsers.output import Output
from twostroke.api.parsers.python_calls import literal_as_json
from twostroke.api.parsers.source import MAX_HEAD_CHARS, Reading, Source, Stops
from twostroke.api.parsers.tool_choice import Tool

MARKERS = ("<tool_call>", "<function=")
"""The model sometimes leaves the first one out."""

_VALUE_ENDS = Stops("\n</parameter>", "</parameter>", "\n<parameter=", "\n</function>", "\n</tool_call>")
"""The model sometimes forgets to close a parameter. Tags within a line, or of other kinds, are part of the value."""
_STRING = {"type": "string"}
"""What a parameter is taken for that the schema does not have."""
_WORDS = {
    "true": ("true", {"boolean"}),
    "false": ("false", {"boolean"}),
    "null": ("null", {"null"}),
    "none": ("null", {"null"}),
}
"""JSON, and the types that have it, of words that models write as JSON, Python or in capitals."""
_MAY_FOLLOW = ("{", "<parameter=", "</function>", "</tool_call>", "<tool_call>", "<function=")
"""What may follow the name of a function. A call without parameters may lack its end: models forget it at times."""
_PARAMETER_NAME = re.compile(r"[^<>\s]{1,128}")


def read_qwen3_coder_call(source: Source, output: Output, tools: Mapping[str, Tool], marker: str) -> Reading[bool]:
    """The call behind a marker; False if there is none."""
    if marker == "<tool_call>":
        yield from source.space()
        if not (yield from source.literal("<function=")):
            return False
    name = yield from source.until(">")
    if name is None or not is_function_name(name.strip()):
        return False
    name = name.strip()
    yield from source.literal(">")
    start = source.position
    yield from source.space()
    following = yield from source.literal(*_MAY_FOLLOW)
    if following == "{":
        source.position -= 1
        if not (yield from read_arguments(source, output, name)):
            return False
        yield from source.closing("</function>")
    elif following or source.has_ended_within(*_MAY_FOLLOW):
        source.position = start
        output.begin_tool_call(name)
        yield from _read_parameters(source, output, tools[name].properties if name in tools else {})
    else:
        return False
    yield from source.closing("</tool_call>")
    return True


def _read_parameters(source: Source, output: Output, properties: Mapping[str, Any]) -> Reading[None]:
    """Everything up to and with </function>; the object stays open if the text ends before that."""
    before = "{"
    while True:
        start = source.position
        if not (yield from source.closing("<parameter=")):
            break
        key = yield from source.until(">")
        if key is None and source.num_unread <= MAX_HEAD_CHARS:  # the text ends within the tag
            source.position = len(source.text)
            break
        if key is None or not _PARAMETER_NAME.fullmatch(key):
            source.position = start
            break
        yield from source.literal(">")
        output.arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
        before = ", "
        yield from source.literal("\n")
        if not (yield from _read_value(source, output, properties.get(key, _STRING))):
            return
    if before == "{":
        output.arguments("{")
    if (yield from source.closing("</function>")) or source.num_unread:
        output.arguments("}")


def _read_value(source: Source, output: Output, schema: Any) -> Reading[bool]:
    """A parameter's value and its closing tag, if it has one; False if the text ends before.

    Strings are handed on as they come, everything else when it is whole; cut off, it is handed on as it is.
    """
    if types_of(schema) == {"string"}:
        output.arguments('"')
        end = yield from source.copy_until(_VALUE_ENDS, lambda text: output.arguments(_in_quotes(text)))
        output.arguments('"' if end else "")
    else:
        held: list[str] = []
        end = yield from source.copy_until(_VALUE_ENDS, held.append)
        text = "".join(held)
        output.arguments(as_json(text, types_of(schema)) if end else text)
    if end.endswith("</parameter>"):
        source.position += len(end)
    return bool(end)


def types_of(schema: Any) -> set[str]:
    """The JSON types that a schema allows; empty if it does not say.

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
    """A value that was written as plain text, as JSON of one of the types.

    A text that is none of them becomes a string: it is for the client to refuse what does not fit.

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
