"""Reasoning and tool calls of a whole generation, a regular expression or a library call at a time.

It says what the incremental parsers of `twostroke.api.parsers` have to find, and shares nothing with them but the types of
the result: it has the whole text, so it searches where they wait.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from twostroke.api.parsers.deltas import ParsedMessage, ToolCall
from twostroke.api.parsers.tool_choice import NamedTool, Tool, ToolChoice

Found = tuple[list[ToolCall], int]
"""Calls, and where they end in the text."""
NAME = r"[^\s<>\[\]{}()\"'`|,;=]{1,128}"
STRING = r'"(?:[^"\\]|\\.)*"'
SHORT = rf'(?={STRING})"(?:[^"\\]|\\.){{0,510}}"'
"""Loosely: `short` has the exact bound."""

REASONING_TAGS = {
    "deepseek_r1": ("<think>", "</think>"),
    "qwen3": ("<think>", "</think>"),
    "granite": (r"Here(?: i|')s my thought process:", r"Here(?: i|')s my response:"),
    "mistral": (r"\[THINK\]", r"\[/THINK\]"),
}


def parse(
    tool_call_parser: str | None,
    reasoning_parser: str | None,
    text: str,
    tools: Sequence[Tool],
    *,
    tool_choice: ToolChoice = "auto",
    starts_in_reasoning: bool = False,
) -> ParsedMessage:
    reasoning, text = split_reasoning(reasoning_parser, text, starts_in_reasoning)
    if isinstance(tool_choice, NamedTool):
        pieces = bare(text, "{", lambda at: arguments_call(text, at, tool_choice.name))
    elif tool_choice == "required":
        pieces = bare(text, "[", lambda at: json_calls(text, at, [tool.name for tool in tools], ""))
    elif tool_call_parser is None or tool_choice == "none" or not tools:
        return ParsedMessage(reasoning, text, ())
    else:
        pieces = PARSERS[tool_call_parser](text, tools)
    return ParsedMessage(reasoning, content_of(pieces), tuple(p for p in pieces if isinstance(p, ToolCall)))


def split_reasoning(parser: str | None, text: str, starts_inside: bool) -> tuple[str, str]:
    if parser is None:
        return "", text
    opening, closing = REASONING_TAGS[parser]
    opened = re.match(rf"\s*{opening}", text)
    if not opened and not starts_inside:
        return "", text
    inside = text[opened.end() if opened else 0 :]
    parts = re.split(closing, inside, maxsplit=1)
    if len(parts) == 1:
        return (inside.lstrip("\n") if inside.strip("\n") else inside), ""
    return parts[0].strip("\n"), parts[1].lstrip("\n")


def content_of(pieces: list[str | ToolCall]) -> str:
    """Text between calls, without the whitespace that has a call on one side and no text on the other."""
    gaps = [""]
    for piece in pieces:
        if isinstance(piece, ToolCall):
            gaps.append("")
        else:
            gaps[-1] += piece
    with_text = [i for i, gap in enumerate(gaps) if gap.strip()]
    content = "".join(gaps)
    if len(gaps) == 1:
        return content
    if not with_text:
        return ""
    content = content.lstrip() if with_text[0] > 0 else content
    return content.rstrip() if with_text[-1] < len(gaps) - 1 else content


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


# ---- JSON


def object_end(text: str, at: int) -> tuple[int, bool]:
    """Where a value ends, and whether it is whole: as Python's decoder says, or by its brackets if that refuses it."""
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
    """Arguments that cannot be handed on as they come: before the name, as a string, or null."""
    if text.startswith("null", at):
        return "{}", at + 4
    if not text.startswith(("{", '"'), at):
        return None
    string = re.compile(STRING, re.DOTALL).match(text, at)
    if string:
        value = decoded(json_text(string.group()))
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


def rest_of_object(text: str, start: int) -> int:
    at = skip(r"\s*", text, start)
    while text.startswith(",", at):
        end = other_member(text, at + 1)
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


# ---- a name, then JSON


def section_family(
    begin: str, call: str, call_end: str, end: str
) -> Callable[[str, Sequence[Tool]], list[str | ToolCall]]:
    """`call` matches everything before the arguments, its group 1 what is bounded, its group 2 the name."""

    def find(text: str, at: int) -> Found | None:
        calls: list[ToolCall] = []
        while head := re.compile(rf"\s*{call}\s*", re.DOTALL).match(text, at):
            found = arguments_call(text, head.end(), head.group(2))
            if not found or len(head.group(1)) > 512 or not re.fullmatch(NAME, head.group(2)):
                break
            calls += found[0]
            at = found[1]
            for closer in call_end.split(" "):
                at = skip(closing(closer), text, at)
        return (calls, skip(closing(end), text, at)) if calls else None

    return lambda text, tools: marked(text, re.escape(begin), lambda at, _: find(text, at))


