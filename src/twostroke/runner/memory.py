"""How much memory this process may still take, as the kernel and its control group see it."""

from __future__ import annotations

from pathlib import Path

_CGROUP_V2 = Path("/sys/fs/cgroup")
_CGROUP_V1 = Path("/sys/fs/cgroup/memory")


def free_host_bytes(meminfo: Path = Path("/proc/meminfo"), cgroups: tuple[Path, ...] = (_CGROUP_V2, _CGROUP_V1)) -> int:
    """Bytes that can be taken without swapping: the machine's available memory, cut to what the control group leaves.

    Files that the kernel can drop again (page cache) count as free on both sides.
    """
    available = _meminfo_field(meminfo, "MemAvailable")
    for folder in cgroups:
        left = _cgroup_bytes_left(folder)
        if left is not None:
            available = min(available, left)
    return max(available, 0)


def _meminfo_field(meminfo: Path, name: str) -> int:
    for line in meminfo.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"{meminfo} has no {name}")


def _cgroup_bytes_left(folder: Path) -> int | None:
    """Limit minus use of one control group; None when it sets no limit (or does not exist)."""
    for limit_name, used_name, cache_key in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit, used = (folder / limit_name).read_text().strip(), int((folder / used_name).read_text())
            stat = (folder / "memory.stat").read_text()
        except (OSError, ValueError):
            continue
        if not limit.isdigit() or int(limit) >= 1 << 60:  # "max", or version 1's way to say so
            return None
        droppable = sum(int(line.split()[1]) for line in stat.splitlines() if line.split()[0] == cache_key)
        return int(limit) - (used - droppable)
    return None
