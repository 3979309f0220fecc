"""Calls as Python: `[get_weather(city="Paris"), now()]`, of Llama 3.2, Llama 4 and ToolACE."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Collection
from typing import Any, NoReturn

from twostroke.api.parsers.output import Output
from twostroke.api.parsers.source import Reading, Source

_WORDS = {"true": True, "false": False, "null": None}
"""JSON's words, which models write among Python's."""


def literal_as_json(text: str) -> str | None:
    """One literal; None if it is none, or if JSON has no such value.

    >>> literal_as_json("{'a': (None, -1.5, true)}")
    '{"a": [null, -1.5, true]}'
    """
    return _as_json(text, _value)


def keywords_as_json(parentheses: str) -> str | None:
    """The arguments of a call as a JSON object; None if they are not all literals with a name.

    >>> keywords_as_json("(city='Paris', days=3)")
    '{"city": "Paris", "days": 3}'
    """
    return _as_json("call" + parentheses, _keywords)


def _as_json(text: str, value_of: Callable[[ast.expr], Any]) -> str | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in strings that Python does not know
            value = value_of(ast.parse(text, mode="eval").body)
        converted = json.dumps(value, ensure_ascii=False, allow_nan=False)
        converted.encode()  # refuses halves of surrogate pairs
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    return converted


def _keywords(node: ast.expr) -> dict[str, Any]:
    if not isinstance(node, ast.Call) or node.args:
        _refuse(node)
    return {keyword.arg or _refuse(keyword): _value(keyword.value) for keyword in node.keywords}


def _value(node: ast.expr) -> Any:
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
            _refuse(node)


def _key(node: ast.expr | None) -> str:
    match node:
        case ast.Constant(value=str() as key):
            return key
        case _:
            _refuse(node)


def _refuse(node: object) -> NoReturn:
    raise ValueError(f"{node} has no counterpart in JSON")


_NAME = re.compile(r"[A-Za-z_][\w.\-]{0,127}")
_STRUCTURE = re.compile(r"[^()\[\]{}\"']*")
_OPENING, _CLOSING = frozenset("([{"), frozenset(")]}")


def is_python_name(name: str) -> bool:
    """Whether a function of this name can be called."""
    return _NAME.fullmatch(name) is not None


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
    if name is None or name not in names or not is_python_name(name):
        return False
    text = yield from _read_parentheses(source)
    arguments = keywords_as_json(text) if text is not None else None
    if arguments is None:
        return False
    output.begin_tool_call(name)
    output.arguments(arguments)
    source.forget()
    return True


def _read_parentheses(source: Source) -> Reading[str | None]:
    """From an opening bracket to the one that closes it; None if that does not come."""
    start = source.position
    depth = 0
    while (yield from source.more()):
        source.match(_STRUCTURE)
        char = source.text[source.position : source.position + 1]
        if char in ("'", '"'):
            yield from _skip_string(source, char)
            continue
        source.position += len(char)
        depth += (char in _OPENING) - (char in _CLOSING)
        if depth == 0:
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
            source.position += 1  # whatever it is, and even if it has not come
    source.position = len(source.text)
