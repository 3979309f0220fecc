"""The examples in docstrings run."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import twostroke
from twostroke.kernels.cuda import has_triton

FOLDER = Path(twostroke.__file__).parent
MODULES = [
    ".".join(("twostroke", *path.relative_to(FOLDER).with_suffix("").parts)).removesuffix(".__init__")
    for path in sorted(FOLDER.rglob("*.py"))
    if path.name != "__main__.py" and ">>>" in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    if name.startswith("twostroke.kernels.cuda.") and not has_triton():
        pytest.skip("not installed: triton")
    assert doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS).failed == 0
