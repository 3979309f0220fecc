"""Tool calls as Python, `[get_weather(city="Paris"), now()]`, in the syntax of Llama 3.2, Llama 4 and ToolACE."""

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
"""JSON's words, which models mix with Python's."""


def literal_as_json(text: str) -> str | None:
    """Return a Python literal as JSON; None if it is not a literal, or has no JSON equivalent.

    >>> literal_as_json("{'a': (None, -1.5, true)}")
    '{"a": [null, -1.5, true]}'
    """
    return _as_json(text, _value)


def keywords_as_json(parentheses: str) -> str | None:
    """Return the arguments of a call as a JSON object; None unless all are literals with a name.

    >>> keywords_as_json("(city='Paris', days=3)")
    '{"city": "Paris", "days": 3}'
    """
    return _as_json("call" + parentheses, _keywords)


def _as_json(text: str, value_of: Callable[[ast.expr], Any]) -> str | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # unknown escapes in strings
            value = value_of(ast.parse(text, mode="eval").body)
        converted = json.dumps(value, ensure_ascii=False, allow_nan=False)
        converted.encode()  # refuses lone surrogates
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
    """Return whether a function of this name can be called in Python syntax."""
    return _NAME.fullmatch(name) is not None


def read_python_calls(source: Source, output: Output, names: Collection[str], end: str = "") -> Reading[bool]:
    """Read a list of calls of known functions whose arguments are named literals; return False if there is none.

    A call is emitted when complete, because its arguments must be converted. Text that is not a call stays unread.

    Args:
        source: source, positioned at the opening bracket, or at whitespace before it.
        output: receives the calls.
        names: names of the known functions.
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
    """Read from an opening parenthesis to its closing one; None if that does not come."""
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
    """Read a string literal, complete or cut off."""
    yield from source.more(3)
    end = quote * 3 if source.text.startswith(quote * 3, source.position) else quote
    source.position += len(end)
    while (yield from source.more(len(end))):
        if source.text.startswith(end, source.position):
            source.position += len(end)
            return
        source.position += 1
        if source.text[source.position - 1] == "\\":
            source.position += 1  # skip the escaped character, even if it has not arrived
    source.position = len(source.text)
