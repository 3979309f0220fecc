"""Background work at a real server: `service_tier: "flex"`."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from server_process import ServerProcess

QUESTION = {"prompt": "def f(", "temperature": 0.8, "seed": 3, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """Server with one slot, which background work has to release."""
    running = ServerProcess("--max-num-seqs", "1")
    yield running
    running.stop()


def ask(server: ServerProcess, **fields: object) -> dict[str, Any]:
    answer = server.post("/v1/completions", {**QUESTION, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def tokens_of(events: list[dict[str, Any]]) -> list[int]:
    return [token for event in events for choice in event["choices"] for token in choice.get("token_ids") or ()]


def grows(events: list[dict[str, Any]], num_tokens: int, within_s: float = 60.0) -> bool:
    """Wait until the events of a stream have more tokens than that; return whether they have."""
    end_s = time.monotonic() + within_s
    while len(tokens_of(events)) <= num_tokens and time.monotonic() < end_s:
        time.sleep(0.001)
    return len(tokens_of(events)) > num_tokens


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
    for _ in range(3):
        num_before = len(tokens_of(events))
        answer = ask(server, max_tokens=8, prompt="class A", service_tier="default")
        assert answer["service_tier"] == "default"
        assert not over.is_set(), "it ended before another request arrived: the test shows nothing"
        assert grows(events, num_before), "between two others it goes on"
    reader.join(60)
    assert tokens_of(events) == alone
    assert {event["service_tier"] for event in events} == {"flex"}


def test_a_chat_says_how_it_was_served(server: ServerProcess) -> None:
    chat = {"messages": [{"role": "user", "content": "def"}], "max_tokens": 4}
    flex = server.post("/v1/chat/completions", {**chat, "service_tier": "flex"}).json()
    assert flex["service_tier"] == "flex"
    assert "service_tier" not in server.post("/v1/chat/completions", chat).json()
    message = {"messages": chat["messages"], "max_tokens": 4, "model": "embedded"}
    for tier, told in (("auto", "standard"), ("standard_only", "standard"), ("flex", "batch")):
        answer = server.post("/v1/messages", {**message, "service_tier": tier})
        assert answer.json()["usage"]["service_tier"] == told
    assert "service_tier" not in server.post("/v1/messages", message).json()["usage"]
    answer = server.post("/v1/responses", {"input": "def", "max_output_tokens": 4, "service_tier": "flex"})
    assert answer.json()["service_tier"] == "flex"


@pytest.mark.parametrize("tier", ["turbo", "", 3])
def test_a_tier_that_there_is_not_is_refused(server: ServerProcess, tier: object) -> None:
    answer = server.post("/v1/completions", {**QUESTION, "service_tier": tier})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "service_tier"


@pytest.mark.parametrize("tier", ["auto", "default", "scale", "standard_only", "priority"])
def test_a_tier_that_changes_nothing_here_is_told_by_its_name(server: ServerProcess, tier: str) -> None:
    """OpenAI's schema has them all, and an answer says which one it was; priority needs the policy."""
    plain, told = ask(server, max_tokens=4), ask(server, max_tokens=4, service_tier=tier)
    assert told["service_tier"] == "default"
    assert told["choices"] == plain["choices"]
    events = server.events("/v1/completions", {**QUESTION, "max_tokens": 2, "service_tier": tier})
    assert {event["service_tier"] for event in events} == {"default"}
    assert server.post("/v1/embeddings", {"input": "a", "service_tier": tier}).status_code == 200


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


def test_priority_goes_before_those_who_wait() -> None:
    """With the only slot taken and two requests waiting, the later one has the tier and is served first."""
    running = ServerProcess("--max-num-seqs", "1", "--policy", "priority")
    try:
        body = {**QUESTION, "max_tokens": 150, "stream": True}  # long enough for one to end well before the next
        order: list[str] = []

        def read(name: str, **fields: object) -> None:
            order.append(running.events("/v1/completions", {**body, **fields})[0].get("service_tier", name))

        def wait(num_requests: int) -> None:
            running.wait_for("there", "/health", lambda answer: answer.json()["num_requests"] == num_requests)

        readers = [
            threading.Thread(target=read, args=("first",), kwargs={"max_tokens": 1500}),
            threading.Thread(target=read, args=("plain",)),
            threading.Thread(target=read, args=("",), kwargs={"service_tier": "priority"}),
            threading.Thread(target=read, args=("",), kwargs={"service_tier": "priority", "priority": 5}),
        ]
        for number, reader in enumerate(readers, start=1):
            reader.start()
            wait(number)
        for reader in readers:
            reader.join(60)
        assert order == ["first", "priority", "plain", "priority"], "a priority of the request's own is what counts"
    finally:
        running.stop()
