"""Pools of a real server: shown, changed by an administrator, and changed by load."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from metrics_page import check_documented
from server_process import PATIENCE_S, ServerProcess


@pytest.fixture(scope="module")
def pooled() -> Iterator[ServerProcess]:
    """Pools with few blocks, so that a few streams are a load."""
    server = ServerProcess("--decode", "1", "--max-decode", "2", "--scaling-interval-s", "0.2", num_kv_blocks=80)
    yield server
    server.stop()


def workers(server: ServerProcess) -> list[dict[str, Any]]:
    return server.http.get("/pools").json()["workers"]


def wait_for(server: ServerProcess, is_so: Callable[[list[dict[str, Any]]], bool]) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not is_so(workers(server)):
        assert time.monotonic() < until_s, workers(server)
        time.sleep(0.05)


def test_a_pool_grows_under_load_and_shrinks_behind_it(pooled: ServerProcess) -> None:
    (first,) = workers(pooled)
    assert pooled.http.get("/pools").json()["hand_over"] is None, "there is one pool"
    assert (first["role"], first["state"], first["cause"], first["num_restarts"]) == ("decode", "running", "", 0)
    is_over = threading.Event()
    failures: list[int] = []

    def ask_again_and_again(number: int) -> None:
        body = {"model": "embedded", "prompt": f"# {number}\n" * 30, "max_tokens": 100, "ignore_eos": True}
        while not is_over.is_set():
            status = pooled.post("/v1/completions", body).status_code
            failures.extend([status] if status != 200 else [])

    clients = [threading.Thread(target=ask_again_and_again, args=(number,)) for number in range(8)]
    for client in clients:
        client.start()
    try:
        wait_for(pooled, lambda found: sum(worker["state"] == "running" for worker in found) == 2)
    finally:
        is_over.set()
        for client in clients:
            client.join()
    wait_for(pooled, lambda found: len(found) == 1)
    assert failures == []


def test_its_metrics_are_on_the_page(pooled: ServerProcess) -> None:
    exposed = check_documented(pooled.http.get("/metrics").text)
    assert "twostroke:sequences_resumed_total" in exposed


def test_an_administrator_gives_a_pool_another_size(pooled: ServerProcess) -> None:
    pooled.post("/pools", {"prefill": 1})
    wait_for(pooled, lambda found: {w["role"] for w in found if w["state"] == "running"} == {"prefill", "decode"})
    text = "def f(x):\n    return x\n" * 20
    answer = pooled.post("/v1/completions", {"model": "embedded", "prompt": text, "max_tokens": 8}).json()
    assert answer["usage"]["completion_tokens"] > 0
    pooled.post("/pools", {"prefill": 0})
    wait_for(pooled, lambda found: {w["role"] for w in found} == {"decode"})


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"decode": 0}, "decode=0: must be a whole number, 1 to 64"),
        ({"prefill": 65}, "prefill=65"),
        ({"prefil": 1}, "there is no pool 'prefil'"),
        ({"decode": "2"}, "decode"),
    ],
)
def test_sizes_that_cannot_be_change_nothing(pooled: ServerProcess, body: dict[str, Any], said: str) -> None:
    before = {worker["worker_id"] for worker in workers(pooled)}
    answer = pooled.post("/pools", body)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]
    assert {worker["worker_id"] for worker in workers(pooled)} == before


def test_one_process_has_no_pools(server: ServerProcess) -> None:
    for answer in (server.http.get("/pools"), server.post("/pools", {"decode": 2})):
        assert answer.status_code == 404
        assert "--prefill and --decode" in answer.json()["error"]["message"]


@pytest.fixture(scope="module")
def differing() -> Iterator[ServerProcess]:
    """Two pools with different KV formats, with keys."""
    keys = ("--api-key", "tenant", "--admin-api-key", "admin")
    pools = (
        "--prefill",
        "1",
        "--decode",
        "1",
        "--pool-workers",
        "thread",
        "--allow-numeric-drift",
        "--tpot-target-s",
        "0.001",
    )
    server = ServerProcess(*keys, *pools, "--prefill-config", '{"kv_cache_dtype": "int8", "block_size": 32}')
    yield server
    server.stop()


def test_pools_are_for_administrators(differing: ServerProcess) -> None:
    for key, status in (("tenant", 401), ("admin", 200)):
        found = differing.http.get("/pools", headers={"authorization": f"Bearer {key}"})
        assert found.status_code == status, found.text


def test_the_formats_of_both_pools_are_shown(differing: ServerProcess) -> None:
    shown = differing.http.get("/pools", headers={"authorization": "Bearer admin"}).json()
    formats = {worker["role"]: worker["formats"] for worker in shown["workers"]}
    assert {role: (f["kv_cache_dtype"], f["block_size"]) for role, f in formats.items()} == {
        "prefill": ("int8", 32),
        "decode": ("bf16", 16),
    }
    assert formats["prefill"]["dtype"] == formats["decode"]["dtype"] == "bfloat16"
    differs = shown["hand_over"].pop("differs")
    assert shown["hand_over"] == {"converts_kv": True, "may_drift": True}
    assert differs.keys() == {"kv_cache_dtype", "block_size", "kv_order"}
    assert differs["kv_cache_dtype"] == {"prefill": ["int8"], "decode": ["bf16"]}


LONG = "def f(x):\n    return x\n" * 60
USAGES: dict[str, Callable[[str], dict[str, Any]]] = {
    "/v1/completions": lambda text: {"prompt": text, "max_tokens": 4},
    "/v1/chat/completions": lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 4},
    "/v1/messages": lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 4},
    "/v1/responses": lambda text: {"input": text, "max_output_tokens": 4, "store": False},
}


@pytest.mark.parametrize("path", USAGES)
def test_usage_says_that_workers_of_different_formats_made_an_answer(path: str, differing: ServerProcess) -> None:
    """A prompt of 600 tokens is handed over beside a stream once measured times say that it pays.

    On a busy machine a slow hand-over is remembered for a while.
    """
    tenant = {"authorization": "Bearer tenant"}
    beside = {"model": "embedded", "prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    usage: dict[str, Any] = {}
    end_s, tries = time.monotonic() + PATIENCE_S, itertools.count()
    while "numeric_drift" not in usage and time.monotonic() < end_s:
        with differing.http.stream("POST", "/v1/completions", json=beside, headers=tenant) as stream:
            next(stream.iter_lines())
            body = {"model": "embedded", **USAGES[path](f"# {path} {next(tries)}\n{LONG}")}
            usage = differing.http.post(path, json=body, headers=tenant).json()["usage"]
    assert usage["numeric_drift"] == {"kv_cache_dtype": ["int8", "bf16"]}
