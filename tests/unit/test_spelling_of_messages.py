"""Messages are spelt as users spell things: no True, False or None of Python's, and no value as Python writes it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import twostroke
from twostroke.errors import InvalidParameter, shown

SOURCES = sorted(Path(twostroke.__file__).parent.rglob("*.py"))
PYTHON = re.compile(r"\b(True|False|None)\b(?! (of|do|does|is|fits)\b)|<class|\bself\.")
"""A sentence may begin with "None of"."""
VALUES = frozenset({"value", "given", "cap", "flags", "wanted", "default"})
"""Names of what may be of any kind, in a message with `!r`; `shown` writes those."""
NAMES = frozenset({"limit", "remedy", "told", "words", "why", "message"})
"""Names of what messages are made of."""


def raised(tree: ast.Module) -> Iterator[ast.expr]:
    """Yield what is raised, and what messages are made of."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and node.exc is not None:
            yield node.exc
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in NAMES:
            yield node.value


def faults(source: str) -> list[str]:
    found: list[str] = []
    for expression in raised(ast.parse(source)):
        for part in ast.walk(expression):
            if isinstance(part, ast.Constant) and isinstance(part.value, str) and PYTHON.search(part.value):
                found.append(f"{part.lineno}: {part.value!r}")
            if (
                isinstance(part, ast.FormattedValue)
                and isinstance(part.value, ast.Name)
                and part.conversion == ord("r")
            ):
                found += [f"{part.lineno}: {part.value.id}!r"] if part.value.id in VALUES else []
    return found


def test_no_message_has_pythons_spelling() -> None:
    found = {str(path): faults(path.read_text(encoding="utf-8")) for path in SOURCES}
    assert len(found) > 500
    assert {path: wrong for path, wrong in found.items() if wrong} == {}


@pytest.mark.parametrize(
    "statement",
    [
        'raise Error("needs decode=True")',
        'raise Error(f"{name}=None: give one")',
        'limit = "must be True or False"',
        'raise Error(f"found {value!r}")',
    ],
)
def test_the_check_bites(statement: str) -> None:
    assert len(faults(statement)) == 1


def test_values_are_written_as_json_and_users_write_them() -> None:
    assert str(InvalidParameter("decode", True, "must be a number")) == "decode=true: must be a number."
    assert str(InvalidParameter("ssl_keyfile", None, "goes with ssl_certfile")) == (
        "ssl_keyfile is not given: goes with ssl_certfile."
    )
    assert shown([None, {"a": False}]) == "[null, {'a': false}]"
