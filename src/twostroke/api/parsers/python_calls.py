"""Calls as Python: `[get_weather(city="Paris"), now()]`, of Llama 3.2, Llama 4 and ToolACE."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Collection
from typing import Any, NoReturn

from twostroke.api.parsers.output import Output
from twostroke.api.parsers.source import Reading, Source

_NAME = re.compile(r"[A-Za-z_][\w.\-]{0,127}")
_STRUCTURE = re.compile(r"[^()\[\]{}\"']*")
_CLOSER = {"(": ")", "[": "]", "{": "}"}
_WORDS = {"true": True, "false": False, "null": None}
"""JSON's words, which models write among Python's."""


def read_python_calls(source: Source, output: Output, names: Collection[str], end: str = "") -> Reading[bool]:
    """A list of calls of known functions with keyword arguments that are literals; False if there is none.

    A call is handed on when it is whole, for its arguments have to be converted; what is no call stays unread.

    Args:
        source: at the opening bracket, or whitespace before it.
        output: takes the calls.
        names: of the functions that there are.
        end: markup that may follow the list.
    """
    yield from source.space()
    if not (yield from source.literal("[")):
        return False
    if not (yield from _read_call(source, output, names)):
        return False
    while True:
        end_of_call = source.position
        yield from source.space()
        if not (yield from source.literal(",")) or not (yield from _read_call(source, output, names)):
            source.position = end_of_call
            break
    yield from source.closing("]")
    if end:
        yield from source.closing(end)
    return True


def _read_call(source: Source, output: Output, names: Collection[str]) -> Reading[bool]:
    yield from source.space()
    name = yield from source.until("(")
    if name is None or name not in names or not _NAME.fullmatch(name):
        return False
    text = yield from _read_parentheses(source)
    arguments = _as_json(text) if text is not None else None
    if arguments is None:
        return False
    output.begin_tool_call(name)
    output.arguments(arguments)
    source.forget()
    return True


def _read_parentheses(source: Source) -> Reading[str | None]:
    """From an opening bracket to the one that closes it; None if that does not come."""
    start = source.position
    closers: list[str] = []
    while (yield from source.more()):
        source.match(_STRUCTURE)
        char = source.text[source.position : source.position + 1]
        if char in ("'", '"'):
            yield from _skip_string(source, char)
            continue
        source.position += len(char)
        if char in _CLOSER:
            closers.append(_CLOSER[char])
        elif char and closers.pop() != char:
            return None
        elif not closers:
            return source.text[start : source.position]
    return None


def _skip_string(source: Source, quote: str) -> Reading[None]:
    """A string literal, or what there is of it."""
    yield from source.more(3)
    end = quote * 3 if source.text.startswith(quote * 3, source.position) else quote
    source.position += len(end)
    while (yield from source.more(len(end))):
        if source.text.startswith(end, source.position):
            source.position += len(end)
            return
        source.position += 1
        if source.text[source.position - 1] == "\\":
            yield from source.more()
            source.position += 1
    source.position = len(source.text)


def _as_json(parentheses: str) -> str | None:
    """`(city="Paris", days=3)` as a JSON object; None if these are not keyword arguments with literal values.

    >>> _as_json("(city='Paris', days=-3, tags=('a', true))")
    '{"city": "Paris", "days": -3, "tags": ["a", true]}'
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in strings that Python does not know
            call = ast.parse("call" + parentheses, mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        arguments = {keyword.arg or _refuse(keyword): _value(keyword.value) for keyword in call.keywords}
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    return text


def _value(node: ast.expr) -> Any:
    """What a literal stands for in JSON."""
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.Name(id=word) if word in _WORDS:
            return _WORDS[word]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _value(value) for key, value in zip(keys, values, strict=True)}
        case _:
            return _refuse(node)


def _key(node: ast.expr | None) -> str:
    key = _value(node) if node is not None else None
    return key if isinstance(key, str) else _refuse(node)


def _refuse(node: object) -> NoReturn:
    raise ValueError(f"{node} is no JSON value")
