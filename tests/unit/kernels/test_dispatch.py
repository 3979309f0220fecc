"""Operators that replace the native kernels where these cannot run, and the warnings about it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from twostroke.errors import SetupError
from twostroke.kernels import cuda, native
from twostroke.kernels.dispatch import dtype_for, operators_for

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
    assert done.stderr.count("using torch's own operators, which are slower") == 1


def test_a_gpu_without_triton_has_torchs_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "has_triton", lambda: False)
    card = torch.device("cuda")
    assert operators_for(card, torch.bfloat16).name == "reference"
    with pytest.raises(SetupError, match=r"kernels=triton: Triton is not installed .*fastest available kernels"):
        operators_for(card, torch.bfloat16, "triton")
    with pytest.raises(SetupError, match="torch's operators, which are used here"):
        operators_for(card, torch.bfloat16, activation_quantization="int8")


def test_triton_serves_no_cpu_outside_of_its_interpreter() -> None:
    with pytest.raises(SetupError, match="kernels=triton: Triton"):
        operators_for(torch.device("cpu"), torch.float32, "triton")
    assert operators_for(torch.device("cpu"), torch.float32).name != "triton"


def test_float16_is_computed_in_bfloat16_where_native_kernels_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, card = torch.device("cpu"), torch.device("cuda")
    assert [dtype_for("float16", cpu, kernels) for kernels in ("auto", "native", "portable")] == ["bfloat16"] * 3
    assert dtype_for("float16", cpu, "reference") == dtype_for("float16", card) == "float16"
    assert [dtype_for(name, cpu) for name in ("float32", "bfloat16")] == ["float32", "bfloat16"]
    monkeypatch.setattr(native, "is_built", lambda: False)
    assert dtype_for("float16", cpu) == "float16"
