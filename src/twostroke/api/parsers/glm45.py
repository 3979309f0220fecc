"""Tool calls of GLM-4.5 and later: tags around keys and plain values, converted to JSON by the tool's schema.

<tool_call>write_file
<arg_key>path</arg_key>
<arg_value>a.txt</arg_value>
<arg_key>mode</arg_key>
<arg_value>420</arg_value>
</tool_call>

Strings are written without quotes, all other values as JSON. GLM-4.7 omits the line breaks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from twostroke.api.parsers.json_calls import is_function_name
from twostroke.api.parsers.output import Output
from twostroke.api.parsers.plain_values import read_plain_value
from twostroke.api.parsers.source import MAX_HEAD_CHARS, Reading, Source, Stops
from twostroke.api.parsers.tool_choice import Tool

MARKERS = ("<tool_call>",)
MARKUP = ("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

_VALUE_ENDS = Stops("</arg_value>", "\n<arg_key>", "\n</tool_call>")
"""Ends of a value, which the model may forget to close. The other tags within a line are part of the value."""
_KEY = re.compile(r"[^<>\s]{1,128}")
_ANY: Mapping[str, Any] = {}
"""Schema of an argument that the tool's schema lacks: JSON if it parses as such, otherwise a string."""


def read_glm45_call(source: Source, output: Output, tools: Mapping[str, Tool], _marker: str) -> Reading[bool]:
    """Read the call after a marker; return False if there is none."""
    head = yield from source.until("<arg_key>", "</tool_call>")
    name = head.strip() if head is not None else ""
    if not is_function_name(name):
        return False
    output.begin_tool_call(name)
    yield from _read_arguments(source, output, tools[name].properties if name in tools else {})
    return True


def _read_arguments(source: Source, output: Output, properties: Mapping[str, Any]) -> Reading[None]:
    """Read everything up to and including </tool_call>; the object stays open if the text ends before that."""
    before = "{"
    while True:
        key = yield from _read_key(source)
        if key is None:
            break
        output.arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
        before = ", "
        end = yield from read_plain_value(source, output, properties.get(key, _ANY), _VALUE_ENDS)
        if not end:
            return
        if end == "</arg_value>":
            source.position += len(end)
    if before == "{":
        output.arguments("{")
    if (yield from source.closing("</tool_call>")) or source.num_unread:
        output.arguments("}")


def _read_key(source: Source) -> Reading[str | None]:
    """Read a key with its tags and the tag that opens its value; None if there is none.

    If the text ends within these tags, all of it is read, because it is only a piece of markup.
    """
    start = source.position
    if not (yield from source.closing("<arg_key>")):
        return None
    key = yield from source.until("</arg_key>")
    if key is None and source.num_unread <= MAX_HEAD_CHARS:
        source.position = len(source.text)
        return None
    if key is not None and _KEY.fullmatch(key.strip()):
        yield from source.literal("</arg_key>")
        if (yield from source.closing("<arg_value>")):
            return key.strip()
        if not source.num_unread:
            return None
    source.position = start
    return None
