"""The Python of the README runs as it stands there; what asks a server, in tests/api."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
WRITTEN = re.findall(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
SCRIPTS = [script for script in WRITTEN if "openai" not in script]


def test_there_are_scripts() -> None:
    assert len(SCRIPTS) == 2


@pytest.mark.parametrize("script", SCRIPTS, ids=("LLM", "AsyncEngine"))
def test_a_script_runs_and_prints(script: str) -> None:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
