"""Everything that docs/checklist.md names exists."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from itertools import takewhile
from pathlib import Path
from statistics import median

import pytest

from benchmarks.__main__ import app as benchmarks_app
from benchmarks.goals import goals_of
from benchmarks.reproduce.run import RESULTS
from benchmarks.reproduce.soak import GOAL_WORST_WINDOW, WINDOWS
from twostroke.cli.main import app
from twostroke.measure.report import load
from twostroke.measure.sweep.run import decode_steps_per_1k_prompt

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "checklist.md"
ROW = re.compile(r"^\| (\d+) \|.*\| (.*) \|$", re.MULTILINE)
ROW_LINES = {int(row[1]): row[0] for row in ROW.finditer(PAGE.read_text())}
ROWS = {int(number): shown for number, shown in ROW.findall(PAGE.read_text())}
NAMED = sorted({name for shown in ROWS.values() for name in re.findall(r"`([^`]+)`", shown)})
LINKED = sorted({target for shown in ROWS.values() for target in re.findall(r"\]\(([^)#]+)", shown)})
RESULT_FILES = ROOT / "benchmarks" / "results"
OF_TRAINING = {"companions.json", "embedded_model.json"}
"""Files that training/ wrote, in another form."""
WITH_GOALS = [path for path in sorted(RESULT_FILES.glob("*.json")) if path.name not in OF_TRAINING]
BENCHES = ("python -m benchmarks ", "twostroke bench ")
"""Beginnings of commands that write results. The first was the second until benchmarks/ had a command of its own."""
MARK = "([misses a goal](#results-that-miss-a-goal))"
"""What a row says behind a command or a file whose figures miss a goal."""


@cache
def ids_in(file: Path) -> frozenset[str]:
    """Return the tests of a file by their names in pytest's ids, without cases."""
    names: set[str] = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ClassDef):
            names.add(node.name)
            names.update(f"{node.name}::{part.name}" for part in node.body if isinstance(part, ast.FunctionDef))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):  # of Hypothesis: TestScheduler = SchedulerMachine.TestCase
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return frozenset(name for name in names if name.rpartition("::")[2].startswith(("test_", "Test")))


