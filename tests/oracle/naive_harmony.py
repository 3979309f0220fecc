"""Messages in channels (gpt-oss) in a whole text, by regular expressions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from oracle.naive_json_calls import NAME, Found, arguments_call, closing, skip
from twostroke.api.parsers.output import ToolCall
from twostroke.api.parsers.tool_choice import Tool

ENDS = ("<|end|>", "<|return|>", "<|call|>")
END = "|".join(map(re.escape, ENDS))
BETWEEN = "\x1f"
"""Stands between messages; Python takes it for whitespace."""


@dataclass(frozen=True)
class Thought:
    text: str
    has_ended: bool


Piece = str | ToolCall | Thought


def pieces(text: str, tools: Sequence[Tool], *, takes_calls: bool = True, starts_inside: bool = False) -> list[Piece]:
    found: list[Piece] = []
    at = begin = 0
    if starts_inside:
        thought, at = thought_from(text, 0)
        found.append(thought)
        begin = at
    while marker := re.compile(rf"<\|channel\|>|<\|start\|>|to=functions\.|{END}").search(text, at):
        at = marker.end()
        before = text[begin : marker.start()]
        if marker.group() in ENDS:
            found += [before, BETWEEN]
            begin = at
        elif head := header_at(text, marker.start(), [tool.name for tool in tools]):
            channel, function, end = head
            if function and takes_calls:
                if call := call_at(text, end, function):
                    found += [before, *call[0], BETWEEN]
                    at = begin = call[1]
                continue
            found += [before, BETWEEN]
            at = begin = end
            if channel == "analysis":
                thought, at = thought_from(text, end)
                found.append(thought)
                begin = at
    return [*found, text[begin:]]


def header_at(text: str, at: int, names: Sequence[str]) -> tuple[str, str, int] | None:
    """Channel, function, and where the message begins."""
    found = re.compile(
        rf"(?:<\|channel\|>|<\|start\|>|to=functions\.)((?:(?!<\|message\|>|<\|start\|>|{END}).)*)<\|message\|>"
    ).match(text, at)
    if not found or len(found.group(1)) > 512 or re.match(r"<\|start\|>(?!assistant)", found.group()):
        return None
    header = found.group().removesuffix("<|message|>")
    channels = re.match(r".*<\|channel\|>((?:(?!to=).)*)", header)
    channel = re.search("analysis|commentary|final", channels.group(1)) if channels else None
    recipient = re.search(r"to=((?:(?!<)\S)+)", header)
    function = re.fullmatch(rf"functions\.({NAME})", recipient.group(1)) if recipient else None
    if not channel and not function:
        return None
    name = function.group(1) if function else ""
    if recipient and recipient.group(1) in names:
        name = recipient.group(1)
    return channel.group() if channel else "", name, found.end()


def call_at(text: str, at: int, name: str) -> Found | None:
    at = skip(r"\s*", text, at)
    if found := arguments_call(text, at, name):
        return found[0], skip(closing(*ENDS), text, found[1])
    end = re.compile(rf"{END}|\Z").match(text, at)
    return ([ToolCall(name, "{}")], end.end()) if end else None


def thought_from(text: str, at: int) -> tuple[Thought, int]:
    begin = at
    while stop := re.compile(rf"<\|channel\|>|<\|start\|>|{END}").search(text, at):
        if stop.group() in ENDS:
            return Thought(text[begin : stop.start()], True), stop.end()
        if header_at(text, stop.start(), ()):
            return Thought(text[begin : stop.start()], True), stop.start()
        at = stop.end()
    return Thought(text[begin:], False), len(text)


def joined_thoughts(before: str, found: Sequence[Piece]) -> str:
    for thought in (piece for piece in found if isinstance(piece, Thought)):
        text = thought.text.strip("\n") if thought.has_ended else thought.text
        if text.strip("\n") and before:
            text = "\n" + text.lstrip("\n")
        elif text.strip("\n"):
            text = text.lstrip("\n")
        before += text
    return before


def lines_of(content: str) -> str:
    """Texts of several messages, with a line end between them."""
    return re.sub(rf"(?<=\S)\s*{BETWEEN}\s*(?=\S)", "\n", content).replace(BETWEEN, "")
