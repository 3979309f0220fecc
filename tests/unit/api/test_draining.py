"""The end of a real server: by a signal, by two, by time, and by force."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from server_process import ServerProcess


def long_stream(server: ServerProcess, client: httpx.Client, max_tokens: int) -> Any:
    body = {"prompt": "def f(", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    return client.stream("POST", f"{server.url}/v1/completions", json=body)


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline, "it never became so"
        time.sleep(0.02)


def events(lines: Iterator[str]) -> list[str]:
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_what_runs_ends_and_what_comes_is_refused(sent: signal.Signals) -> None:
    server = ServerProcess("--drain-timeout-s", "600")
    with httpx.Client(timeout=60) as client, long_stream(server, client, 800) as response:
        lines = response.iter_lines()
        first = next(lines)
        server.process.send_signal(sent)
        until(lambda: server.http.get("/ready").status_code == 503)
        assert server.http.get("/health").json()["status"] == "draining"
        refused = server.post("/v1/completions", {"prompt": "x", "max_tokens": 1})
        assert refused.status_code == 503
        assert "shutting down" in refused.json()["error"]["message"]
        assert "retry-after" in refused.headers
        told = [first.removeprefix("data: "), *events(lines)]
    assert told[-1] == "[DONE]"
    assert 'finish_reason":"length"' in told[-2], told[-2]
    assert server.process.wait(30) == 0
    server.stop()


@pytest.mark.parametrize(
    "flags", [("--drain-timeout-s", "0.5"), ("--drain-timeout-s", "600")], ids=["the time is up", "a second signal"]
)
def test_what_does_not_end_in_time_is_told_why(flags: tuple[str, ...]) -> None:
    server = ServerProcess(*flags)
    with httpx.Client(timeout=60) as client, long_stream(server, client, 4000) as response:
        lines = response.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        if "600" in flags:
            until(lambda: server.http.get("/ready").status_code == 503)
            server.process.send_signal(signal.SIGTERM)
        told = events(lines)
    assert told[-1] == "[DONE]"
    assert "the server was shut down" in json.loads(told[-2])["error"]["message"]
    assert server.process.wait(30) == 0
    server.stop()


def test_an_idle_server_ends_at_once() -> None:
    assert ServerProcess("--drain-timeout-s", "1000").stop() == 0


def test_the_engine_does_not_outlive_a_server_that_was_killed() -> None:
    server = ServerProcess()
    pid = server.process.pid
    engines = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    assert engines
    with httpx.Client(timeout=60) as client, long_stream(server, client, 4000) as response:
        lines = response.iter_lines()
        next(lines)
        os.kill(pid, signal.SIGKILL)
        until(lambda: not any(is_alive(engine) for engine in engines))
    server.stop()


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # a zombie has ended
