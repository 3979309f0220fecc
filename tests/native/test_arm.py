"""The kernels of 64-bit Arm: compiled across and run on an emulated processor (csrc/tests)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
VENV = Path(sys.prefix)


def test_every_arm_level_passes_the_native_tests(find_program: Callable[[str, str], str]) -> None:
    for name, package in (
        ("make", "make"),
        (str(VENV / "bin" / "cmake"), "cmake"),
        ("aarch64-linux-gnu-g++", "g++-aarch64-linux-gnu"),
        ("qemu-aarch64", "qemu-user"),
    ):
        find_program(name, package)
    # in the environment that runs this; a test installs nothing
    command = ["make", f"VENV={VENV}", "native-test-arm"]
    made = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stdout[-4000:] + made.stderr[-4000:]
    for level in ("neon", "neon_dotprod"):
        assert f"{level} " in made.stdout, f"{level} did not run:\n{made.stdout[-4000:]}"
