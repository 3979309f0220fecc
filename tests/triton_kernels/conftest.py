"""Triton's kernels, in a process of their own (`make test-triton`); in others they are skipped, and it is said why.

The directory is not named `triton`: `tests` is on the path of imports, and it would pass for the package.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from triton_device import why_not

WHY_NOT = why_not()


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Skips a module before it is imported, since that would need Triton."""
    return None if WHY_NOT is None else _Unrunnable.from_parent(parent, path=module_path)


@pytest.fixture(autouse=True, scope="session")
def products_whose_shape_does_not_matter() -> None:
    """The interpreter multiplies by NumPy's BLAS, which on some processors adds up in another order where a tile has
    another height or width. Our kernels' bits are to be judged, not its: each element is summed here in the order of
    the tile's depth. Whether a card's units do so is seen on a card alone."""
    from triton.runtime import interpreter

    multiply = np.matmul

    def matmul(a: Any, b: Any, dtype: Any = None) -> Any:
        if a.ndim != 2 or dtype is None:
            return multiply(a, b, dtype=dtype)
        a, b = a.astype(dtype), b.astype(dtype)
        total = np.zeros((a.shape[0], b.shape[1]), dtype)
        for k in range(a.shape[1]):
            total += a[:, k, None] * b[k]
        return total

    class NumPy:
        """For the interpreter alone."""

        def __getattr__(self, name: str) -> Any:
            return matmul if name == "matmul" else getattr(np, name)

    interpreter.np = NumPy()  # type: ignore[assignment]


class _Unrunnable(pytest.Module):
    """Its tests cannot run here; where they were asked for by name and everything is required, that is a failure."""

    def collect(self) -> list[pytest.Item]:
        """None."""
        wanted = any(Path(__file__).parent.name in arg for arg in self.config.args)
        if wanted and self.config.getoption("require_all"):
            raise self.CollectError(WHY_NOT)
        pytest.skip(WHY_NOT or "", allow_module_level=True)
