"""Tool calls between tags of their own, or as Python, in a whole text."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from oracle.naive_json_calls import NAME, Found, arguments_call, bare, closing, json_calls, marked, skip
from twostroke.api.parsers.output import ToolCall
from twostroke.api.parsers.tool_choice import Tool


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
        begin = skip(r"\s*", text, name.end())
        if text.startswith("{", begin):
            found = arguments_call(text, begin, name.group(1).strip())
            at = skip(closing("</function>"), text, found[1]) if found else 0
            return (found[0], skip(closing("</tool_call>"), text, at)) if found else None
        following = ("<parameter=", "</function>", "</tool_call>", "<tool_call>", "<function=")
        if not any(text.startswith(tag, begin) or tag.startswith(text[begin:]) for tag in following):
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


def glm45(text: str, tools: Sequence[Tool]) -> list[str | ToolCall]:
    properties = {tool.name: tool.properties for tool in tools}

    def find(at: int, marker: str) -> Found | None:
        head = re.compile(r"((?:(?!<arg_key>|</tool_call>).)*)(?=<arg_key>|</tool_call>)", re.DOTALL).match(text, at)
        if not head or len(head.group(1)) > 512 or not re.fullmatch(NAME, head.group(1).strip()):
            return None
        name = head.group(1).strip()
        arguments, at = keys_and_values(text, head.end(), properties.get(name, {}))
        return [ToolCall(name, arguments)], at

    return marked(text, "<tool_call>", find)


def keys_and_values(text: str, at: int, properties: Any) -> tuple[str, int]:
    members: list[str] = []
    while begin := re.compile(r"\s*<arg_key>((?:(?!</arg_key>).)*)(</arg_key>|\Z)", re.DOTALL).match(text, at):
        if len(begin.group(1)) > 512:
            break
        if not begin.group(2):
            return "{" + ", ".join(members), len(text)
        if not re.fullmatch(r"\s*[^<>\s]{1,128}\s*", begin.group(1)):
            break
        opening = re.compile(r"\s*<arg_value>").match(text, begin.end())
        if not opening and re.compile(rf"{closing('<arg_value>')}\Z").match(text, begin.end()):
            return "{" + ", ".join(members), len(text)
        if not opening:
            break
        value = re.compile(r"(.*?)(</arg_value>|(?=\n<arg_key>)|(?=\n</tool_call>)|(\Z))", re.DOTALL).match(
            text, opening.end()
        )
        assert value
        key = json.dumps(begin.group(1).strip(), ensure_ascii=False) + ": "
        schema = properties.get(begin.group(1).strip(), {})
        if value.group(3) is not None:
            is_string = schema == {"type": "string"}
            rest = '"' + json.dumps(value.group(1), ensure_ascii=False)[1:-1] if is_string else value.group(1)
            return "{" + ", ".join([*members, key + rest]), len(text)
        members.append(key + plain_value(value.group(1), schema))
        at = value.end()
    inside = "{" + ", ".join(members)
    end = re.compile(r"\s*</tool_call>").match(text, at)
    if end:
        return inside + "}", end.end()
    cut = re.compile(rf"{closing('<arg_key>')}\Z|{closing('</tool_call>')}\Z").match(text, at)
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


def python_family(marker: str = "", end: str = "") -> Callable[[str, Sequence[Tool]], list[str | ToolCall]]:
    def find(text: str, at: int, names: Sequence[str], end: str) -> Found | None:
        calls: list[ToolCall] = []
        opening = re.compile(r"\s*\[\s*").match(text, at)
        at = opening.end() if opening else at
        while opening:
            begin = at if not calls else skip(r"\s*,\s*", text, at)
            found = python_call(text, begin, names) if not calls or "," in text[at:begin] else None
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
        if not isinstance(call, ast.Call) or call.args or not all(keyword.arg for keyword in call.keywords):
            return None
        try:
            literals = {
                str(keyword.arg): ast.literal_eval(JsonWords().visit(keyword.value)) for keyword in call.keywords
            }
            arguments = json.dumps(json_value(literals), ensure_ascii=False, allow_nan=False)
            arguments.encode()
        except ValueError:
            return None
        return ToolCall(name, arguments), end
    return None


class JsonWords(ast.NodeTransformer):
    """Gives JSON's words their meaning."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        words = {"true": True, "false": False, "null": None}
        return ast.Constant(words[node.id]) if node.id in words else node


def json_value(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [json_value(item) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: json_value(item) for key, item in value.items()}
    if value is None or isinstance(value, (str, int, float)):
        return value
    raise ValueError(value)
