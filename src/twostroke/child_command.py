"""How processes of ours are started: never with modules out of the folder that the user stands in."""

from __future__ import annotations

import sys


def child_command(module: str, *arguments: str) -> tuple[str, ...]:
    """Return the command that runs a module of this package in a Python of its own.

    `-m` alone looks for every import in the current folder first. That may be a model's, with a `jinja2.py` in it, and
    no code of a model is ever run. `-P` leaves the folder out. The module runs within `twostroke.child`, so that
    also one that is stopped while it starts ends with its parent.
    """
    return (sys.executable, "-P", "-m", "twostroke.child", module, *arguments)
