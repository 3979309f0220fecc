"""Everything that docs/checklist.md names exists."""

from __future__ import annotations

import ast
import json
import re
from functools import cache
from pathlib import Path

import pytest

from twostroke.bench.reproduce.run import RESULTS
from twostroke.cli.main import app

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "checklist.md"
ROW = re.compile(r"^\| (\d+) \|.*\| (.*) \|$", re.MULTILINE)
ROWS = {int(number): shown for number, shown in ROW.findall(PAGE.read_text())}
NAMED = sorted({name for shown in ROWS.values() for name in re.findall(r"`([^`]+)`", shown)})
LINKED = sorted({target for shown in ROWS.values() for target in re.findall(r"\]\(([^)#]+)", shown)})


REPRODUCED = sorted(
    {name for command in NAMED if command.startswith("twostroke bench reproduce ") for name in command.split()[3:]}
)


@cache
def names_in(file: Path) -> frozenset[str]:
    """Return the functions of a test file and the names assigned at its top level."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return frozenset(names)


def test_every_behaviour_has_a_row_with_something_that_shows_it() -> None:
    assert sorted(ROWS) == list(range(1, 118))
    assert all(re.search(r"`|\]\(", shown) for shown in ROWS.values()), ROWS


@pytest.mark.parametrize("name", NAMED)
def test_what_is_named_exists(name: str) -> None:
    if name.startswith("tests/"):
        file, _, test = name.partition("::")
        assert test.partition("[")[0] in names_in(ROOT / file)
    elif name.startswith("twostroke "):
        _, bound, _ = app.parse_args(name.removeprefix("twostroke "), exit_on_error=False, print_error=False)
        if name.startswith("twostroke bench reproduce "):
            assert set(bound.arguments["names"]) <= set(RESULTS)
    elif name.startswith("benchmarks/"):
        assert (ROOT / name).is_file()
    else:
        raise AssertionError(f"neither a test, a command nor a result: {name}")


@pytest.mark.parametrize("name", REPRODUCED)
def test_a_reproduction_has_a_result(name: str) -> None:
    results = ROOT / "benchmarks" / "results"
    assert (results / f"{name}.json").is_file() or any(results.glob(f"{name}-*.json"))


def test_a_result_that_misses_a_goal_is_listed() -> None:
    folder = ROOT / "benchmarks" / "results"
    named = {Path(name).stem for name in NAMED if name.startswith("benchmarks/") and name.endswith(".json")}
    files = {
        file for name in {*REPRODUCED, *named} for part in (name, f"{name}-*") for file in folder.glob(f"{part}.json")
    }
    missing = {file.stem for file in files if json.loads(file.read_text())["results"].get("holds") is False}
    _, _, listed = PAGE.read_text().partition("## Results that miss a goal")
    assert set(re.findall(r"^\| ([a-z][\w-]*\d*[\w-]*) \|", listed, re.MULTILINE)) - {"result"} == missing


@pytest.mark.parametrize("target", LINKED)
def test_what_is_linked_exists(target: str) -> None:
    assert (PAGE.parent / target).is_file()
