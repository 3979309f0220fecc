"""Tool calls as JSON in a whole text; and what all forms of calls share: where they may begin and what ends them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from twostroke.api.parsers.output import ToolCall
from twostroke.api.parsers.tool_choice import Tool

Found = tuple[list[ToolCall], int]
"""Calls, and where they end in the text."""
NAME = r"[^\s<>\[\]{}()\"'`|,;=]{1,128}"
STRING = r'"(?:[^"\\]|\\.)*"'


def bare(text: str, first: str, find: Callable[[int], Found | None]) -> list[str | ToolCall]:
    """Calls at the beginning, or none."""
    start = len(text) - len(text.lstrip())
    found = find(start) if text.startswith(first, start) else None
    return [text[:start], *found[0], text[found[1] :]] if found else [text]


def marked(text: str, markers: str, find: Callable[[int, str], Found | None]) -> list[str | ToolCall]:
    """Calls behind markers."""
    pieces: list[str | ToolCall] = []
    at = begin = 0
    while marker := re.compile(markers).search(text, at):
        at = marker.end()
        if found := find(at, marker.group()):
            pieces += [text[begin : marker.start()], *found[0]]
            at = begin = found[1]
    return [*pieces, text[begin:]]


def closing(*texts: str) -> str:
    """A pattern of whitespace and one of the texts, or what is there of it where everything ends."""
    whole = "|".join(map(re.escape, texts))
    cut = "|".join(re.escape(text[:n]) for text in texts for n in range(len(text) - 1, -1, -1))
    return rf"\s*(?:(?:{whole})|(?:{cut})\Z)"


def skip(pattern: str, text: str, at: int) -> int:
    found = re.compile(pattern, re.DOTALL).match(text, at)
    return found.end() if found else at


def short(pattern: str, text: str, at: int) -> re.Match[str] | None:
    """A match whose group 1 is a JSON string of at most 512 characters."""
    found = re.compile(pattern, re.DOTALL).match(text, at)
    return found if found and len(found.group(1)) <= 512 else None


def decoded(string: str) -> str | None:
    try:
        value = json.loads(string, strict=False)
        value.encode()
    except ValueError:
        return None
    return value


def object_end(text: str, at: int) -> tuple[int, bool]:
    """Return where a value ends, and whether it is complete: by Python's decoder, or by brackets if that refuses it."""
    try:
        return json.JSONDecoder(strict=False).raw_decode(text, at)[1], True
    except (ValueError, RecursionError):
        pass
    expected = ""
    tokens = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)|[{}\[\]]|[\sA-Za-z0-9_.,:+-]+', re.DOTALL)
    while token := tokens.match(text, at):
        first = token.group()[0]
        if first in "}]":
            if not expected.endswith(first):
                return at, False
            expected = expected[:-1]
        else:
            expected += {"{": "}", "[": "]"}.get(first, "")
        at = token.end()
        if not expected:
            return at, True
    return at, False


def json_text(text: str) -> str:
    """A value as it was written, control characters in strings escaped."""

    def escaped(string: re.Match[str]) -> str:
        return "".join(json.dumps(c)[1:-1] if c < " " else c for c in string.group())

    return re.sub(r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)', escaped, text, flags=re.DOTALL)


def arguments_call(text: str, at: int, name: str) -> Found | None:
    if not re.compile(r'\{\s*["}]').match(text, at):
        return None
    end, _ = object_end(text, at)
    return [ToolCall(name, json_text(text[at:end]))], end


def whole_arguments(text: str, at: int) -> tuple[str, int] | None:
    """Return whether arguments cannot be streamed: they are before the name, a string, or null."""
    if text.startswith("null", at):
        return "{}", at + 4
    if not text.startswith(("{", '"'), at):
        return None
    string = re.compile(STRING, re.DOTALL).match(text, at)
    if string:
        value = decoded(json_text(string.group()))
        if value is not None and value.strip() in ("", "null"):
            return "{}", string.end()
        return (value, string.end()) if value is not None and value.strip().startswith("{") else None
    if text[at] == '"':
        return None
    end, whole = object_end(text, at)
    return (json_text(text[at:end]), end) if whole else None


