"""Text that the embedded model has never seen: the modules of Python's own library that its training held out."""

from __future__ import annotations

import sysconfig
from pathlib import Path

MODULES = (
    "argparse.py",
    "bisect.py",
    "calendar.py",
    "configparser.py",
    "contextlib.py",
    "csv.py",
    "fractions.py",
    "getopt.py",
    "graphlib.py",
    "heapq.py",
    "json/__init__.py",
    "json/decoder.py",
    "json/encoder.py",
    "json/scanner.py",
    "json/tool.py",
    "mailbox.py",
    "pathlib.py",
    "queue.py",
    "sched.py",
    "shlex.py",
    "textwrap.py",
)
"""What training/corpus.py keeps out; other versions of Python have slightly other texts of the same names."""


def held_out_texts() -> list[str]:
    """One text a module."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = (root / name for name in MODULES)
    return [path.read_text(encoding="utf-8") for path in paths if path.is_file()]