def mistral(text: str, tools: Sequence[Tool]) -> list[str | ToolCall]:
    def find(at: int, marker: str) -> Found | None:
        if re.compile(r"\s*[\[{]").match(text, at):
            return json_calls(text, at, None, "")
        head = re.compile(
            r"((?:(?!\[CALL_ID\]|\[ARGS\]|\{).){1,600}?)"
            r"(?:\[CALL_ID\]((?:(?!\[ARGS\]|\{).){0,600}?)(?=\[ARGS\]|\{))?(?:\[ARGS\])?\s*(?=\{)",
            re.DOTALL,
        ).match(text, skip(r"\s*", text, at))
        if not head or len(head.group(1)) > 512 or len(head.group(2) or "") > 512:
            return None
        name = head.group(1).strip()
        return arguments_call(text, head.end(), name) if re.fullmatch(NAME, name) else None

    return marked(text, r"\[TOOL_CALLS\]", find)


# ---- Qwen3-Coder


def qwen3_coder(text: str, tools: Sequence[Tool]) -> list[str | ToolCall]:
    properties = {tool.name: tool.properties for tool in tools}

    def find(at: int, marker: str) -> Found | None:
        if marker == "<tool_call>":
            wrapped = re.compile(r"\s*<function=").match(text, at)
            if not wrapped:
                return None
            at = wrapped.end()
        name = re.compile(r"([^>]*)>").match(text, at)
        if not name or len(name.group(1)) > 512 or not re.fullmatch(NAME, name.group(1).strip()):
            return None
        known = properties.get(name.group(1).strip(), {})
        arguments, at = parameters(text, name.end(), known)
        return [ToolCall(name.group(1).strip(), arguments)], skip(closing("</tool_call>"), text, at)

    return marked(text, "<tool_call>|<function=", find)


def parameters(text: str, at: int, properties: Any) -> tuple[str, int]:
    members: list[str] = []
    while begin := re.compile(r"\s*<parameter=([^>]*)(>\n?|\Z)").match(text, at):
        if len(begin.group(1)) > 512:
            break
        if not begin.group(2):
            return "{" + ", ".join(members), len(text)
        if not re.fullmatch(r"[^<>\s]{1,128}", begin.group(1)):
            break
        value = re.compile(
            r"(.*?)(\n?</parameter>|(?=\n<parameter=)|(?=\n</function>)|(?=\n</tool_call>)|(\Z))", re.DOTALL
        ).match(text, begin.end())
        assert value
        key = json.dumps(begin.group(1), ensure_ascii=False) + ": "
        schema = properties.get(begin.group(1), {"type": "string"})
        if value.group(3) is not None:
            is_string = schema == {"type": "string"}
            rest = '"' + json.dumps(value.group(1), ensure_ascii=False)[1:-1] if is_string else value.group(1)
            return "{" + ", ".join([*members, key + rest]), len(text)
        members.append(key + plain_value(value.group(1), schema))
        at = value.end()
    inside = "{" + ", ".join(members)
    end = re.compile(r"\s*</function>").match(text, at)
    if end:
        return inside + "}", end.end()
    cut = re.compile(rf"{closing('<parameter=')}\Z|{closing('</function>')}\Z").match(text, at)
    return (inside, len(text)) if cut else (inside + "}", at)


def plain_value(text: str, schema: Any) -> str:
    """For the schemas of the tests: string, integer, number, boolean, object, array, ["string", "null"], {}."""
    kind = schema.get("type", "")
    word = text.strip().lower()
    if kind == "string":
        return json.dumps(text, ensure_ascii=False)
    if kind == ["string", "null"]:
        return "null" if word in ("null", "none") else json.dumps(text, ensure_ascii=False)
    if kind == "boolean" and word in ("true", "false"):
        return word
    try:
        if not any(math in text for math in ("NaN", "Infinity")):
            json.loads(text)
            return text.strip()
    except ValueError:
        pass
    try:
        return json.dumps(ast.literal_eval(text.strip()), ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError):
        return json.dumps(text, ensure_ascii=False)


# ---- Python


