"""The Python of the README and of docs/python.md runs as it stands there; what asks a server, in tests/api."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_LINES = 150


def scripts_of(page: str) -> list[str]:
    """Return the Python programs of a page."""
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


SCRIPTS = scripts_of("docs/python.md")


def test_there_are_scripts() -> None:
    assert len(SCRIPTS) == 2
    assert scripts_of("README.md") == SCRIPTS[:1]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= MOST_LINES


@pytest.mark.parametrize("script", SCRIPTS, ids=("LLM", "AsyncEngine"))
def test_a_script_runs_and_prints(script: str) -> None:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    for link in links:
        name, _, heading = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        if heading:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert heading in {re.sub(r"[^\w\- ]", "", one).lower().replace(" ", "-") for one in headings}, link


def test_the_index_has_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    names = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert {name for name in names if f"]({name})" not in index} == set()
