"""The path of a plain request: how it is counted, and that it has not become longer than committed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.path.run import COMMITTED, measure_chat, measure_generate, size_of

OTHER_LINES = 10
"""Kernels of other processors are called through a few other lines."""
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
    """If it has to become longer, `make path ARGS=--write` belongs in the same commit."""
    committed = json.loads(COMMITTED.read_text(encoding="utf-8"))
    for name, size in (("LLM.generate", measure_generate()), ("chat over HTTP", measure_chat())):
        assert size.num_files <= committed[name]["files"], (name, size, committed[name])
        assert size.num_lines <= committed[name]["lines"] + OTHER_LINES, (name, size, committed[name])


def test_the_committed_path_is_one_that_an_evening_is_enough_for() -> None:
    committed = json.loads(COMMITTED.read_text(encoding="utf-8"))
    assert committed["chat over HTTP"]["files"] <= 65
    assert committed["chat over HTTP"]["lines"] <= 5404 * 0.67, "about two thirds of what it was in 09470fb0"
    assert committed["LLM.generate"]["files"] <= 40
