"""Settings that are refused before a cluster is contacted."""

from __future__ import annotations

import asyncio
import importlib.metadata
from collections.abc import Mapping
from typing import Any

import pytest

from twostroke.cluster.launcher import LocalLauncher, launcher_for
from twostroke.cluster.ray_launcher import RayLauncher
from twostroke.cluster.ray_resources import check_version
from twostroke.config.engine import EngineConfig
from twostroke.config.pools import PoolConfig
from twostroke.engine.handover_messages import HandoverSettings
from twostroke.errors import InvalidParameter, SetupError
from twostroke.pools.member import Role


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
        ({"decode": 1, "cluster": ""}, "cluster='': must be a string"),
        ({"decode": 1, "cluster": "ray://head:10001"}, "must be 'auto' or HOST:PORT.*no node"),
        ({"decode": 1, "cluster": "head"}, "must be 'auto' or HOST:PORT"),
        ({"decode": 1, "cluster": "auto", "kv_transport": "shm"}, "kv_transport='shm': .* no memory"),
        ({"decode": 1, "cluster_roles": True}, "cluster_roles=true: needs a cluster"),
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


def launcher(monkeypatch: pytest.MonkeyPatch, nodes: list[Mapping[str, float]], **given: Any) -> RayLauncher:
    """Return a launcher with these nodes, in Ray's form; Ray need not be installed."""
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "2.60.0")
    of_engine = {name: given.pop(name) for name in ("threads", "tensor_parallel_size") if name in given}
    pools = PoolConfig(decode=1, cluster="head:6379", **given)
    made = RayLauncher(EngineConfig.from_keywords(**of_engine), pools, nodes=lambda: nodes)
    made._most_cpus = max(node.get("CPU", 0.0) for node in nodes)  # as `open` computes it
    return made


SMALL, LARGE = {"CPU": 2.0, "decode": 1.0}, {"CPU": 8.0, "prefill": 9.0}
P, D = Role.PREFILL, Role.DECODE


@pytest.mark.parametrize(
    ("given", "sizes", "what"),
    [
        (
            {},
            {P: 0, D: 11},
            "decode=11: asks for 11 x 1 CPU; the cluster at head:6379 has room for 10 of them",
        ),
        ({"threads": 4}, {P: 0, D: 3}, "decode=3: asks for 3 x 4 CPUs; .* room for 2 of them"),
        ({"threads": 16}, {P: 0, D: 2}, "room for 0 of them, were it empty .2 nodes: 2 CPU; 8 CPU.. Ask for fewer"),
        ({"prefill": 1}, {P: 6, D: 5}, "prefill and decode=11: asks for 11 x 1 CPU"),
        ({"cluster_roles": True, "prefill": 1}, {P: 1, D: 2}, "decode=2: asks for 2 x 1 CPU and one 'decode'"),
        ({"threads": 5, "tensor_parallel_size": 2}, {P: 0, D: 1}, "1 x 5 CPUs on each of 2 nodes; .* room for 0"),
    ],
)
def test_a_size_that_no_nodes_hold_is_refused_with_what_they_have(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], sizes: dict[Role, int], what: str
) -> None:
    with pytest.raises(InvalidParameter, match=what):
        asyncio.run(launcher(monkeypatch, [SMALL, LARGE], **given).check_room(sizes))


def test_a_size_that_the_nodes_hold_is_not_refused_and_a_new_node_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes: list[Mapping[str, float]] = [SMALL, LARGE]
    made = launcher(monkeypatch, nodes)
    asyncio.run(made.check_room({P: 0, D: 10}))
    asyncio.run(made.check_room({P: 4, D: 6}))
    with pytest.raises(InvalidParameter):
        asyncio.run(made.check_room({P: 4, D: 7}))
    nodes.append(SMALL)
    asyncio.run(made.check_room({P: 4, D: 7}))


def test_a_process_that_no_node_holds_is_refused_at_once_and_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node has died, or the load needs more: no request waits a minute for a node that does not exist."""
    made = launcher(monkeypatch, [SMALL], threads=4)
    told = r"decode-1.1 asks for 4 CPUs, and no node holds it: .* has room for 0 .*\(1 nodes: 2 CPU\)"
    with pytest.raises(SetupError, match=told):
        asyncio.run(made.launch("decode-1.1", D, EngineConfig(), HandoverSettings()))
