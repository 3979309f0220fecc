"""Limits on the process of chat templates: memory, and no access to anything but its socket.

Jinja's sandbox has had holes before. A template that escapes the sandbox can open no file, socket or pipe, change no
folder, start no program and, on newer Linux, send no signal. The environment of its process holds no secrets.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import resource
import sys
from collections.abc import Mapping
from pathlib import Path

from twostroke.tokenizer.template_wire import MEMORY_MIB

_MIB = 2**20
_KEPT_PREFIXES = ("PYTHON", "LC_", "LD_", "DYLD_")
"""Prefixes of variables that control how Python runs and what it loads."""
_KEPT_VARIABLES = frozenset({"LANG", "PATH", "TZ", "TZDIR", "VIRTUAL_ENV"})
_LATE_IMPORTS = (
    *("jinja2.constants", "jinja2.debug", "html", "html.entities", "pprint", "textwrap", "unicodedata"),
    *("encodings.ascii", "encodings.latin_1", "encodings.unicode_escape", "encodings.raw_unicode_escape"),
)
"""Modules that filters, error reports and literals import at first use; files cannot be opened by then."""

_ZERO_LIMITS = ("RLIMIT_CORE", "RLIMIT_FSIZE", "RLIMIT_NPROC", "RLIMIT_NOFILE")
"""Limits that are set to 0. Descriptors that are already open stay usable."""

_CREATE_RULESET, _RESTRICT_SELF = 444, 446
"""Numbers of Landlock's system calls, equal on every architecture."""
_NO_NEW_PRIVILEGES = 38
"""PR_SET_NO_NEW_PRIVS of prctl, which Landlock requires."""
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 5: 16}
"""Version of Landlock to its number of rights on files, which are the low bits."""
_TCP_RIGHTS, _TCP_VERSION = 0b11, 4
_SCOPES, _SCOPES_VERSION = 0b11, 6
"""Bits for abstract sockets and for signals to outside processes, and the first version of Landlock with them."""


def confined_environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that the process needs; the server's keys and tokens are left out."""
    return {name: value for name, value in given.items() if name.startswith(_KEPT_PREFIXES) or name in _KEPT_VARIABLES}


def confine() -> None:
    """Limit the memory of this process, and drop every right that rendering does not need.

    Limits that the system does not support are skipped.
    """
    for module in _LATE_IMPORTS:
        importlib.import_module(module)
    limits: dict[str, int] = dict.fromkeys(_ZERO_LIMITS, 0)
    if memory_bytes := _memory_bytes():  # read from a file, so before files are given up
        limits["RLIMIT_AS"] = memory_bytes + MEMORY_MIB * _MIB
    if sys.platform == "linux":
        _drop_file_access()
    for name, most in limits.items():
        with contextlib.suppress(AttributeError, OSError, ValueError):
            resource.setrlimit(getattr(resource, name), (most, most))


def _memory_bytes() -> int:
    """Return the size of this process's address space in bytes; 0 if the system does not report it."""
    with contextlib.suppress(OSError):
        num_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        return num_pages * os.sysconf("SC_PAGE_SIZE")
    return 0


def _drop_file_access() -> None:
    """Enter a Landlock domain without rules, which allows no access and cannot be left."""
    libc = ctypes.CDLL(None)
    version = libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(1))
    if version < 1:  # an older kernel, or one with Landlock switched off
        return
    num_rights = max(number for since, number in _FILE_RIGHTS.items() if since <= version)
    handled = (ctypes.c_uint64 * 3)(
        (1 << num_rights) - 1,
        _TCP_RIGHTS if version >= _TCP_VERSION else 0,
        _SCOPES if version >= _SCOPES_VERSION else 0,
    )
    size = ctypes.sizeof(handled) if version >= _SCOPES_VERSION else 16 if version >= _TCP_VERSION else 8
    ruleset = libc.syscall(_CREATE_RULESET, ctypes.byref(handled), ctypes.c_size_t(size), ctypes.c_uint(0))
    if ruleset < 0:
        return
    libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    libc.syscall(_RESTRICT_SELF, ruleset, ctypes.c_uint(0))
    os.close(ruleset)
