"""Tracer of the package's functions, imported by each Python that has this folder on its path.

On SIGUSR2, the functions called since the last signal are written to REQUEST_PATH.PID, one per line.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from types import CodeType, FrameType
from typing import Any

_OUT = os.environ.get("REQUEST_PATH")
_seen: set[CodeType] = set()


def _note(frame: FrameType, event: str, _: Any) -> None:
    if event == "call" and "/twostroke/" in frame.f_code.co_filename:
        _seen.add(frame.f_code)


def _write(*_: Any) -> None:
    lines = [f"{code.co_filename}:{code.co_firstlineno}:{code.co_qualname}" for code in list(_seen)]
    _seen.clear()
    with open(f"{_OUT}.{os.getpid()}", "w", encoding="utf-8") as file:
        file.write("\n".join(lines))


if _OUT is not None:
    threading.setprofile(_note)
    sys.setprofile(_note)
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGUSR2, _write)
