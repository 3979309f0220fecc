"""Docstrings in plain words: ruff's D401 checks the mood of functions, this checks openings and attributes, too."""

from __future__ import annotations

import ast
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

REPOSITORY = Path(__file__).parents[2]
FOLDERS = ("src/twostroke", "benchmarks", "training")
RIDDLES = {"As", "It", "Its", "Likewise", "Nobody", "Of", "See", "Somebody"}
RIDDLES |= {"That", "Those", "What", "Who", "Whoever", "Whom", "Whose"}
"""First words that leave the reader to find out what a sentence is about."""


class Docstring(NamedTuple):
    """A docstring and the name of what it documents."""

    place: str
    name: str
    text: str

    @property
    def first_line(self) -> str:
        return self.text.strip().split("\n")[0]

    @property
    def is_public(self) -> bool:
        return not any(part.startswith("_") for part in self.name.split(".") if part != "__init__")


def docstrings_of(tree: ast.AST, name: str = "") -> Iterator[tuple[int, str, str]]:
    """Yield line, name and text of every docstring, those behind an assignment included."""
    documented = name
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            documented = f"{name}.{child.name}".strip(".")
            yield from docstrings_of(child, documented)
        elif isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
            if isinstance(child.value.value, str):
                yield child.lineno, documented, child.value.value
        elif isinstance(child, ast.Assign | ast.AnnAssign):
            target = child.targets[0] if isinstance(child, ast.Assign) else child.target
            documented = f"{name}.{ast.unparse(target)}".strip(".")
        elif isinstance(child, ast.stmt):
            yield from docstrings_of(child, name)


@pytest.fixture(scope="module")
def docstrings() -> list[Docstring]:
    found: list[Docstring] = []
    for folder in FOLDERS:
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            place = path.relative_to(REPOSITORY).as_posix()
            tree = ast.parse(path.read_text(encoding="utf-8"))
            found += [Docstring(f"{place}:{line}", *rest) for line, *rest in docstrings_of(tree)]
    return found


def is_riddle(first_line: str) -> bool:
    """Whether a docstring begins with a word that says nothing, or leaves a choice open."""
    words = first_line.split()
    opening = words[0].strip(",.:;") if words else ""
    return not words or opening in RIDDLES or (opening == "Whether" and " or " in first_line)


def test_the_search_finds_docstrings_of_attributes_too() -> None:
    source = 'class A:\n    "Of what."\n    x: int\n    """See x."""\n    def f(self):\n        """Return x."""\n'
    found = list(docstrings_of(ast.parse(source)))
    assert found == [(2, "A", "Of what."), (4, "A.x", "See x."), (6, "A.f", "Return x.")]
    assert [is_riddle(text) for _, _, text in found] == [True, True, False]


def test_no_docstring_begins_with_a_riddle(docstrings: list[Docstring]) -> None:
    assert len(docstrings) > 7000
    assert [f"{one.place}: {one.first_line}" for one in docstrings if is_riddle(one.first_line)] == []


def test_public_docstrings_are_as_long_as_they_need_to_be(docstrings: list[Docstring]) -> None:
    lengths = [len(one.first_line.split()) for one in docstrings if one.is_public]
    assert 5 <= statistics.median(lengths) <= 14
