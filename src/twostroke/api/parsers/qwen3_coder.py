"""Tool calls of Qwen3-Coder: tags around plain text, converted to JSON by the types of the tool's schema.

<tool_call>
<function=write_file>
<parameter=path>
a.txt
</parameter>
</function>
</tool_call>

Some models write a JSON object of arguments instead of parameters; with any other text there it is not a call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from twostroke.api.parsers.json_calls import is_function_name, read_arguments
from twostroke.api.parsers.output import Output
from twostroke.api.parsers.plain_values import read_plain_value
from twostroke.api.parsers.source import MAX_HEAD_CHARS, Reading, Source, Stops
from twostroke.api.parsers.tool_choice import Tool

MARKERS = ("<tool_call>", "<function=")
"""Texts that begin a call; the model sometimes omits the first one."""

_VALUE_ENDS = Stops("\n</parameter>", "</parameter>", "\n<parameter=", "\n</function>", "\n</tool_call>")
"""Ends of a value, which the model sometimes forgets to close. Tags within a line, or of other kinds, are part of the
value."""
_STRING = {"type": "string"}
"""Schema of a parameter that the tool's schema lacks."""
_MAY_FOLLOW = ("{", "<parameter=", "</function>", "</tool_call>", "<tool_call>", "<function=")
"""Texts that may follow a function's name. A call without parameters may lack its end: models sometimes forget it."""
_PARAMETER_NAME = re.compile(r"[^<>\s]{1,128}")


def read_qwen3_coder_call(source: Source, output: Output, tools: Mapping[str, Tool], marker: str) -> Reading[bool]:
    """Read the call after a marker; return False if there is none."""
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
    """Read everything up to and including </function>; the object stays open if the text ends before that."""
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
        end = yield from read_plain_value(source, output, properties.get(key, _STRING), _VALUE_ENDS)
        if not end:
            return
        if end.endswith("</parameter>"):
            source.position += len(end)
    if before == "{":
        output.arguments("{")
    if (yield from source.closing("</function>")) or source.num_unread:
        output.arguments("}")
