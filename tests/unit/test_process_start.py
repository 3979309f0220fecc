"""The time since this process started, as the system counts it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from twostroke.process_start import seconds_since_start

ASKS = """
import time
time.sleep(0.3)
from twostroke.process_start import seconds_since_start
print(seconds_since_start())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="others do not tell")
def test_what_came_before_the_first_import_counts() -> None:
    found = float(subprocess.run([sys.executable, "-c", ASKS], capture_output=True, check=True, text=True).stdout)
    assert 0.28 < found < 30


def test_it_grows() -> None:
    before = seconds_since_start()
    assert 0 <= before <= seconds_since_start()


@pytest.mark.parametrize("content", [None, "", "1 (a) b", "1 (a) b x y z " + "no " * 20])
def test_a_system_that_does_not_tell(content: str | None, tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    if content is not None:
        stat.write_text(content)
    assert 0 <= seconds_since_start(stat) <= seconds_since_start() + 0.1
