"""The machine and the libraries, as far as figures depend on them."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from dataclasses import asdict, dataclass, replace
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
    card: str | None = None
    """The GPU's product name, where a figure is of one; None elsewhere, as all that follows."""
    driver: str | None = None
    """Of the GPU; None also where it does not say."""
    cuda: str | None = None
    """The version that torch was built for."""
    triton: str | None = None

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

    def as_json(self) -> dict[str, str | int]:
        """What is known; nothing of a card where figures are of none."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def with_card(self, card: str, cuda: str | None) -> Hardware:
        """The same with an NVIDIA GPU that figures are of.

        Args:
            card: its product name.
            cuda: the version that torch was built for.
        """
        return replace(self, card=card, driver=_driver_version(), cuda=cuda, triton=_version("triton"))


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


def _driver_version() -> str | None:
    """Of the kernel's module, or what the driver's own program says where a container hides that."""
    try:
        return driver_in(Path("/proc/driver/nvidia/version").read_text(encoding="utf-8"))
    except OSError:
        pass
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return driver_in(subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout)
    except (OSError, subprocess.SubprocessError):
        return None


def driver_in(text: str) -> str | None:
    """The first version of two or three numbers in what a driver says of itself.

    >>> driver_in("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build")
    '570.124.06'
    >>> driver_in("535.161") , driver_in("no driver")
    ('535.161', None)
    """
    found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text)
    return None if found is None else found[0]


def _proc_field(path: str, name: str) -> str | None:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(name)), None)
