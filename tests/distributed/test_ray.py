"""Pools in a Ray cluster: the tokens of one process, whatever dies; with root, across two nodes that share no network.

One cluster for all, so all is in this file; what ends a node of it comes last.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.drill import Drill, prompts, run
from benchmarks.handover.link import why_no_link
from ray_cluster import CLOCK_AHEAD_S, CPUS, Cluster, cluster
from server_process import ServerProcess
from twostroke.config.engine import EngineConfig
from twostroke.config.pools import PoolConfig

CONFIG = EngineConfig.from_keywords(model="embedded", threads=1, num_kv_blocks=2000)
GATEWAY = Path(__file__).parents[1] / "ray_gateway.py"


@pytest.fixture(scope="session")
def ray_cluster(pytestconfig: pytest.Config) -> Generator[Cluster]:
    """Cluster of two nodes if namespaces can be made, else of one."""
    if importlib.util.find_spec("ray") is None:
        (pytest.fail if pytestconfig.getoption("require_all") else pytest.skip)("not installed: ray (pip)")
    with cluster(has_namespaces=not why_no_link()) as running:
        yield running


@pytest.fixture
def two_nodes(ray_cluster: Cluster, pytestconfig: pytest.Config) -> Cluster:
    """Skip without root or ip and tc; fail if --require-all is given."""
    if not ray_cluster.hosts:
        (pytest.fail if pytestconfig.getoption("require_all") else pytest.skip)(why_no_link())
    return ray_cluster


@pytest.fixture(scope="module")
def undisturbed() -> Drill:
    """Answers of one process that does everything."""
    return asyncio.run(run(CONFIG, PoolConfig(decode=1), prompts(12)))


def streams(
    cluster: Cluster, *strikes: str, engine_config: dict[str, Any] | None = None, **pools: Any
) -> dict[str, Any]:
    """Results of the streams; see ray_gateway."""
    told = {"cluster": cluster.address, "pools": pools, "strikes": strikes, "engine_config": engine_config or {}}
    ended = cluster.run(sys.executable, str(GATEWAY), json.dumps(told))
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


def check_streams(found: dict[str, Any], undisturbed: Drill) -> None:
    """Check every stream of every round: all tokens, and every bit of their log-probabilities."""
    for token_ids, logprobs in found["rounds"]:
        assert token_ids == list(undisturbed.token_ids.values())
        assert logprobs == list(undisturbed.logprobs.values())


def test_workers_that_die_cost_a_pause_and_nothing_else(ray_cluster: Cluster, undisturbed: Drill) -> None:
    """The process, its actor, and one that only stops; undisturbed, it is the same anyway."""
    found = streams(ray_cluster, "kill", "actor", "freeze", prefill=1, decode=2, heartbeat_timeout_s=1.0)
    check_streams(found, undisturbed)
    assert found["num_handed_over"] > 0
    assert found["num_resumed"] >= 3
    assert len(found["causes"]) == 3
    assert "signal 9" in found["causes"][0]
    assert "said nothing for 1 s" in found["causes"][2]


def test_each_pool_is_scaled_alone(ray_cluster: Cluster, undisturbed: Drill) -> None:
    """While streams run, which notice nothing."""
    found = streams(ray_cluster, "scale:decode:2", "scale:prefill:2", "scale:decode:1", prefill=1, decode=1)
    check_streams(found, undisturbed)
    sizes = [[sum(w.startswith(role) for w in nodes) for role in ("prefill", "decode")] for nodes in found["nodes"]]
    assert sizes == [[1, 1], [1, 2], [2, 2], [2, 1]]
    assert found["causes"] == []


def test_kv_goes_from_node_to_node(two_nodes: Cluster, undisturbed: Drill) -> None:
    """Custom resources put the pools on a node each; what the other tells of times is told by this one's clock."""
    found = streams(two_nodes, prefill=1, decode=1, cluster_roles=True)
    check_streams(found, undisturbed)
    assert {worker.partition("-")[0]: is_here for worker, is_here in found["nodes"][0].items()} == {
        "decode": True,
        "prefill": False,
    }
    assert found["num_handed_over"] > 0
    assert found["clock_gap_s"] < CLOCK_AHEAD_S / 2


