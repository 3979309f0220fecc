"""Every Triton program compiles for an H100, without one: the compiler refuses code that the interpreter accepts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import twostroke

SHARED_MEMORY = 232_448
"""Bytes that a program may have of capability 9.0."""
PROGRAMS = {
    "add_pairs": 1,
    "add_runs": 4,
    "attend": 13,
    "best_of_slices": 1,
    "draw_filtered": 1,
    "draw_in_slices": 1,
    "fold_parts": 4,
    "multiply": 7,
    "multiply_by_tma": 2,
    "multiply_experts": 4,
    "multiply_floats": 5,
    "norm_rows": 3,
    "rotate_rows": 1,
    "gate_times": 3,
    "write_slots": 4,
}
"""What each becomes for the types and shapes of the compiler's process, however many rows a step has: one that is
compiled again for another step would stop all requests for a second."""


def test_every_program_compiles_for_a_card(tmp_path: Path) -> None:
    # in a process without the interpreter, and without what another run has compiled
    sources = Path(twostroke.__file__).parents[1]
    env = ["env", "-u", "TRITON_INTERPRET", f"TRITON_CACHE_DIR={tmp_path}", f"PYTHONPATH={sources}"]
    command = [*env, sys.executable, "-m", "triton_compiler", "9.0"]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [line.split() for line in done.stdout.splitlines()]
    assert {name: int(count) for name, _, count in found} == PROGRAMS
    assert all(int(shared) <= SHARED_MEMORY for _, shared, _ in found), done.stdout
