"""A process of ours that is stopped while it imports does not outlive its parent."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from twostroke.child_command import child_command

PATIENCE_S = 60.0

MODULE = """
import os, signal, sys
from pathlib import Path
folder = Path(sys.argv[1])
(folder / "pid").write_text(f"{os.getpid()} {sys.argv[0]} {__name__}")
os.kill(os.getpid(), signal.SIGSTOP)
(folder / "went on").touch()
"""

PARENT = """
import subprocess, sys, time
subprocess.Popen(sys.argv[1:])
time.sleep(600)
"""


def wait_for(path: Path) -> None:
    end = time.monotonic() + PATIENCE_S
    while not path.exists() or (path.name == "pid" and not path.read_text()):
        assert time.monotonic() < end, f"{path} did not come"
        time.sleep(0.01)


def state_of(pid: int) -> str:
    """Return the state's letter, as in /proc: T is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux signals children at their parent's end")
def test_one_that_is_stopped_in_its_imports_goes_on_when_its_parent_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "heavy_imports.py").write_text(MODULE)
    command = child_command("heavy_imports", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    parent = subprocess.Popen([sys.executable, "-c", PARENT, *command])
    try:
        wait_for(tmp_path / "pid")
        pid, program, name = (tmp_path / "pid").read_text().split()
        assert (Path(program).name, name) == ("heavy_imports.py", "__main__")
        end = time.monotonic() + PATIENCE_S
        while state_of(int(pid)) != "T":
            assert time.monotonic() < end
            time.sleep(0.01)
        assert not (tmp_path / "went on").exists()
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    wait_for(tmp_path / "went on")
