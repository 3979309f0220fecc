"""Triton's kernels, in a process of their own (`make test-triton`); in others they are skipped, and it is said why.

The directory is not named `triton`: `tests` is on the path of imports, and it would pass for the package.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from triton_device import why_not

WHY_NOT = why_not()


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Skips a module before it is imported, since that would need Triton."""
    return None if WHY_NOT is None else _Unrunnable.from_parent(parent, path=module_path)


class _Unrunnable(pytest.Module):
    """Its tests cannot run here; where they were asked for by name and everything is required, that is a failure."""

    def collect(self) -> list[pytest.Item]:
        """None."""
        wanted = any(Path(__file__).parent.name in arg for arg in self.config.args)
        if wanted and self.config.getoption("require_all"):
            raise self.CollectError(WHY_NOT)
        pytest.skip(WHY_NOT or "", allow_module_level=True)
