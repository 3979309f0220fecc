"""Streams whose engine dies in the middle of them: each kind of client is told in its own way, and nothing is left."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

import anthropic
import openai
import pytest

from benchmarks.serving.local_server import LocalServer
from server_process import ServerProcess

LONG = 3500
"""More tokens than any test waits for."""
USER: list[Any] = [{"role": "user", "content": "sort a list of numbers"}]
MESSAGE: dict[str, Any] = {"model": "embedded", "messages": USER, "max_tokens": LONG, "stream": True}
RESPONSE: dict[str, Any] = {"model": "embedded", "input": USER, "max_output_tokens": LONG, "stream": True}
GREEDY = {"temperature": 0}
"""An answer that goes on for longer than the engine."""
TOLD = "signal 9"
PATIENCE_S = 20.0


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """Server whose engine may be killed."""
    server = ServerProcess()
    yield server
    server.stop()


def kill_engine(server: ServerProcess) -> None:
    os.kill(LocalServer(server.url, server.process.pid).engine_pid(), signal.SIGKILL)


def test_every_stream_says_why_it_ends(server: ServerProcess) -> None:
    with ExitStack() as held:
        raw = {
            path: opened(held, server, path, body | GREEDY)
            for path, body in {
                "/v1/messages": MESSAGE,
                "/v1/responses": RESPONSE,
                "/v1/chat/completions": MESSAGE | {"ignore_eos": True},
            }.items()
        }
        people = held.enter_context(anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0))
        others = held.enter_context(openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0))
        message = people.messages.create(**MESSAGE, extra_body=GREEDY)
        response = others.responses.create(**RESPONSE, extra_body=GREEDY)
        for stream in (*raw.values(), message, response):
            assert len(list(itertools.islice(stream, 4))) == 4
        kill_engine(server)
        rest = {path: list(events) for path, events in raw.items()}
        with pytest.raises(anthropic.APIStatusError, match=TOLD):
            list(message)
        *_, last_but_one, last = response

    *deltas, error = rest["/v1/messages"]
    assert {event["type"] for event in deltas} <= {"content_block_start", "content_block_delta"}
    assert (error["type"], error["error"]["type"]) == ("error", "api_error")
    assert TOLD in error["error"]["message"]

    *deltas, failed, error = rest["/v1/responses"]
    assert not any(event["type"].endswith(("completed", "incomplete", "done")) for event in deltas)
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"]["code"] == "server_error"
    assert TOLD in failed["response"]["error"]["message"]
    assert (error["type"], error["code"]) == ("error", "engine_error")
    numbers = [event["sequence_number"] for event in rest["/v1/responses"]]
    assert numbers == list(range(4, 4 + len(numbers)))

    assert (last_but_one.type, last.type) == ("response.failed", "error")
    assert TOLD in last_but_one.response.error.message

    assert TOLD in rest["/v1/chat/completions"][-1]["error"]["message"]
    server.wait_for("ready", "/ready", lambda answer: answer.status_code == 200)
    server.wait_until_idle()
    assert server.post("/v1/messages", MESSAGE | {"max_tokens": 1, "stream": False}).status_code == 200


def opened(held: ExitStack, server: ServerProcess, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Return the events of a stream, whatever their names."""
    response = held.enter_context(server.http.stream("POST", path, json=body))
    assert response.status_code == 200, response.read()
    return events_of(response.iter_lines())


def events_of(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    name = None
    for line in lines:
        kind, _, value = line.partition(": ")
        if kind == "event":
            name = value
        elif kind == "data" and value != "[DONE]":
            event = json.loads(value)
            assert name is None or name == event["type"]
            yield event


@pytest.mark.parametrize("streams", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("resets", [True, False], ids=["reset", "closed"])
def test_a_client_that_leaves_with_requests_behind_the_one_that_runs(
    server: ServerProcess, streams: bool, resets: bool
) -> None:
    """Queued requests on the connection must not hide the disconnect, and other clients are unaffected."""
    asked: dict[str, Any] = {"model": "embedded", "prompt": "def f(", "max_tokens": LONG, "ignore_eos": True} | GREEDY
    ended = aborted(server)
    with connected(server) as connection:
        connection.sendall(http_request("/v1/completions", asked | {"stream": streams}) * 3)
        until(lambda: running(server) == 1)
        if resets:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    until(lambda: running(server) == 0)
    until(lambda: aborted(server) == ended + 1)
    assert server.post("/v1/completions", asked | {"max_tokens": 3}).json()["usage"]["completion_tokens"] == 3


def test_nonsense_behind_a_request_is_no_part_of_its_answer(server: ServerProcess) -> None:
    asked: dict[str, Any] = {"model": "embedded", "prompt": "def f(", "max_tokens": 60, "stream": True}
    with connected(server) as connection:
        connection.sendall(http_request("/v1/completions", asked | {"ignore_eos": True} | GREEDY))
        received = connection.recv(1 << 16)
        connection.sendall(b"\x00 this is no request\r\n\r\n")
        while part := connection.recv(1 << 16):
            received += part
    answer, _, refusal = received.partition(b"\r\n0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert answer.endswith(b"data: [DONE]\n\n")
    assert refusal.startswith(b"HTTP/1.1 400 ")


def http_request(path: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content


def connected(server: ServerProcess) -> socket.socket:
    address = urlsplit(server.url)
    return socket.create_connection((address.hostname, address.port), PATIENCE_S)


def metric(server: ServerProcess, start: str) -> float:
    lines = server.http.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(start))


def running(server: ServerProcess) -> float:
    return metric(server, "twostroke:num_requests_running{")


def aborted(server: ServerProcess) -> float:
    return metric(server, 'twostroke:request_success_total{engine="0",finished_reason="abort"')


def until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline_s, "it does not come to pass"
        time.sleep(0.02)