def python_family(marker: str = "", end: str = "") -> Callable[[str, Sequence[Tool]], list[str | ToolCall]]:
    def find(text: str, at: int, names: Sequence[str], end: str) -> Found | None:
        calls: list[ToolCall] = []
        opening = re.compile(r"\s*\[\s*").match(text, at)
        at = opening.end() if opening else at
        while opening:
            begin = at if not calls else skip(r"\s*,\s*", text, at)
            found = python_call(text, begin, names) if not calls or begin > at and "," in text[at:begin] else None
            if not found:
                break
            calls.append(found[0])
            at = found[1]
        if not calls:
            return None
        at = skip(closing("]"), text, at)
        return calls, skip(closing(end), text, at) if end else at

    def parse_family(text: str, tools: Sequence[Tool]) -> list[str | ToolCall]:
        names = [tool.name for tool in tools]
        head = bare(text, "[", lambda at: find(text, at, names, ""))
        last = head[-1]
        assert isinstance(last, str)
        if not marker:
            return head
        return head[:-1] + marked(last, re.escape(marker), lambda at, _: find(last, at, names, end))

    return parse_family


def python_call(text: str, at: int, names: Sequence[str]) -> tuple[ToolCall, int] | None:
    """The shortest text from here that Python reads as a call of one of the functions."""
    name = next((name for name in names if text.startswith(name + "(", at)), None)
    if name is None:
        return None
    ends = [match.end() for match in re.compile(r"\)").finditer(text, at)]
    for end in ends:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                call = ast.parse("f" + text[at + len(name) : end], mode="eval").body
        except (SyntaxError, ValueError, MemoryError):
            continue
        if not isinstance(call, ast.Call):
            return None
        try:
            assert not call.args
            values = {str(k.arg): python_value(k.value) for k in call.keywords if k.arg or 1 / 0}
            arguments = json.dumps(values, ensure_ascii=False, allow_nan=False)
            arguments.encode()
        except (ValueError, AssertionError, ZeroDivisionError):
            return None
        return ToolCall(name, arguments), end
    return None


def python_value(node: ast.expr) -> Any:
    source = ast.unparse(node)
    words = {"true": "True", "false": "False", "null": "None"}
    tree = ast.parse(source, mode="eval")
    for name in ast.walk(tree):
        if isinstance(name, ast.Name):
            name.id = words.get(name.id, name.id)
    value = ast.literal_eval(ast.unparse(tree))
    if not all(isinstance(k, str) for k in keys_within(value)) or "b'" in repr(value)[:2] or isinstance(value, set):
        raise ValueError(value)
    return value


def keys_within(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value, *(key for inner in value.values() for key in keys_within(inner))]
    if isinstance(value, (list, tuple)):
        return [key for inner in value for key in keys_within(inner)]
    if isinstance(value, (bytes, set, complex)) or value is ...:
        return [None]
    return []


PARSERS: dict[str, Callable[[str, Sequence[Tool]], list[str | ToolCall]]] = {
    "deepseek_v3": section_family(
        "<｜tool▁calls▁begin｜>",  # noqa: RUF001
        r"<｜tool▁call▁begin｜>(function<｜tool▁sep｜>(\S+?)\s*)```json",  # noqa: RUF001
        "``` <｜tool▁call▁end｜>",  # noqa: RUF001
        "<｜tool▁calls▁end｜>",  # noqa: RUF001
    ),
    "deepseek_v31": section_family(
        "<｜tool▁calls▁begin｜>",  # noqa: RUF001
        r"<｜tool▁call▁begin｜>(\s*(\S+?)\s*)<｜tool▁sep｜>",  # noqa: RUF001
        "<｜tool▁call▁end｜>",  # noqa: RUF001
        "<｜tool▁calls▁end｜>",  # noqa: RUF001
    ),
    "granite": json_family(r"<\|tool_call\|>|<tool_call>"),
    "hermes": json_family("<tool_call>", "</tool_call>"),
    "internlm": json_family(r"<\|action_start\|><\|plugin\|>", "<|action_end|>"),
    "jamba": json_family("<tool_calls>", "</tool_calls>"),
    "kimi_k2": section_family(
        "<|tool_calls_section_begin|>",
        r"<\|tool_call_begin\|>(\s*(?:functions\.)?([^\s:]+?)(?::[0-9]+)?\s*)<\|tool_call_argument_begin\|>",
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    ),
    "llama3_json": json_family(r"<\|python_tag\|>", first="{"),
    "llama4_pythonic": python_family("<|python_start|>", "<|python_end|>"),
    "mistral": mistral,
    "phi4_mini_json": json_family("functools"),
    "pythonic": python_family(),
    "qwen3_coder": qwen3_coder,
}
