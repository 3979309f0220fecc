"""A server with a hostile chat template, and one whose engine stands still: others are served, and nothing is left."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.serving.local_server import LocalServer
from server_process import PATIENCE_S, ServerProcess

TEMPLATE = """
{%- if messages[0].content == "a power" %}{{ ((((9**64)**64)**64)**64) % 7 }}{% endif -%}
{%- if messages[0].content == "a width" %}{{ '%2000000000d' % 1 }}{% endif -%}
{%- if messages[0].content == "a text" -%}
    {%- set n = namespace(a='ab') %}{% for i in range(60) %}{% set n.a = n.a ~ n.a %}{% endfor -%}
{%- endif -%}
{%- set __twostroke_step__ = 1 -%}
{%- for message in messages %}{{ message.content }}{% endfor -%}
"""
LONG: dict[str, Any] = {"model": "embedded", "prompt": "def", "max_tokens": 3500, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Server with a harmful template, and an engine that must not stop for long."""
    path = tmp_path_factory.mktemp("template") / "template.jinja"
    path.write_text(TEMPLATE)
    server = ServerProcess("--chat-template", str(path), "--step-timeout-s", "2")
    yield server
    server.process.kill()
    server.stop()


def chat(server: ServerProcess, content: str) -> httpx.Response:
    messages = [{"role": "user", "content": content}]
    return server.post("/v1/chat/completions", {"model": "embedded", "messages": messages, "max_tokens": 1})


@pytest.mark.parametrize(
    ("content", "told"),
    [("a power", "s of processor time"), ("a width", "MiB of memory"), ("a text", "MiB of memory")],
)
def test_a_hostile_template_is_the_error_of_its_own_request(server: ServerProcess, content: str, told: str) -> None:
    answer = chat(server, content)
    assert answer.status_code == 400, answer.text
    assert told in answer.json()["error"]["message"]
    assert chat(server, "x = ").status_code == 200
    messages = [{"role": "user", "content": content}]
    for path in ("/tokenize", "/v1/messages/count_tokens"):
        assert server.post(path, {"model": "embedded", "messages": messages}).status_code == 400


def test_others_are_served_while_it_runs(server: ServerProcess) -> None:
    """Three quarters of a second of processor time each: whoever does not wait for a template is done before."""
    ended: list[str] = []
    with ThreadPoolExecutor(4) as threads:
        evil = [threads.submit(lambda: (chat(server, "a power"), ended.append("evil"))) for _ in range(3)]
        server.http.get("/health")
        body = {"model": "embedded", "prompt": "a", "max_tokens": 1}
        assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S).status_code == 200
        ended.append("others")
        for chatting in evil:
            chatting.result()
    assert ended.index("others") <= 1


def test_an_engine_that_stands_still_is_told_and_replaced(server: ServerProcess) -> None:
    engine = LocalServer(server.url, server.process.pid).engine_pid()
    with server.http.stream("POST", "/v1/completions", json=LONG) as answer:
        lines = answer.iter_lines()
        next(lines)
        os.kill(engine, signal.SIGSTOP)
        told = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert "it said nothing for 2 s" in told[-1]["error"]["message"]
    server.wait_for("ready", "/ready", lambda ready: ready.status_code == 200)
    assert chat(server, "x = ").status_code == 200
    assert not Path(f"/proc/{engine}").exists()


def test_nothing_is_left_of_a_server_that_is_killed_while_its_engine_stands_still(server: ServerProcess) -> None:
    server.wait_for("ready", "/ready", lambda ready: ready.status_code == 200)
    assert chat(server, "x = ").status_code == 200
    lists = Path(f"/proc/{server.process.pid}/task").glob("*/children")
    family = [int(child) for children in lists for child in children.read_text().split()]
    assert len(family) == 2, "the engine, and the process of chat templates"
    for pid in family:
        os.kill(pid, signal.SIGSTOP)
    server.process.kill()
    deadline_s = time.monotonic() + PATIENCE_S
    while any(is_there(pid) for pid in family):
        assert time.monotonic() < deadline_s, "a process is left"
        time.sleep(0.02)


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
