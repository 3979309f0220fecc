"""Compressed request bodies at a real server: the answer is that to the same body as it is; bombs go no further."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from backports import zstd

from raw_http import connect, length, receive
from server_process import ServerProcess

USER = [{"role": "user", "content": "def add(a, b):"}]
BODIES: Mapping[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "def add(a, b):", "max_tokens": 4, "temperature": 0},
    "/v1/chat/completions": {"messages": USER, "max_tokens": 4, "temperature": 0},
    "/v1/messages": {"messages": USER, "max_tokens": 4, "temperature": 0},
    "/v1/messages/count_tokens": {"messages": USER},
    "/v1/responses": {"input": "def add(a, b):", "max_output_tokens": 4, "temperature": 0},
    "/v1/embeddings": {"input": "def add(a, b):"},
    "/tokenize": {"prompt": "def add(a, b):"},
}
ENCODERS: Mapping[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "X-GZIP": gzip.compress,
    "deflate": zlib.compress,
    "zstd": zstd.compress,
    "gzip, zstd": lambda body: zstd.compress(gzip.compress(body)),
    "identity, gzip": gzip.compress,
}
SEEN = ("choices", "content", "input_tokens", "data", "tokens", "usage")
"""Fields of answers that are the same each time."""


def sent(server: ServerProcess, path: str, content: bytes, coding: str) -> Any:
    headers = {"content-type": "application/json", "content-encoding": coding}
    return server.http.post(path, content=content, headers=headers)


@pytest.mark.parametrize("coding", ENCODERS)
@pytest.mark.parametrize("path", BODIES)
def test_the_answer_is_that_to_the_body_as_it_is(server: ServerProcess, path: str, coding: str) -> None:
    server.post(path, BODIES[path])  # so that the prompt is in the cache, and counted there, both times
    expected = server.post(path, BODIES[path]).json()
    found = sent(server, path, ENCODERS[coding](json.dumps(BODIES[path]).encode()), coding)
    assert found.status_code == 200, found.text
    assert {name: found.json().get(name) for name in SEEN} == {name: expected.get(name) for name in SEEN}


def test_a_stream_too(server: ServerProcess) -> None:
    body = gzip.compress(json.dumps(BODIES["/v1/completions"] | {"stream": True}).encode())
    assert sent(server, "/v1/completions", body, "gzip").text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize("coding", ["gzip", "deflate", "zstd"])
def test_what_is_not_in_its_coding_is_refused(server: ServerProcess, path: str, coding: str) -> None:
    whole = ENCODERS[coding](json.dumps(BODIES[path]).encode())
    for content in (json.dumps(BODIES[path]).encode(), whole[:-1], whole[: len(whole) // 2], whole + b"more"):
        answer = sent(server, path, content, coding)
        assert answer.status_code == 400, answer.text
        assert coding in answer.json()["error"]["message"]
    assert ("type" in answer.json()) == (path == "/v1/messages"), "each API has its own shape of errors"


@pytest.mark.parametrize("coding", ["gzip", "deflate", "zstd", "gzip, zstd"])
def test_a_bomb_is_refused_before_all_of_it_has_come(server: ServerProcess, coding: str) -> None:
    """The client says that a megabyte more comes, and sends none of it."""
    bomb = ENCODERS[coding](b'{"prompt":"' + b"x" * 16_000_000)
    assert len(bomb) < 100_000
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with connect(server) as connection:
        sent = head + f"content-encoding: {coding}\r\n".encode() + length(bomb + bytes(1_000_000)) + b"\r\n" + bomb
        connection.sendall(sent)
        answer = receive(connection)
    assert answer.status == 413
    assert "4,194,304 bytes once it is decoded" in json.loads(answer.content)["error"]["message"]


def test_a_body_of_the_limit_is_taken_in_any_coding(server: ServerProcess) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    padded = body + b" " * (4 * 2**20 - len(body))
    for coding in ("gzip", "deflate", "zstd"):
        assert sent(server, "/v1/completions", ENCODERS[coding](padded), coding).status_code == 200
        assert sent(server, "/v1/completions", ENCODERS[coding](padded + b" "), coding).status_code == 413


def test_nothing_has_no_coding(server: ServerProcess) -> None:
    """A request without a body may name one all the same."""
    assert server.http.get("/health", headers={"content-encoding": "gzip"}).status_code == 200
    assert server.http.post("/reset_prefix_cache", headers={"content-encoding": "zstd"}).status_code == 200
    head = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n" + length(b"") + b"\r\n"
    with connect(server) as connection:
        connection.sendall(head)
        assert receive(connection).status == 200
