"""The examples in docstrings run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import twostroke
from twostroke.kernels.cuda import has_triton

MODULES = [m.name for m in pkgutil.walk_packages(twostroke.__path__, "twostroke.") if not m.name.endswith("__main__")]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    if name.startswith("twostroke.kernels.cuda.") and not has_triton():
        pytest.skip("not installed: triton")
    assert doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS).failed == 0
