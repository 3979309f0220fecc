"""What is refused before a cluster is asked for anything."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import pytest

from twostroke.config.engine import EngineConfig
from twostroke.config.pools import PoolConfig
from twostroke.engine.launcher import LocalLauncher, launcher_for
from twostroke.engine.ray_launcher import check_version
from twostroke.errors import InvalidParameter, SetupError


@pytest.mark.parametrize("version", ["2.50.0", "2.60.0", "2.99.1"])
def test_these_versions_of_ray_will_do(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["2.49.2", "1.13.0", "3.0.0", "nonsense"])
def test_other_versions_are_refused_by_name(version: str) -> None:
    with pytest.raises(SetupError, match=rf"from 2\.50 on, before 3\.0; {version} is installed.*pip install"):
        check_version(version)


def test_ray_that_is_not_installed_is_said_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(SetupError, match=r"not installed. Run: pip install 'twostroke\[ray\]'"):
        launcher_for(EngineConfig(), PoolConfig(decode=1, cluster="auto"))


def test_without_a_cluster_processes_are_this_machines() -> None:
    assert isinstance(launcher_for(EngineConfig(), PoolConfig(decode=1)), LocalLauncher)


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"cluster": "auto"}, "cluster='auto': needs more than one process"),
        ({"decode": 1, "cluster": ""}, "cluster='': must be a text"),
        ({"decode": 1, "cluster": "ray://head:10001"}, "must be 'auto' or HOST:PORT.*no node"),
        ({"decode": 1, "cluster": "head"}, "must be 'auto' or HOST:PORT"),
        ({"decode": 1, "cluster": "auto", "kv_transport": "shm"}, "kv_transport='shm': .* no memory"),
        ({"decode": 1, "cluster_roles": True}, "cluster_roles=True: needs a cluster"),
        ({"decode": 1, "cluster": "auto", "cluster_roles": "yes"}, "cluster_roles='yes'"),
    ],
)
def test_clusters_that_cannot_be_are_refused(given: dict[str, Any], what: str) -> None:
    with pytest.raises(InvalidParameter, match=what):
        PoolConfig(**given)


def test_kv_goes_through_memory_on_one_machine_and_by_tcp_in_a_cluster() -> None:
    assert PoolConfig(decode=1).transport == "shm"
    assert PoolConfig(decode=1, kv_transport="tcp").transport == "tcp"
    assert PoolConfig(decode=1, cluster="auto").transport == "tcp"
