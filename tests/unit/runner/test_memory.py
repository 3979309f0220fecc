"""Free memory as the machine and the control group see it, from files like the kernel's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from twostroke.runner.memory import free_host_bytes, own_cgroups

GIB = 1 << 30


@pytest.fixture
def meminfo(tmp_path: Path) -> Path:
    path = tmp_path / "meminfo"
    path.write_text(f"MemTotal:  {32 * GIB // 1024} kB\nMemAvailable: {16 * GIB // 1024} kB\n")
    return path


def cgroup(folder: Path, limit: str, used: int, droppable: int, *, version: int) -> Path:
    folder.mkdir()
    names = (
        ("memory.max", "memory.current", "inactive_file")
        if version == 2
        else (
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
        )
    )
    (folder / names[0]).write_text(limit + "\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {droppable}\n")
    return folder


def test_without_a_control_group_the_machine_decides(meminfo: Path, tmp_path: Path) -> None:
    assert free_host_bytes(meminfo, (tmp_path / "none",)) == 16 * GIB


@pytest.mark.parametrize("version", [1, 2])
def test_a_control_group_cuts_it_down(meminfo: Path, tmp_path: Path, version: int) -> None:
    folder = cgroup(tmp_path / "group", str(8 * GIB), 5 * GIB, 1 * GIB, version=version)
    assert free_host_bytes(meminfo, (folder,)) == 4 * GIB  # the page cache can be dropped again


@pytest.mark.parametrize(("version", "unlimited"), [(2, "max"), (1, str((1 << 63) - 4096))])
def test_an_unlimited_group_changes_nothing(meminfo: Path, tmp_path: Path, version: int, unlimited: str) -> None:
    folder = cgroup(tmp_path / "group", unlimited, 5 * GIB, 0, version=version)
    assert free_host_bytes(meminfo, (folder,)) == 16 * GIB


def test_a_full_group_has_nothing_left(meminfo: Path, tmp_path: Path) -> None:
    folder = cgroup(tmp_path / "group", str(GIB), 2 * GIB, 0, version=2)
    assert free_host_bytes(meminfo, (folder,)) == 0


def test_the_own_group_and_all_above_it_count(meminfo: Path, tmp_path: Path) -> None:
    root = cgroup(tmp_path / "root", "max", 0, 0, version=2)
    slice_ = cgroup(root / "user.slice", str(6 * GIB), 1 * GIB, 0, version=2)
    cgroup(slice_ / "job.scope", str(8 * GIB), 1 * GIB, 0, version=2)
    v1 = cgroup(tmp_path / "v1", str((1 << 63) - 4096), 0, 0, version=1)
    cgroup(v1 / "docker", str(3 * GIB), 1 * GIB, 0, version=1)
    membership = tmp_path / "cgroup"

    def free(text: str) -> int:
        membership.write_text(text)
        return free_host_bytes(meminfo, own_cgroups(membership, root, v1))

    assert free("0::/user.slice/job.scope\n") == 5 * GIB
    assert free("0::/\n") == 16 * GIB
    assert free("0::/user.slice/gone.scope\n") == 5 * GIB
    assert free("0::/../user.slice\n") == 16 * GIB
    assert free("4:cpu,memory:/docker\n9:name=systemd:/user.slice\n0::/\n") == 2 * GIB
    membership.unlink()
    assert own_cgroups(membership, root, v1) == (root, v1)


def test_without_proc_the_system_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < free_host_bytes(tmp_path / "none", ()) < 1 << 50
    monkeypatch.setattr(os, "sysconf_names", {"SC_PHYS_PAGES": 1, "SC_PAGE_SIZE": 2})
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 1 << 20, "SC_PAGE_SIZE": 4096}.get)
    assert free_host_bytes(tmp_path / "none", ()) == 2 * GIB
