"""docs/systems.md names pages, tests, benchmarks and commands that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.__main__ import app as benchmarks_app
from benchmarks.reproduce.run import RESULTS
from twostroke.cli.bench import app as bench_app
from twostroke.cli.main import app

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs" / "systems.md").read_text(encoding="utf-8")
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ")][1:]
TESTS = sorted(set(re.findall(r"`(tests/[^`]+)`", PAGE)))
COMMANDS = sorted(set(re.findall(r"`twostroke ([^`]+)`", PAGE)))
REPRODUCED = sorted(set(re.findall(r"`python -m benchmarks ([^`]+)`", PAGE)))
SYSTEMS = ("DistServe", "Mooncake", "P/D-Serve", "vLLM", "TGI", "TensorRT-LLM", "SGLang")


def test_every_system_that_the_articles_name_has_rows() -> None:
    assert [name for name in SYSTEMS if f"| **{name}**" not in PAGE] == []
    assert "PrefillServe" in PAGE
    assert "**the cluster-wide store**" in PAGE


def test_every_row_has_five_cells() -> None:
    assert len(ROWS) > 30
    assert [row for row in ROWS if row.count("|") != 6] == []


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\((?!https?:)([^)]+)\)", PAGE))))
def test_a_link_leads_somewhere(target: str) -> None:
    path, _, anchor = target.partition("#")
    page = (REPOSITORY / "docs" / path).resolve()
    assert page.is_file()
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert not anchor or anchor in anchors


@pytest.mark.parametrize("test", TESTS)
def test_a_named_test_exists(test: str) -> None:
    path, _, name = test.partition("::")
    text = (REPOSITORY / path).read_text(encoding="utf-8")
    assert not name or re.search(rf"^(?:async )?def {name}\(", text, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_named_command_exists(command: str) -> None:
    words = command.split()
    assert words[0] in {name for name in app if not name.startswith("-")}
    if words[0] == "bench":
        assert words[1] in set(bench_app)


@pytest.mark.parametrize("command", REPRODUCED)
def test_a_named_result_exists(command: str) -> None:
    words = command.split()
    assert words[0] in set(benchmarks_app)
    assert words[0] != "reproduce" or words[1] in RESULTS


def test_results_named_beside_a_command_exist() -> None:
    """Such as in `python -m benchmarks reproduce r3`, `r4`, `paging-price`."""
    for rest in re.findall(r"`python -m benchmarks reproduce [^`]+`((?:, `[^`]+`)+)", PAGE):
        assert set(re.findall(r"`([^`]+)`", rest)) <= RESULTS.keys()
