"""Values that a model wrote as Python literals, as JSON."""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

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
