"""The machine and the libraries, as far as figures depend on them."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Hardware:
    """The machine and the libraries that a figure depends on; nothing that names the machine."""

    cpu: str
    cores: int
    """Processors this process may use."""
    memory_bytes: int
    python: str
    torch: str
    numpy: str
    system: str

    @classmethod
    def of_this_machine(cls) -> Hardware:
        """Reads what the operating system says."""
        return cls(
            cpu=_proc_field("/proc/cpuinfo", "model name") or platform.machine(),
            cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            memory_bytes=int((_proc_field("/proc/meminfo", "MemTotal") or "0 kB").split()[0]) * 1024,
            python=platform.python_version(),
            torch=_version("torch"),
            numpy=_version("numpy"),
            system=f"{platform.system()} {platform.machine()}",
        )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


def _proc_field(path: str, name: str) -> str | None:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(name)), None)
