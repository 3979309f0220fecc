"""Messages in channels, as gpt-oss writes them (OpenAI's harmony format).

    <|channel|>analysis<|message|>They want the time.<|end|>                         reasoning
    <|start|>assistant<|channel|>commentary<|message|>Let me look.<|end|>            content
    <|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|>    a tool call
    <|start|>assistant<|channel|>final<|message|>It is noon.<|return|>               content

The prompt ends with `<|start|>assistant`, so the first message begins within its header. The recipient may precede
the channel. At high temperatures models write extra words in headers; only a channel or a function counts.
Anything else before `<|message|>` is not a header, and its text is content.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from twostroke.api.parsers.json_calls import is_function_name, read_arguments
from twostroke.api.parsers.output import Output
from twostroke.api.parsers.source import Reading, Source, Stops

TURN_ENDS = ("<|return|>", "<|call|>")
"""Tokens that end the model's turn: after the answer, and after a call."""
_MESSAGE_ENDS = ("<|end|>", *TURN_ENDS)
_HEADER_BEGINS = ("<|channel|>", "<|start|>")
MARKERS = (*_HEADER_BEGINS, "to=functions.", *_MESSAGE_ENDS)
"""Texts before or after a message."""
MARKUP = ("<|constrain|>", "<|message|>")
"""Texts within headers."""
CALL_HEADER = "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
"""Text before the arguments of a call."""
CALL_END = "<|call|>"
ANALYSIS_HEADER = "<|channel|>analysis<|message|>"

_HEADER_ENDS = ("<|message|>", "<|start|>", *_MESSAGE_ENDS, "\n")
"""Texts that end a header, or show that there is none."""
_REASONING_STOPS = Stops(*_HEADER_BEGINS, *_MESSAGE_ENDS)
_CHANNEL = re.compile(r"analysis|commentary|final")
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_FUNCTIONS = "functions."


def read_message(
    source: Source, output: Output, tools: Collection[str], marker: str, *, takes_calls: bool = True
) -> Reading[bool]:
    """Read what follows a marker: all of a reasoning message or call, but only the header of content.

    Args:
        source: source, positioned after the marker.
        output: receives the message.
        tools: names of the known functions.
        marker: one of MARKERS.
        takes_calls: whether a message to a function is a call; otherwise its channel decides.

    Returns:
        Whether the marker began or ended a message; if not, nothing is emitted.
    """
    if marker in _MESSAGE_ENDS:
        output.begin_message()
        return True
    header = yield from _read_header(source, marker)
    if header is None:
        return False
    function = _function_in(header, tools)
    if function and takes_calls:
        return (yield from _read_call(source, output, function))
    output.begin_message()
    if _channel_in(header) == "analysis":
        output.reasoning_tokens.begin(source.num_forgotten)
        yield from read_analysis(source, output)
    return True


def read_analysis(source: Source, output: Output) -> Reading[None]:
    """Read the reasoning up to the end of its message, or to the next header if the end is missing."""
    while stop := (yield from source.copy_until(_REASONING_STOPS, output.reasoning)):
        source.position = len(stop)
        if stop in _MESSAGE_ENDS:
            break
        header = yield from _read_header(source, stop)
        if header is None and source.is_cut and source.wanted_more_text:
            source.position = len(source.text)
            return
        source.position = 0
        if header is not None:
            break
        output.reasoning(stop)
        source.position = len(stop)
    if stop:
        output.end_reasoning()
        output.reasoning_tokens.end(source.place)


def _read_header(source: Source, marker: str) -> Reading[str | None]:
    """Read the header after a marker, and `<|message|>`; return its text, or None if there is none."""
    rest = yield from source.until(*_HEADER_ENDS)
    if rest is None or not (yield from source.literal("<|message|>")):
        return None
    header = marker + rest
    if header.startswith("<|start|>") and not header.startswith("<|start|>assistant"):
        return None  # a turn of another role, invented by the model
    return header if _channel_in(header) or _function_in(header, ()) else None


def _channel_in(header: str) -> str:
    """Return the last channel named in a header, or ""."""
    _, mark, behind = header.rpartition("<|channel|>")
    found = _CHANNEL.search(behind.partition("to=")[0]) if mark else None
    return found.group() if found else ""


def _function_in(header: str, tools: Collection[str]) -> str:
    """Return the function that a header calls, or "".

    >>> _function_in("<|channel|>commentary to=functions.now <|constrain|>json", ())
    'now'
    """
    found = _RECIPIENT.search(header)
    recipient = found.group(1) if found else ""
    if recipient in tools:  # models sometimes omit the namespace
        return recipient
    name = recipient.removeprefix(_FUNCTIONS)
    return name if name != recipient and is_function_name(name) else ""


def _read_call(source: Source, output: Output, name: str) -> Reading[bool]:
    """Read an object of arguments, or the end of a message without arguments."""
    yield from source.space()
    start = source.position
    if (yield from read_arguments(source, output, name)):
        yield from source.closing(*_MESSAGE_ENDS)
        output.begin_message()
        return True
    source.position = start
    has_ended = yield from source.literal(*_MESSAGE_ENDS)
    if not has_ended and (source.num_unread or source.is_cut):
        return False
    output.begin_tool_call(name)
    output.arguments("{}")
    output.begin_message()
    return True
