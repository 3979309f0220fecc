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
