"""The kernels of 64-bit Arm: compiled across and run on an emulated processor (csrc/tests)."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
VENV = Path(sys.prefix)
TOOLS = ("make", str(VENV / "bin" / "cmake"), "aarch64-linux-gnu-g++", "qemu-aarch64")
MISSING = [Path(tool).name for tool in TOOLS if shutil.which(tool) is None]


@pytest.mark.skipif(
    bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (Debian: g++-aarch64-linux-gnu qemu-user)"
)
def test_every_arm_level_passes_the_native_tests() -> None:
    # in the environment that runs this, which is taken as it is: a test installs nothing
    command = ["make", f"VENV={VENV}", "native-test-arm"]
    made = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stdout[-4000:] + made.stderr[-4000:]
    for level in ("neon", "neon_dotprod"):
        assert f"{level} " in made.stdout, f"{level} did not run:\n{made.stdout[-4000:]}"
