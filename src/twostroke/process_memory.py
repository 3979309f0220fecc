"""Current and peak memory of processes."""

from __future__ import annotations

import ctypes
from pathlib import Path

_STATUS = Path("/proc/self/status")


def resident_bytes(pid: int | None = None) -> int:
    """Return the resident bytes of a process; default: this one."""
    return _status_bytes("VmRSS", _STATUS if pid is None else Path(f"/proc/{pid}/status"))


def peak_resident_bytes(pid: int | None = None) -> int:
    """Return the peak resident bytes of a process, since its start or `reset_peak`; default: this one."""
    return _status_bytes("VmHWM", _STATUS if pid is None else Path(f"/proc/{pid}/status"))


def reset_peak(pid: int | None = None) -> bool:
    """Begin a new peak of a process at its current resident size; default: this process.

    Returns:
        False if the kernel does not allow it; the peak is then that of the process's whole life.
    """
    try:
        Path(f"/proc/{'self' if pid is None else pid}/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def return_free_memory() -> None:
    """Return unused allocator memory to the system, which can be several times a large body; does nothing without
    glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def own_anonymous_bytes() -> int:
    """Return the resident memory of this process that maps no file; 0 if the system does not report it."""
    try:
        return _status_bytes("RssAnon")
    except (OSError, AssertionError):
        return 0


def anonymous_bytes(pid: int) -> int:
    """Return the resident memory of a process that maps no file; 0 once it has ended."""
    try:
        return _status_bytes("RssAnon", Path(f"/proc/{pid}/status"))
    except (OSError, AssertionError):  # a process that has ended and was not waited for has no such line
        return 0


def _status_bytes(name: str, status: Path = _STATUS) -> int:
    for line in status.read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"{status} has no {name}")
