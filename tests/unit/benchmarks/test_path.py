"""The path of a plain request: how it is counted, and that it has not become longer than committed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.path.run import COMMITTED, measure_chat, measure_generate, size_of

SOURCE = '''"""A module."""

import os


@decorated
def outer(a: int) -> int:
    """Say what.

    More of it.
    """
    # a comment

    def inner() -> int:
        return 1

    text = """of two
    lines"""
    return (
        a
        + inner()
    )
'''


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "twostroke" / "room.py"
    path.parent.mkdir()
    path.write_text(SOURCE)
    return str(path)


def test_docstrings_comments_and_blank_lines_do_not_count(file: str) -> None:
    size = size_of([f"{file}:6:outer", f"{file}:6:outer"])
    assert (size.num_functions, size.num_files) == (1, 1)
    assert size.lines_by_file == {"room.py": 8}, "two for its head, two of a text, four of what it returns"


def test_functions_within_functions_count_for_themselves(file: str) -> None:
    assert size_of([f"{file}:14:outer.<locals>.inner"]).num_lines == 2
    assert size_of([f"{file}:6:outer", f"{file}:14:outer.<locals>.inner"]).num_lines == 10


def test_modules_and_comprehensions_are_no_functions(file: str) -> None:
    assert size_of([f"{file}:1:<module>", f"{file}:19:outer.<locals>.<listcomp>"]).num_functions == 0


def test_the_path_of_a_request_has_not_become_longer() -> None:
    """Where it has to, `make path ARGS=--write` belongs into the same commit. Kernels of other processors are called
    through a few other lines, so a hundredth is let pass."""
    committed = json.loads(COMMITTED.read_text(encoding="utf-8"))
    for name, size in (("LLM.generate", measure_generate()), ("chat over HTTP", measure_chat())):
        found = {"files": size.num_files, "lines": size.num_lines}
        assert all(found[key] <= 1.01 * committed[name][key] for key in found), (name, found, committed[name])