def not_collected(names: Iterable[str]) -> set[str]:
    """Return the tests that pytest does not find, or not with the named case. Its message leaves out the case."""
    command = [sys.executable, "-m", "pytest", "-n0", "--collect-only", "-q", "-p", "no:cacheprovider", *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    missing = set(re.findall(r"^ERROR: (?:not found|file or directory not found): (.+)$", done.stderr, re.MULTILINE))
    assert done.returncode == (4 if missing else 0), done.stdout[-2000:] + done.stderr[-2000:]
    return {name.removeprefix(f"{ROOT}/") for name in missing}


def bench_of(command: str) -> tuple[str, ...]:
    """Return the names of the benchmark that a command runs, such as ("reproduce", "r5"); none if it runs none."""
    start = next((start for start in BENCHES if command.startswith(start)), None)
    words = [] if start is None else shlex.split(command.removeprefix(start))
    return tuple(takewhile(lambda word: not word.startswith("-"), words))


@cache
def results_of(name: str) -> tuple[Path, ...]:
    """Return the committed results that a name stands for: a file, or all files that a benchmark's command wrote."""
    if name.startswith("benchmarks/"):
        return (ROOT / name,)
    bench = bench_of(name)
    return tuple(path for path in WITH_GOALS if bench and bench_of(load(path).command) == bench)


def misses(name: str) -> bool:
    """Whether a figure of the results that a name stands for misses its goal."""
    return any(not goal.holds for path in results_of(name) for goal in goals_of(load(path)))


def test_every_behaviour_has_a_row_with_something_that_shows_it() -> None:
    assert sorted(ROWS) == list(range(1, 118))
    assert all(re.search(r"`|\]\(", shown) for shown in ROWS.values()), ROWS


@pytest.mark.parametrize("name", NAMED)
def test_what_is_named_exists(name: str) -> None:
    if name.startswith("tests/"):
        file, _, test = name.partition("::")
        assert test.partition("[")[0] in ids_in(ROOT / file)
    elif name.startswith("twostroke "):
        app.parse_args(name.removeprefix("twostroke "), exit_on_error=False, print_error=False)
    elif name.startswith("python -m benchmarks "):
        words = name.removeprefix("python -m benchmarks ")
        _, bound, _ = benchmarks_app.parse_args(words, exit_on_error=False, print_error=False)
        if words.startswith("reproduce "):
            assert set(bound.arguments["names"]) <= set(RESULTS)
    elif name.startswith("benchmarks/"):
        assert (ROOT / name).is_file()
    else:
        raise AssertionError(f"neither a test, a command nor a result: {name}")


def test_what_is_named_runs_without_a_soak() -> None:
    """A test that all tiers skip shows nothing."""
    named = {name for name in NAMED if name.startswith("tests/")}
    skipped: set[str] = set()
    for file in sorted({name.partition("::")[0] for name in named}):
        text = (ROOT / file).read_text()
        if not re.search(r"pytest\.skip\([^)]*soak", text):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and re.search(
                r"pytest\.skip\([^)]*soak", ast.get_source_segment(text, node) or ""
            ):
                skipped.add(f"{file}::{node.name}")
    assert not named & skipped


def test_pytest_finds_every_named_test_and_case() -> None:
    file = "tests/unit/test_checklist.py::"
    exist, wrong = (f"{file}{test_what_is_named_exists.__name__}[{case}]" for case in (NAMED[0], "no such case"))
    named = [name for name in NAMED if name.startswith("tests/")]
    assert not_collected([*named, exist]) == set()
    assert not_collected([exist, wrong, f"{file}ids_in"]) == {wrong.partition("[")[0], f"{file}ids_in"}


@pytest.mark.parametrize("name", [name for name in NAMED if bench_of(name) or name.startswith("benchmarks/")])
def test_what_is_measured_has_a_committed_result(name: str) -> None:
    assert results_of(name), f"no file in {RESULT_FILES} was written by {name}"


def test_a_row_says_which_of_its_results_miss_a_goal() -> None:
    wrong = {
        (number, name): "has missed goals" if misses(name) else "meets its goals"
        for number, shown in ROWS.items()
        for name in re.findall(r"`([^`]+)`", shown)
        if results_of(name) and misses(name) != (f"`{name}` {MARK}" in shown)
    }
    assert not wrong


def test_exactly_the_goals_that_are_missed_are_listed() -> None:
    """Every file of results, every figure that has a goal: as `benchmarks.goals` reads them."""
    missed = {
        f"| {path.stem} | {goal.what} | {goal.measured:,.4g} | {goal.rule} |"
        for path in WITH_GOALS
        for goal in goals_of(load(path))
        if not goal.holds
    }
    _, _, section = PAGE.read_text().partition("## Results that miss a goal")
    listed = {f"{head}|": why for head, why in re.findall(r"^((?:\| [^|]+ ){4})\| ([^|]+) \|$", section, re.MULTILINE)}
    del listed["| result | figure | measured | goal |"]
    assert set(listed) == missed
    assert all(why.endswith(".") for why in listed.values())


def test_a_result_without_a_goal_is_known_to_have_none() -> None:
    """A new kind of result gets its goals in `benchmarks.goals`, or a name here."""
    assert {path.stem for path in WITH_GOALS if not goals_of(load(path))} == {
        "invariance-price",
        "kernels-Qwen3-0.6B",
        "quality-gemma3-270m",
        "quality-kv-gemma3-270m",
        "quality-kv-qwen-coder",
        "quality-kv-smollm2",
        "quality-qwen-coder",
        "quality-smollm2",
        "ranks",
        "router",
        *(f"qwen3-0.6b{kind}-batch{n}" for kind in ("", "-bf16", "-int8", "-int4") for n in (1, 8, 32)),
    }


def test_the_decode_steps_of_a_thousand_tokens_are_those_of_the_sweep() -> None:
    steps = decode_steps_per_1k_prompt(load(RESULT_FILES / "sweep-smollm2.json").results)
    assert f"about 7 on a GPU, {steps:.0f} with SmolLM2 on one thread" in PAGE.read_text()


def test_the_hour_holds_its_p99_in_every_twelfth() -> None:
    """The benchmark leaves out twelfths in which other processes took much of the processors; these hold it, too."""
    results = load(RESULT_FILES / "soak.json").results
    judged = {claim["what"]: claim["measured"] for claim in results["claims"]}["twelfths that are judged by their p99"]
    assert f"judges {judged:.0f} of the {WINDOWS} twelfths" in ROW_LINES[114]
    windows: dict[str, list[dict[str, float]]] = results["windows"]
    for of_kind in windows.values():
        p99 = [window["p99"] for window in of_kind]
        assert len(p99) == WINDOWS
        assert max(p99) <= GOAL_WORST_WINDOW * median(p99)


def test_131072_tokens_were_served_over_http_in_bounded_memory() -> None:
    result = load(RESULT_FILES / "long-prompt.json")
    claims = {claim["what"]: claim for claim in result.results["claims"]}
    assert result.workload["long_prompt"] == 131_072
    for what in ("engine process beyond KV, served, MiB", "HTTP process, growth, served, MiB"):
        assert claims[what]["holds"] is True
    assert {"TTFT of the long prompt, served, one layer, s", "TTFT of the long prompt, s"} <= set(claims)
    assert result.results["served"]["engine_growth_bytes"] >= result.results["served"]["kv_bytes"]


def test_the_embedded_model_keeps_its_goals() -> None:
    found = json.loads((RESULT_FILES / "embedded_model.json").read_text())
    assert found["below_ngram"] >= 0.2
    assert found["completions"]["sampled"]["parse"] >= 50


@pytest.mark.parametrize("target", LINKED)
def test_what_is_linked_exists(target: str) -> None:
    assert (PAGE.parent / target).is_file()
