"""Lark rules for the beginnings of tool calls: the text by which a parser recognises a call.

They are for answers that have a form and may be a call instead. A marker alone would allow any text after it. Once
the parser has recognised the call, the rest is unconstrained.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

JSON_HEAD = (
    r"""WS? ("[" WS?)? "{" WS? "\"name\"" WS? ":" WS? quoted WS? "," WS? """
    r"""("\"arguments\"" | "\"parameters\"") WS? ":" WS? open"""
)
"""Beginning of an object with a name and arguments, alone or in a list."""
PYTHON_CALL = 'name "(" WS? (keyword (WS? "," WS? keyword)*)? WS? ")"'
"""Call with keyword arguments that are literals."""
_RULES = r"""
open: "{" WS? ("\"" | "}")
keyword: /[A-Za-z_][A-Za-z0-9_]*/ WS? "=" WS? literal
literal: STRING | NUMBER | "True" | "False" | "None" | items | pairs
items: "[" WS? (literal (WS? "," WS? literal)*)? WS? "]"
pairs: "{" WS? (pair (WS? "," WS? pair)*)? WS? "}"
pair: STRING WS? ":" WS? literal
STRING: /"([^"\\\x00-\x1f]|\\["\\'nrt])*"|'([^'\\\x00-\x1f]|\\["\\'nrt])*'/
NUMBER: /-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,16})?/
WS: /[ \t\r\n]{1,16}/
"""


def text(written: str) -> str:
    """Return a rule that matches this text.

    >>> text("<tool_call>")
    '"<tool_call>"'
    """
    return json.dumps(written)


def of_pieces(written: str, markup: Sequence[str]) -> str:
    """Return a rule that matches this text, with markup as separate pieces that may be single tokens.

    >>> of_pieces("<a><b>", ("<a>", "<b>"))
    '"<a>" "<b>"'
    """
    if written in markup or not markup:
        return text(written)
    pieces = re.split(f"({'|'.join(map(re.escape, sorted(markup, key=len, reverse=True)))})", written)
    return " ".join(text(piece) for piece in pieces if piece)


def rules(ways: Sequence[str], names: Sequence[str]) -> str:
    """Return Lark rules, `beginning` first, for these alternative beginnings of a call of one of these functions."""
    plain = " | ".join(map(json.dumps, names))
    quoted = " | ".join(json.dumps(json.dumps(name, ensure_ascii=False)) for name in names)
    return f"beginning: {' | '.join(ways)}\nname: {plain}\nquoted: {quoted}{_RULES}"
