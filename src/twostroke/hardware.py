"""Description of the machine and the libraries that measured figures depend on."""

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
    """The machine and the libraries that a figure depends on, without anything that identifies the machine."""

    cpu: str
    cores: int
    """Processors that this process may use."""
    memory_bytes: int
    python: str
    torch: str
    numpy: str
    system: str
    card: str | None = None
    """Product name of the GPU, for figures of one; otherwise None, as are the fields below."""
    driver: str | None = None
    """Driver version of the GPU; None also if it is unknown."""
    cuda: str | None = None
    """CUDA version that torch was built for."""
    triton: str | None = None

    @classmethod
    def of_this_machine(cls) -> Hardware:
        """Read the description from the operating system."""
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
        """Return the known fields; those of a GPU only for figures of one."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def with_card(self, card: str, cuda: str | None) -> Hardware:
        """Return the description with an NVIDIA GPU.

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
    """Return the version of the kernel module, or nvidia-smi's answer if a container hides the module."""
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
    """Return the first version of two or three numbers in a driver's text.

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
