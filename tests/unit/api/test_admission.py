"""The limits of a real server: what is refused at its door, with which answer."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator

import httpx
import pytest

from server_process import ServerProcess

FLAGS = (
    *("--max-num-seqs", "1", "--max-queued-requests", "3", "--max-queued-tokens", "2000"),
    *("--max-answer-bytes", "100000", "--max-parameter-items", "50", "--max-queue-wait-s", "36000"),
)
LONG = {"prompt": "def f(", "max_tokens": 4000, "ignore_eos": True, "stream": True}
"""Longer than any of these tests."""


@pytest.fixture(scope="module")
def small() -> Iterator[ServerProcess]:
    running = ServerProcess(*FLAGS)
    yield running
    running.stop()


@contextlib.contextmanager
def asking(server: ServerProcess) -> Iterator[socket.socket]:
    """Send a long request; while it waits for its first token not even the head of an answer is written."""
    body = json.dumps(LONG).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        yield connection


def complete(server: ServerProcess, **fields: object) -> httpx.Response:
    return server.post("/v1/completions", {"prompt": "def f(", "max_tokens": 4, **fields})


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"n": 4}, "n", "at most max_queued_requests, 3"),
        ({"best_of": 4}, "n", "at most max_queued_requests, 3"),
        ({"prompt": ["a", "b"], "n": 2}, "n", "n=4"),
        ({"prompt": [[5] * 1500, [5] * 1500]}, "prompt", "prompt=3000"),
        ({"max_tokens": 500, "logprobs": 5}, "logprobs", "292,000 bytes"),
        ({"max_tokens": 500, "logprobs": 5}, "logprobs", "logprobs=5: the answer may have about"),
        ({"prompt": [5] * 1500, "prompt_logprobs": 0}, "prompt_logprobs", "prompt_logprobs=0: the answer may have"),
        ({"prompt": [5] * 1500, "prompt_logprobs": 0, "logprobs": 0}, "prompt_logprobs", "at most 100,000"),
        ({"stop": ["x" * 51]}, "stop", "together at most 50"),
        ({"logit_bias": {str(i): 1 for i in range(51)}}, "logit_bias", "logit_bias=51"),
        ({"bad_words": ["y" * 30], "stop": "x" * 21}, "bad_words", "stop 21, bad_words 30"),
        ({"allowed_token_ids": list(range(51))}, "allowed_token_ids", "--max-parameter-items"),
    ],
)
def test_a_request_that_can_never_fit_is_told_what_to_change(
    small: ServerProcess, fields: dict[str, object], param: str, told: str
) -> None:
    answer = complete(small, **fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert told in error["message"]


def test_a_full_queue_answers_at_once_and_says_when_to_come_back(small: ServerProcess) -> None:
    """With one running and three waiting, the fifth is refused, however long its prompt and whatever else is wrong."""
    with httpx.Client(timeout=60) as client, contextlib.ExitStack() as held:
        running = held.enter_context(asking(small))
        assert running.recv(1)  # it is begun and no longer counts among those that wait
        for num_others in (1, 2, 3):  # each is admitted before the next one is sent
            held.enter_context(asking(small))
            small.wait_for("there", "/health", lambda answer, n=num_others: answer.json()["num_requests"] > n)
        long = client.post(f"{small.url}/v1/completions", json={"prompt": "x" * 1_000_000, "max_tokens": 1})
        empty = client.post(f"{small.url}/v1/chat/completions", json={"messages": []})
        assert client.get(f"{small.url}/health").status_code == 200
    for refused in (long, empty):
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "overloaded"
        assert "(--max-queued-requests)" in refused.json()["error"]["message"]
    small.wait_until_idle()
    assert complete(small).status_code == 200


def test_who_waited_as_long_as_it_wanted_is_given_up(small: ServerProcess) -> None:
    """The ended requests were short, so the remaining time of the running one cannot be predicted."""
    for _ in range(30):
        assert complete(small, max_tokens=1).status_code == 200
    with asking(small):
        small.wait_for("there", "/health", lambda answer: answer.json()["num_requests"] > 0)
        for streams in (False, True):  # a stream begins with its first token, so its status shows the refusal
            given_up = small.post("/v1/completions", {**LONG, "stream": streams}, x_request_timeout="2")
            assert given_up.status_code == 503
            assert int(given_up.headers["retry-after"]) >= 1
            assert "was not begun" in given_up.json()["error"]["message"]
    assert complete(small).status_code == 200


@pytest.mark.parametrize("value", ["0", "-1", "soon", "nan", "inf", ""])
def test_a_patience_that_is_none_is_refused(small: ServerProcess, value: str) -> None:
    answer = httpx.post(f"{small.url}/v1/completions", json={"prompt": "x"}, headers={"x-request-timeout": value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "x-request-timeout"
