"""Rules of CONTRIBUTING.md for all of src/ and benchmarks/ that no linter has."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import twostroke

REPOSITORY = Path(__file__).parents[2]
MOST_LINES = 450
MOST_PARAMETERS = 7

LONGER_FILES: set[str] = set()
"""Files that are longer still. The list only shrinks: an entry that does not hold fails the test."""
SUPPRESSIONS: set[str] = set()
"""Files outside of kernels/ with a function of more parameters still."""
SHARED_NAMES: set[str] = set()
"""Names that several public classes have still."""
DRIVERS = {"llama_cpp_driver.py"}
"""Drivers of other engines: `bench quality` can put this one beside a user's model."""


@cache
def modules() -> Mapping[str, str]:
    """Return the text of each module of src/ and benchmarks/, by its path."""
    paths = [path for folder in ("src", "benchmarks") for path in (REPOSITORY / folder).rglob("*.py")]
    return {str(path.relative_to(REPOSITORY)): path.read_text(encoding="utf-8") for path in sorted(paths)}


@cache
def trees() -> Mapping[str, ast.Module]:
    return {path: ast.parse(text) for path, text in modules().items()}


def test_no_file_is_longer_than_a_reader_keeps_in_mind() -> None:
    assert {path for path, text in modules().items() if len(text.splitlines()) > MOST_LINES} == LONGER_FILES


def long_signatures(tree: ast.Module) -> Iterator[str]:
    """Yield the functions with more parameters than there should be, `self` and `cls` not counted."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            if len(given) - (given[0].arg in ("self", "cls") if given else 0) > MOST_PARAMETERS:
                yield "a lambda" if isinstance(node, ast.Lambda) else node.name


def test_no_function_outside_of_kernels_takes_more_than_seven_parameters() -> None:
    outside = {path: tree for path, tree in trees().items() if not path.startswith("src/twostroke/kernels/")}
    assert {path for path, tree in outside.items() if any(long_signatures(tree))} == SUPPRESSIONS
    assert {path for path in outside if re.search(r"noqa:[^\n]*PLR0913", modules()[path])} == SUPPRESSIONS


def test_no_folder_but_those_of_kernels_and_tests_is_let_off() -> None:
    ignores = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["ruff"]["lint"]
    let_off = {path for path, rules in ignores["per-file-ignores"].items() if {"PLR0913", "PLR", "PL"} & set(rules)}
    assert let_off == {"src/twostroke/kernels/cuda/*_programs.py", "tests/*"}


def test_no_two_public_classes_have_one_name() -> None:
    found: defaultdict[str, list[str]] = defaultdict(list)
    for path, tree in trees().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(path)
    assert {name for name, paths in found.items() if len(paths) > 1} == SHARED_NAMES


def test_the_wheel_is_the_package_alone() -> None:
    """Code that reproduces this project's results, trains its model or tests it is only in a clone."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    build = project["tool"]["scikit-build"]
    assert build["wheel"]["packages"] == ["src/twostroke"]
    assert not {"include", "files", "force-include", "install-dir"} & set(build["wheel"])
    package = REPOSITORY / "src" / "twostroke"
    (layers,) = (one["layers"] for one in project["tool"]["importlinter"]["contracts"] if one["type"] == "layers")
    rooms = {name for layer in layers for name in layer.replace("|", " ").split()} | {"embedded", "__init__"}
    held = {path.stem for path in package.glob("*.py")} | {path.parent.name for path in package.glob("*/*.*")}
    assert held - {"__pycache__"} == rooms
    drivers = {path.name for path in (package / "measure" / "peers" / "drivers").glob("*_driver.py")}
    assert drivers == DRIVERS
    assert Path(twostroke.__file__).parent.name == package.name
