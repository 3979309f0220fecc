"""Command line of child processes, which never import modules from the current folder."""

from __future__ import annotations

import sys


def child_command(module: str, *arguments: str) -> tuple[str, ...]:
    """Return the command that runs a module of this package in its own Python process.

    `-m` alone searches the current folder first for every import. That may be a model's folder with a `jinja2.py` in
    it, and no code of a model is ever run. `-P` excludes the folder. The module runs within `twostroke.child`, so that
    a child that is stopped during its start also ends with its parent.
    """
    return (sys.executable, "-P", "-m", "twostroke.child", module, *arguments)
