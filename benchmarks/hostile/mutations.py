"""Seeded mutations of files: of bytes, of JSON values, and of templates.

bytes       bits flipped, sizes made huge, pieces cut out, doubled, inserted
JSON        a value replaced by one of another type or size, a key dropped, renamed or doubled
templates   an operator exchanged, a number made large, a hostile expression inserted, a piece in a loop
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Sequence
from random import Random
from typing import Any, cast

MAX_EDITS = 4
"""Most changes of one mutation."""
_SIZES = (0, 1, 2**7, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
"""Numbers at which sizes and offsets overflow."""
_DEEP = "nested deeper than a parser goes"
_NAN, _INFINITY = float("nan"), float("inf")


def mutated_bytes(content: bytes, random: Random, *, first: int | None = None) -> bytes:
    """Return a changed copy.

    Args:
        content: of the file.
        random: source of the changes.
        first: nine of ten changes are in the first so many bytes, for files whose head is small compared with the rest.
    """
    found = bytearray(content)
    for _ in range(random.randint(1, MAX_EDITS)):
        end = min(len(found), first) if first is not None and random.random() < 0.9 else len(found)
        place = random.randrange(max(1, end))
        match random.randrange(7):
            case 0 if found:
                found[place] ^= 1 << random.randrange(8)
            case 1:
                width = random.choice((1, 2, 4, 8))
                found[place : place + width] = (random.choice(_SIZES) % 2 ** (8 * width)).to_bytes(width, "little")
            case 2:
                del found[place : place + random.randint(1, 64)]
            case 3:
                found[place:place] = found[place : place + random.randint(1, 64)]
            case 4:
                found[place:place] = random.randbytes(random.randint(1, 16))
            case 5:
                found[place : place + 8] = random.randbytes(8)
            case _:
                if random.random() < 0.3:  # a cut removes all changes after it
                    del found[place:]
    return bytes(found)


def mutated_json(value: Any, random: Random) -> str:
    """Return the text of a JSON value with some values changed."""
    holder = [copy.deepcopy(value)]
    for _ in range(random.randint(1, MAX_EDITS)):
        _change(*_place(holder, random), random)
    text = json.dumps(holder[0]).replace(json.dumps(_DEEP), "[" * 3000 + "]" * 3000)
    return mutated_bytes(text.encode(), random).decode("utf-8", "surrogateescape") if random.random() < 0.1 else text


def _place(holder: list[Any], random: Random) -> tuple[Any, Any]:
    """Return a list or object with an index or key of one of its values; deep places are as likely as shallow ones."""
    parent, key = cast(Any, holder), cast(Any, 0)
    while isinstance(parent[key], (dict, list)) and parent[key] and random.random() < 0.8:
        parent = parent[key]
        keys = list(cast(dict[str, Any], parent)) if isinstance(parent, dict) else range(len(parent))
        key = random.choice(cast(Sequence[Any], keys))
    return parent, key


def _change(parent: Any, key: Any, random: Random) -> None:
    match random.randrange(6):
        case 0 if isinstance(parent, dict):
            del parent[key]
        case 1 if isinstance(parent, dict):
            parent[_odd_text(random)] = parent.pop(key)
        case 2 if isinstance(parent, list) and len(cast(list[Any], parent)) > 1:
            cast(list[Any], parent).insert(key, copy.deepcopy(parent[key]))
        case 3 if isinstance(parent[key], (int, float)) and not isinstance(parent[key], bool):
            parent[key] = random.choice((-1, 0, -parent[key], parent[key] * 2, parent[key] + 1, *_SIZES, 0.5, _NAN))
        case 4:
            parent[key] = [parent[key]]
        case _:
            parent[key] = _odd_value(random)


def _odd_value(random: Random) -> Any:
    odd: tuple[Any, ...] = (
        *(None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**63) - 1, 10**400, 0.5, 1e308, 1e-320),
        *(_NAN, _INFINITY, -_INFINITY, _odd_text(random), "x" * 10_000, [], {}, [[]], [None], {"": None}),
        *([0] * 1000, {"a": {"b": 1}}, _DEEP),
    )
    return random.choice(odd)


def _odd_text(random: Random) -> str:
    odd = ("", "\ud800", "\0", "é", "%s", "../../x", "{}", "1", "9" * 5000, "(a+)+$", "<0x00>", "none", "auto", "\n")
    return random.choice(odd)


# ---------------------------------------------------------------------- templates

HOSTILE_EXPRESSIONS = (
    "{{ ((((9**64)**64)**64)**64) % 7 }}",
    "{{ (9**64)**64 }}",
    "{% set n = namespace(a=3) %}{% for i in range(40) %}{% set n.a = n.a * n.a %}{% endfor %}{{ n.a % 7 }}",
    "{% set n = namespace(a='ab') %}{% for i in range(60) %}{% set n.a = n.a ~ n.a %}{% endfor %}{{ n.a | length }}",
    "{% set n = namespace(a='ab') %}{% for i in range(60) %}{% set n.a = n.a + n.a %}{% endfor %}{{ n.a | length }}",
    "{% set n = namespace(a=[1]) %}{% for i in range(60) %}{% set n.a = n.a + n.a %}{% endfor %}{{ n.a | length }}",
    "{% set n = namespace(a=[]) %}{% for i in range(60) %}{% set n.a = [n.a, n.a] %}{% endfor %}{{ n.a }}",
    "{% set n = namespace(a=[]) %}{% for i in range(60) %}{% set n.a = [n.a, n.a] %}{% endfor %}{{ n.a | tojson }}",
    "{% set n = namespace(a=['x']) %}{% for i in range(60) %}{% set n.a = [n.a | join, n.a | join] %}{% endfor %}",
    "{{ 'x' | replace('x', 'x' * 99999) | replace('x', 'x' * 99999) }}",
    "{{ ('x' * 99999).replace('x', 'y' * 99999) }}",
    "{{ '%2000000000d' % 1 }}",
    "{{ '{:2000000000d}'.format(1) }}",
    "{{ 'a'.ljust(2000000000) }}",
    "{{ 'a' | center(2000000000) }}",
    "{{ 'a' | indent(2000000000) }}",
    "{{ ('a\\n' * 99999) | indent(99999) }}",
    "{{ 'a'.expandtabs() }}{{ ('\\t' * 99999).expandtabs(99999) }}",
    "{{ 'a'.zfill(2000000000) }}",
    "{{ ('x' * 99999).join(('y' * 99999) | list) }}",
    "{{ range(99999) | map('string') | list | join('x' * 99999) }}",
    "{{ [1] | batch(2000000000, 0) | list }}",
    "{{ [1] | slice(2000000000) | list }}",
    "{{ lipsum(99999) }}",
    "{{ range(2000000000) | list }}",
    "{{ range(99999) | list * 9999 }}",
    "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}x{% endmacro %}{{ f(60) | length }}",
    "{% macro f(x, n) %}{% if n %}{{ f(x ~ x, n - 1) }}{% else %}{{ x }}{% endif %}{% endmacro %}{{ f('ab', 60) }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) if a in range(99999) | list %}{% endfor %}",
    "{% for a in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    "{% set __twostroke_step__ = 1 %}{% for a in [1] %}{% endfor %}",
    "{% macro __twostroke_step__() %}{% endmacro %}{% for a in [1] %}{% endfor %}",
    "{% for __twostroke_step__ in [1, 2] %}x{% endfor %}",
    "{% block a %}{{ self.a() }}{% endblock %}",
    "{{ (range(99999) | list) == (range(99999) | list) }}" * 50,
    "{{ ('a' * 99999) in ('a' * 99998 ~ 'b') * 9 }}" * 50,
    "{{ '9' * 4000 | int }}{{ ('9' * 99999) | int }}",
    "{{ ('9' * 4000) | int ** 64 }}",
    "{{ 1 / 0 }}{{ 1e308 * 1e308 }}",
    "{{ messages | tojson | urlize }}{{ 'http://a.b ' * 9999 | urlize }}",
    "{{ ('a ' * 99999) | wordwrap(1) }}{{ ('a ' * 99999) | wordcount }}",
    "{{ ('<' * 99999) | striptags }}{{ ('<a' * 49999) | escape | escape | escape | length }}",
    "{{ (range(9999) | list) | sort | unique | groupby('a') }}",
    "{{ messages | pprint }}{{ strftime_now('%Y' * 9999) }}",
    "{{ strftime_now('%' * 99999) | length }}",
    "{{ [3, 1] | sum(start='') }}{{ 5 << 3 }}",
    "{{ ''.__class__ }}{{ ().__class__.__bases__ }}",
    "{{ cycler(*range(99999)) }}{{ joiner('x' * 99999)() }}",
    "{{ 'x'.encode('utf-32') * 99999 }}",
    "{{ '\ud800' }}",
    "{{ " + "(" * 150 + "1" + ")" * 150 + " }}",
    "{{ " + "not " * 3000 + "1 }}",
    "{{ " + "1 + " * 3000 + "1 }}",
    "{{ a" + "[0]" * 3000 + " }}",
    "{{ [" * 90 + "1" + "] }}" * 90,
    "{% if 1 %}" * 90 + "{% endif %}" * 90,
)
"""Expressions that take too long, take too much memory, or are invalid."""
_OPERATORS = re.compile(r" (\+|-|\*|~|%|/|==|in|and|or) ")
_NUMBERS = re.compile(r"\b\d+\b")
_FILTERS = re.compile(r"\| ?\w+")
_TAGS = re.compile(r"\{[{%]")
_FOREIGN_OPERATORS = ("+", "-", "*", "**", "~", "%", "/", "//", "==", "in", "<", "and", "is", "|")
_FOREIGN_FILTERS = ("list", "join", "replace('a', 'b' * 9999)", "indent(99999)", "length", "tojson", "int", "string")
_FOREIGN_NUMBERS = ("0", "-1", "99999", "2000000000", "9" * 4000, "1e308")


def mutated_template(source: str, random: Random) -> str:
    """Return a changed copy of a template."""
    for _ in range(random.randint(1, MAX_EDITS)):
        match random.randrange(8):
            case 0:
                source = _with_one(_OPERATORS, f" {random.choice(_FOREIGN_OPERATORS)} ", source, random)
            case 1:
                source = _with_one(_NUMBERS, random.choice(_FOREIGN_NUMBERS), source, random)
            case 2:
                source = _with_one(_FILTERS, f"| {random.choice(_FOREIGN_FILTERS)}", source, random)
            case 3 | 4:
                source = _put_in(random.choice(HOSTILE_EXPRESSIONS), source, random)
            case 5:
                times = random.choice((10, 99999))
                source = f"{{% for i{times} in range({times}) %}}{source}{{% endfor %}}"
            case 6:
                begin = random.randrange(max(1, len(source)))
                piece = source[begin : begin + random.randint(1, 200)]
                source = _put_in(piece * random.choice((1, 2, 50)), source, random)
            case _:
                begin = random.randrange(max(1, len(source)))
                source = source[:begin] + source[begin + random.randint(1, 40) :]
    return source


def _with_one(pattern: re.Pattern[str], new: str, source: str, random: Random) -> str:
    """Return the text with one of the matches replaced; unchanged without a match."""
    found = list(pattern.finditer(source))
    if not found:
        return source
    match = random.choice(found)
    return source[: match.start()] + new + source[match.end() :]


def _put_in(piece: str, source: str, random: Random) -> str:
    """Return the source with a piece inserted before a tag, at the beginning, or at the end."""
    places = [0, len(source), *(match.start() for match in _TAGS.finditer(source))]
    place = random.choice(places)
    return source[:place] + piece + source[place:]