MEMBER = rf"\s*({STRING})\s*:\s*"
SCALAR = rf"({STRING})|[0-9]+"


def other_member(text: str, at: int) -> int | None:
    """The end of `"id": 3` or the like."""
    key = short(MEMBER, text, at)
    if not key or decoded(key.group(1)) not in ("type", "id"):
        return None
    value = re.compile(SCALAR, re.DOTALL).match(text, key.end())
    if not value or (value.group(1) and (len(value.group(1)) > 512 or decoded(value.group(1)) is None)):
        return None
    return value.end()


def any_member(text: str, at: int) -> int | None:
    """The end of a member of any name and value, which follows what a call needs."""
    key = short(MEMBER, text, at)
    if not key or decoded(key.group(1)) is None:
        return None
    if text.startswith(("{", "["), key.end()):
        end, whole = object_end(text, key.end())
        return end if whole else None
    end = skip(rf"{STRING}|[A-Za-z0-9_.+-]*", text, key.end())
    return end if end > key.end() else None


def rest_of_object(text: str, start: int) -> int:
    at = skip(r"\s*", text, start)
    while text.startswith(",", at):
        end = any_member(text, at + 1)
        if end is None:
            return start
        at = skip(r"\s*", text, end)
    return at + 1 if text.startswith("}", at) else len(text) if at == len(text) else start


def json_call(text: str, at: int, names: Sequence[str] | None) -> Found | None:  # noqa: C901 (members in any order)
    if not text.startswith("{", at):
        return None
    name: str | None = None
    held: str | None = None
    at += 1
    while True:
        key = short(MEMBER, text, at)
        what = decoded(key.group(1)) if key else None
        if key and what == "name" and name is None:
            value = short(rf"({STRING})", text, key.end())
            name = decoded(value.group(1)) if value else None
            if not value or name is None or not re.fullmatch(NAME, name) or (names is not None and name not in names):
                return None
            at = value.end()
            if held is not None:
                return [ToolCall(name, held)], rest_of_object(text, at)
        elif key and what in ("arguments", "parameters") and held is None:
            if name is not None and (found := arguments_call(text, key.end(), name)):
                return found[0], rest_of_object(text, found[1])
            whole = whole_arguments(text, key.end())
            if not whole:
                return None
            held, at = whole
            if name is not None:
                return [ToolCall(name, held)], rest_of_object(text, at)
        else:
            end = other_member(text, at)
            if end is None:
                return None
            at = end
        at = skip(r"\s*", text, at)
        if text.startswith("}", at) and name is not None:
            return [ToolCall(name, "{}")], at + 1
        if not text.startswith(",", at):
            return None
        at += 1


def json_calls(text: str, at: int, names: Sequence[str] | None, end: str) -> Found | None:
    opening = re.compile(r"\s*(\[?)\s*").match(text, at)
    assert opening
    found = json_call(text, opening.end(), names)
    if not found:
        return None
    calls, at = found
    while more := json_call(text, skip(r"\s*[,;]?\s*", text, at), names):
        calls, at = calls + more[0], more[1]
    if end:
        return calls, skip(rf"[\s}}\]]*(?:\Z|{closing(end)})", text, at)
    return calls, skip(closing("]"), text, at) if opening.group(1) else at


def json_family(markers: str, end: str = "", first: str = "") -> Callable[[str, Sequence[Tool]], list[str | ToolCall]]:
    def parse_family(text: str, tools: Sequence[Tool]) -> list[str | ToolCall]:
        names = [tool.name for tool in tools]
        head = bare(text, first, lambda at: json_calls(text, at, names, "")) if first else [text]
        last = head[-1]
        assert isinstance(last, str)
        return head[:-1] + marked(last, markers, lambda at, _: json_calls(last, at, None, end))

    return parse_family
