"""Runs one driver: `python start.py NAME`, in any environment.

This folder becomes a package of its own, because twostroke is not installed there, and leaves the search path, where a
file of ours could hide a library of theirs.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType


def main() -> None:
    """Imports the driver that the command line names, and lets it serve."""
    folder = str(Path(__file__).resolve().parent)
    sys.path[:] = [entry for entry in sys.path if entry != folder]
    package = ModuleType("drivers")
    package.__path__ = [folder]
    sys.modules["drivers"] = package
    import_module(f"drivers.{sys.argv[1]}").main()


if __name__ == "__main__":
    main()
