"""Who serves where the native kernels cannot, and how often that is said."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import torch
from twostroke.kernels.dispatch import operators_for
for kernels in ("reference", "auto", "auto"):
    print(operators_for(torch.device("cpu"), torch.float16, kernels).name)
"""


def test_one_process_says_it_once() -> None:
    """In a process of its own: what this one has said already depends on the tests before."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["reference"] * 3
    assert done.stderr.count("torch's own operators serve, slower") == 1
