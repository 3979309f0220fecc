"""The list of the second tier: every name exists, every entry has a reason, and every test is in a tier."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tiers import Entry, TierList

TESTS = Path(__file__).parents[1]
LIST = TierList.read()


@cache
def defined_in(file: str) -> set[str]:
    nodes = ast.walk(ast.parse((TESTS / file).read_text()))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_an_entry_names_a_test_and_a_reason() -> None:
    for entry in LIST.entries:
        file, _, test = entry.name.partition("::")
        assert not test or test.partition("[")[0] in defined_in(file), entry
        assert (TESTS / file).is_file(), entry
        assert entry.reason.endswith("."), entry
        assert entry.keep != 1, f"an entry that keeps every case leaves nothing to the second tier: {entry}"


def test_the_most_exact_entry_counts() -> None:
    tiers = TierList([Entry("a.py", "long"), Entry("a.py::x", "longer", 2), Entry("a.py::x[3]", "longest")])
    assert tiers.second(["a.py::y", "a.py::x[0]", "a.py::x[1]", "a.py::x[2]", "a.py::x[3]", "b.py::x"]) == [
        True, False, True, False, True, False,
    ]  # fmt: skip


def test_a_case_has_the_tier_of_its_test() -> None:
    assert TierList([Entry("a.py::x", "long")]).second(["a.py::x[0]", "a.py::x", "a.py::xy"]) == [True, True, False]


def test_a_name_that_comes_twice_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"twice: a\.py"):
        TierList([Entry("a.py", "long"), Entry("a.py", "longer")])
