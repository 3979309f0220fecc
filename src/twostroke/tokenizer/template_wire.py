"""What the two ends of a template's process send each other, over one socket.

    request   op, 1 byte   bytes of the source, u64   bytes of the variables, u64   source   variables
    answer    kind, 1 byte   bytes of the text, u64   text

The source and texts are UTF-8, variables are JSON. Nothing that comes back is more than a text or four flags: what
ran in the process may have been a hostile program.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from twostroke.tokenizer.messages import CallArguments

LOOK, RENDER, PROBE = b"L", b"R", b"P"
"""Compile only, and say what the template expects; render; or render a conversation of our own to learn something."""
FACTS, TEXT, REFUSED, EXHAUSTED = b"F", b"T", b"E", b"M"
"""Four flags, the text, why there is none, and the same of a process that has no memory left and ends."""
REQUEST = struct.Struct("<cQQ")
ANSWER = struct.Struct("<cQ")
JSON = dict[str, Any]

MAX_PROMPT_CHARS = 16 * 2**20
"""Of a rendered text. A context of 131,072 tokens has a million."""
MAX_ANSWER_BYTES = 4 * MAX_PROMPT_CHARS
"""As UTF-8. A process that announces more was taken over, and is ended before more is read."""

CPU_S = 0.75
"""Processor time of one rendering, or of compiling; an ordinary conversation takes a thousandth of it."""
PROBE_CPU_S = 0.05
"""Of rendering a probe. A conversation waits for up to a dozen of them."""
CPU_S_PER_MIB = 0.5
"""What is added for long conversations, by their size as JSON."""
MEMORY_MIB = 384
"""Of one rendering, beyond what the process takes before any."""
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """What a template expects of messages, as its source tells."""

    reads_content_parts: bool
    """It walks through a message's content as a list of parts; most only know a text."""
    reads_argument_text: bool
    """It tests for a call's arguments being a text, and so writes a text as it is."""
    tests_missing_content: bool
    """It tests for a message's content being none, as that of a turn which only calls tools."""
    knows_developer: bool
    """It names the role developer."""


def cpu_limit_s(num_bytes: int, op: bytes = RENDER) -> float:
    """Return the processor time for a request of so many bytes; of a probe, the time after compiling."""
    return (PROBE_CPU_S if op == PROBE else CPU_S) + CPU_S_PER_MIB * num_bytes / _MIB


def encoded(text: str) -> bytes:
    """Return a text as it travels; half a character, which clients may send, stays one."""
    return text.encode("utf-8", "surrogatepass")


def decoded(content: bytes | bytearray) -> str:
    """Return the text that was encoded."""
    return content.decode("utf-8", "surrogatepass")


def packed(variables: Mapping[str, Any]) -> bytes:
    """Return variables as JSON; the arguments of calls are sent in their own words, and not read.

    Raises:
        ValueError: a number that has no text.
    """
    words: list[tuple[int, int, str]] = []
    for index, message in enumerate(cast(list[JSON], variables.get("messages") or [])):
        for number, call in enumerate(cast(list[JSON], message.get("tool_calls") or [])):
            arguments = call.get("function", call).get("arguments")
            if isinstance(arguments, CallArguments):
                words.append((index, number, str(arguments)))
    return encoded(json.dumps([variables, words], ensure_ascii=False))


def unpacked(content: bytes | bytearray) -> JSON:
    """Return the variables that were packed, with the fields of arguments.

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
    """Return exactly so many bytes; fewer where the other end has closed."""
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