def test_ranks_on_two_nodes_compute_what_one_process_does(two_nodes: Cluster, undisturbed: Drill) -> None:
    """No node has CPUs for both; one is killed in the middle of its streams, and the pair comes back."""
    ranks = {"threads": CPUS // 2 + 1, "tensor_parallel_size": 2}
    found = streams(two_nodes, "rank", "kill", engine_config=ranks, decode=1)
    check_streams(found, undisturbed)
    assert found["num_resumed"] > 0
    assert len(found["causes"]) == 2


REFUSE = """
import contextlib, io, json, sys
from twostroke.cli.main import main
ended = []
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["twostroke", "serve", "embedded", "--port", "0", *arguments]
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code
    ended.append([code, said.getvalue()])
print(json.dumps(ended))
"""
"""Servers that do not start, one after the other in a process whose imports take longer than they do."""


TOO_MUCH = [
    (
        ("--decode", "60", "--threads", "2"),
        "--decode 60 asks for 60 x 2 CPUs; the cluster at {address} has room for",
    ),
    (("--prefill", "5", "--decode", "6"), "--prefill 5 and --decode 6 asks for 11 x 1 CPU"),
    (
        ("--decode", "2", "--threads", "3", "--tensor-parallel-size", "2"),
        "--decode 2 asks for 2 x 3 CPUs on each of 2 nodes; the cluster at {address} has room for",
    ),
    (
        ("--decode", "1", "--prefill", "1", "--threads", "3", "--tensor-parallel-size", "2"),
        "--prefill 1 with ranks on several nodes",
    ),
    (("--decode", "10", "--cluster-roles"), "--decode 10 asks for 10 x 1 CPU and one 'decode'"),
]


@pytest.fixture(scope="module")
def refused(ray_cluster: Cluster) -> list[tuple[int, str]]:
    """Return how each process that requires too much ended, and its message."""
    asked = [[*arguments, "--cluster", ray_cluster.address] for arguments, _ in TOO_MUCH]
    ended = ray_cluster.run(sys.executable, "-c", REFUSE, json.dumps(asked))
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", range(len(TOO_MUCH)), ids=[" ".join(arguments) for arguments, _ in TOO_MUCH])
def test_more_than_the_cluster_has_is_refused(ray_cluster: Cluster, refused: list[tuple[int, str]], case: int) -> None:
    code, said = refused[case]
    assert code != 0
    assert TOO_MUCH[case][1].format(address=ray_cluster.address) in " ".join(said.split())
    assert f"{CPUS} CPU" in said


def test_the_server_answers_from_the_cluster_that_ray_address_names(ray_cluster: Cluster) -> None:
    """All of it: flags, processes elsewhere, HTTP."""
    env = [f"{name}={value}" for name, value in ray_cluster.env.items()]
    start = (*ray_cluster.prefix, "env", *env, f"RAY_ADDRESS={ray_cluster.address}", sys.executable)
    command = (*start, "-m", "twostroke", "serve")
    server = ServerProcess("--prefill", "1", "--decode", "1", "--cluster", "auto", command=command)
    try:
        ask = (
            "import sys, urllib.request as r; "
            "q = r.Request(sys.argv[1], sys.argv[2].encode(), {'Content-Type': 'application/json'}); "
            "print(r.urlopen(q).read().decode())"
        )
        body = {"model": "embedded", "prompt": "def f(x):\n" * 20, "max_tokens": 8}
        answer = ray_cluster.run(sys.executable, "-c", ask, f"{server.url}/v1/completions", json.dumps(body))
        assert json.loads(answer.stdout)["usage"]["completion_tokens"] == 8
    finally:
        server.stop()


def test_where_no_cluster_is_is_said_at_once(ray_cluster: Cluster) -> None:
    nowhere = ray_cluster.address.rpartition(":")[0] + ":9"
    serve = (sys.executable, "-m", "twostroke", "serve", "embedded", "--port", "0", "--decode", "1")
    ended = ray_cluster.run(*serve, "--cluster", nowhere)
    assert ended.returncode != 0
    assert f"--cluster {nowhere}: no cluster answers there" in " ".join(ended.stderr.split())


def test_a_node_that_dies_costs_a_pause_and_nothing_else(two_nodes: Cluster, undisturbed: Drill) -> None:
    """The raylet, actors and processes of a node die together; its work moves to the other node. Runs last."""
    found = streams(two_nodes, f"node:{two_nodes.hosts[1].namespace}", prefill=1, decode=3)
    check_streams(found, undisturbed)
    before, after = found["nodes"]
    assert False in before.values()
    assert len(after) == 4
    assert all(after.values())
    assert found["num_resumed"] > 0
