"""Messages between this process and the template process, sent over one socket.

    request   op, 1 byte   bytes of the source, u64   bytes of the variables, u64   source   variables
    answer    kind, 1 byte   bytes of the text, u64   text

The source and texts are UTF-8, variables are JSON. An answer is never more than a string or four flags, because the
process may have been taken over by a hostile template.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from twostroke.tokenizer.messages import CallArguments

COMPILE, RENDER, PROBE = b"L", b"R", b"P"
"""Operations: compile and return TemplateFacts; render; render a probe, our own conversation that tests a template."""
FACTS, TEXT, REFUSED, EXHAUSTED = b"F", b"T", b"E", b"M"
"""Kinds of answer: four flags; the text; a reason for refusal; out of memory, after which the process ends."""
REQUEST = struct.Struct("<cQQ")
ANSWER = struct.Struct("<cQ")
JSON = dict[str, Any]

MAX_PROMPT_CHARS = 16 * 2**20
"""Maximum characters of a rendered text. A context of 131,072 tokens has about a million."""
MAX_ANSWER_BYTES = 4 * MAX_PROMPT_CHARS
"""Maximum size of an answer in UTF-8. A process that announces more was taken over; it is ended before more is read."""

CPU_S = 0.75
"""Processor time of one rendering, or of compiling; an ordinary conversation takes a thousandth of it."""
PROBE_CPU_S = 0.05
"""Processor time of rendering a probe. A conversation waits for up to a dozen probes."""
CPU_S_PER_MIB = 0.5
"""Processor time added per MiB of request, for long conversations."""
MEMORY_MIB = 384
"""Memory of one rendering, beyond what the process uses before it."""
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """Forms of messages that a template expects, read from its source."""

    reads_content_parts: bool
    """Whether it iterates over a message's content as a list of parts; most read only a string."""
    reads_argument_text: bool
    """Whether it tests for a call's arguments being a string, and so writes a string unchanged."""
    tests_missing_content: bool
    """Whether it tests for a message's content being none, as in a turn that only calls tools."""
    knows_developer: bool
    """Whether it names the role developer."""


def cpu_limit_s(num_bytes: int, op: bytes = RENDER) -> float:
    """Return the processor time for a request of `num_bytes` bytes; for a probe, the time after compiling."""
    return (PROBE_CPU_S if op == PROBE else CPU_S) + CPU_S_PER_MIB * num_bytes / _MIB


def encoded(text: str) -> bytes:
    """Encode a string for the socket; lone surrogates, which clients may send, are kept."""
    return text.encode("utf-8", "surrogatepass")


def decoded(content: bytes | bytearray) -> str:
    """Decode a string made by `encoded`."""
    return content.decode("utf-8", "surrogatepass")


def packed(variables: Mapping[str, Any]) -> bytes:
    """Return variables as JSON; call arguments are sent as their original text, without parsing it.

    Raises:
        ValueError: a number that JSON cannot represent.
    """
    words: list[tuple[int, int, str]] = []
    for index, message in enumerate(cast(list[JSON], variables.get("messages") or [])):
        for number, call in enumerate(cast(list[JSON], message.get("tool_calls") or [])):
            arguments = call.get("function", call).get("arguments")
            if isinstance(arguments, CallArguments):
                words.append((index, number, str(arguments)))
    return encoded(json.dumps([variables, words], ensure_ascii=False))


def unpacked(content: bytes | bytearray) -> JSON:
    """Return the variables packed by `packed`, with call arguments parsed.

    Raises:
        InvalidPrompt: arguments are nested too deeply.
    """
    variables, words = json.loads(decoded(content))
    for index, number, text in words:
        call = variables["messages"][index]["tool_calls"][number]
        where = f"messages[{index}].tool_calls[{number}]" + (".function" if "function" in call else "")
        call.get("function", call)["arguments"] = CallArguments.read(text, f"{where}.arguments")
    return variables


def receive(connection: socket.socket, num_bytes: int) -> bytearray:
    """Return exactly `num_bytes` bytes, or fewer if the other end has closed the connection."""
    found = bytearray(min(num_bytes, 1 << 20))
    filled = 0
    while filled < num_bytes:
        if filled == len(found):
            found += bytes(min(num_bytes - filled, len(found)))
        with memoryview(found) as view, view[filled:] as free:
            count = connection.recv_into(free)
        if not count:
            break
        filled += count
    del found[filled:]
    return found
