"""Background work at a real server: `service_tier: "flex"`."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from server_process import ServerProcess

QUESTION = {"prompt": "def f(", "temperature": 0.8, "seed": 3, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """Of one slot, which background work has to give back."""
    running = ServerProcess("--max-num-seqs", "1")
    yield running
    running.stop()


def ask(server: ServerProcess, **fields: object) -> dict[str, Any]:
    answer = server.post("/v1/completions", {**QUESTION, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def tokens_of(events: list[dict[str, Any]]) -> list[int]:
    return [token for event in events for choice in event["choices"] for token in choice.get("token_ids") or ()]


def test_it_makes_room_for_others_and_goes_on_with_the_same_tokens(server: ServerProcess) -> None:
    alone = ask(server, max_tokens=400)["choices"][0]["token_ids"]
    body = {**QUESTION, "max_tokens": 400, "service_tier": "flex", "stream": True}
    events: list[dict[str, Any]] = []
    begun, over = threading.Event(), threading.Event()

    def read() -> None:
        with server.http.stream("POST", "/v1/completions", json=body) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    events.append(json.loads(line.removeprefix("data: ")))
                    begun.set()
        over.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(60)
    num_before = len(tokens_of(events))
    for _ in range(3):
        answer = ask(server, max_tokens=8, prompt="class A", service_tier="default")
        assert answer["service_tier"] == "default"
    assert not over.is_set(), "it was over before anybody else came: the test shows nothing"
    assert len(tokens_of(events)) > num_before, "between two others it goes on"
    reader.join(60)
    assert tokens_of(events) == alone
    assert {event["service_tier"] for event in events} == {"flex"}


def test_a_chat_says_how_it_was_served(server: ServerProcess) -> None:
    chat = {"messages": [{"role": "user", "content": "def"}], "max_tokens": 4}
    flex = server.post("/v1/chat/completions", {**chat, "service_tier": "flex"}).json()
    assert flex["service_tier"] == "flex"
    assert "service_tier" not in server.post("/v1/chat/completions", chat).json()
    message = {"messages": chat["messages"], "max_tokens": 4, "model": "embedded"}
    for tier in ("standard_only", "flex"):
        assert server.post("/v1/messages", {**message, "service_tier": tier}).status_code == 200
    answer = server.post("/v1/responses", {"input": "def", "max_output_tokens": 4, "service_tier": "flex"})
    assert answer.status_code == 200


@pytest.mark.parametrize("tier", ["priority", "", 3])
def test_a_tier_that_there_is_not_is_refused(server: ServerProcess, tier: object) -> None:
    answer = server.post("/v1/completions", {**QUESTION, "service_tier": tier})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "service_tier"


def test_an_engine_that_cannot_serve_it_says_so() -> None:
    running = ServerProcess("--mixing", "prefill_first")
    try:
        answer = running.post("/v1/completions", {**QUESTION, "service_tier": "flex"})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == "service_tier"
        assert "needs chunked prefill" in error["message"]
    finally:
        running.stop()
