"""Bodies that mean harm, to a real server: each is refused in words, and the server goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.hostile.fields import Field, fields_of, value_of, wrong_for
from server_process import ServerProcess

SIZE = 10**6
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def refusing(server: ServerProcess) -> Iterator[ServerProcess]:
    """Shared server, which must log no internal error meanwhile."""
    before = len(server.lines)
    yield server
    server.wait_until_idle()
    assert not [line for line in server.lines[before:] if "internal error" in line]


def send(server: ServerProcess, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
    answer = server.http.post(path, content=body, headers=JSON)
    assert len(answer.content) < 4000 or answer.status_code == 200, "no value is sent back"
    return answer.status_code, answer.json()


def message_of(told: dict[str, Any]) -> str:
    message: str = told["error"]["message"]
    return message


def cases(server: ServerProcess) -> Iterator[tuple[Field, str]]:
    """Yield each field of each route with a value of another type, in rotation; the benchmark tries all pairs."""
    fields = fields_of(server.http.get("/openapi.json").json())
    assert len({field.route for field in fields}) >= 8
    for number, field in enumerate(fields):
        wrong = wrong_for(field)
        yield field, wrong[number % len(wrong)]


def test_a_megabyte_of_a_wrong_type_in_every_field_of_every_route(refusing: ServerProcess) -> None:
    num_sent = 0
    for field, name in cases(refusing):
        status, told = send(refusing, field.route, field.body(value_of(name, SIZE)))
        num_sent += 1
        assert status < 500, (str(field), name, told)
        if field.route != "/pools":
            assert status in (200, 400, 404, 413), (str(field), name, told)
    assert num_sent > 120
    assert refusing.http.get("/health").status_code == 200


def deep_schema(levels: int) -> Any:
    value: Any = {"type": "string"}
    for _ in range(levels):
        value = {"items": value}
    return value


def deep_list(levels: int) -> Any:
    value: Any = "x"
    for _ in range(levels):
        value = [value]
    return value


USER = {"role": "user", "content": "x"}
CHAT: dict[str, Any] = {"messages": [USER], "max_tokens": 1}
TOOL = {"name": "f", "parameters": deep_schema(300)}
SIBLINGS: dict[str, tuple[str, Any, str]] = {
    "the name of a model": ("/v1/completions", {"prompt": "x", "model": "m" * SIZE}, "does not exist"),
    "a word of an enumeration": ("/v1/completions", {"prompt": "x", "service_tier": "s" * SIZE}, "service_tier"),
    "an unknown name": ("/v1/completions", {"prompt": "", "k" * SIZE: 1}, "empty"),
    "unknown names": ("/v1/completions", {"prompt": "x", **{f"k{i}": 1 for i in range(50_000)}}, "unknown"),
    "biases": ("/v1/completions", {"prompt": "x", "logit_bias": {str(i): "x" for i in range(50_000)}}, "logit_bias"),
    "biases beyond the limit": (
        "/v1/completions",
        {"prompt": "x", "logit_bias": {str(i): 1 for i in range(50_000)}},
        "--max-parameter-items",
    ),
    "a schema as a text": (
        "/v1/completions",
        {"prompt": "x", "structured_outputs": {"json": "[" * SIZE}},
        "at most 65536 bytes",
    ),
    "choices": ("/v1/completions", {"prompt": "x", "structured_outputs": {"choice": ["a"] * 70_000}}, "65536 items"),
    "prompts": ("/v1/completions", {"prompt": ["a"] * 3000}, "at most 2048 items; it has 3000"),
    "a deep schema of a tool": (
        "/v1/chat/completions",
        {**CHAT, "tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"},
        "nested",
    ),
    "deep variables": ("/v1/chat/completions", {**CHAT, "chat_template_kwargs": {"a": deep_list(80)}}, "nested"),
    "parts without a text": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{}] * 200}]},
        "no text",
    ),
    "parts of a message": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": ["a"] * 20_000}]},
        "at most 8192",
    ),
    "objects in many lists": (
        "/v1/responses",
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "["}] * 5000}] * 7},
        "more than 32768 lists and objects",
    ),
    "ids that may be generated": ("/v1/completions", {"prompt": "x", "allowed_token_ids": [7] * 2**18}, "131072 items"),
    "items that are nothing": ("/v1/responses", {"input": [{}] * 100_000}, "lacks a required field"),
    "results of tools": (
        "/v1/messages",
        {
            "max_tokens": 1,
            "messages": [
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [1.5] * 300_000}]}
            ],
        },
        "content",
    ),
    "inputs of tools": (
        "/v1/messages",
        {
            "max_tokens": 1,
            "messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": []}]}],
        },
        "input",
    ),
    "reasoning": ("/v1/responses", {"input": [{"type": "reasoning", "content": [{}] * 100_000}]}, "content"),
    "too many ids to see as text": ("/detokenize", {"tokens": [7] * (2**20 + 1)}, "at most 1048576 items"),
    "one id that is none": ("/detokenize", {"tokens": [7] * 500_000 + [10**6]}, "must be from 0"),
    "half a million ids": ("/v1/completions", {"prompt": [7] * 500_000}, "500000 tokens"),
    "half a million inputs": ("/v1/embeddings", {"input": ["a"] * 250_000}, "at most 2048 items"),
    "an experiment": ("/lab/experiment", {"story": "s" * SIZE}, "--lab"),
}


@pytest.mark.parametrize("name", SIBLINGS)
def test_siblings_are_refused_in_words(refusing: ServerProcess, name: str) -> None:
    path, body, told = SIBLINGS[name]
    status, answer = send(refusing, path, json.dumps(body).encode())
    assert status in (400, 404, 413), answer
    assert told in message_of(answer)


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/tokenize"]
)
@pytest.mark.parametrize("brackets", [(b"[", b"]"), (b'{"a":', b"}")], ids=["lists", "objects"])
@pytest.mark.parametrize("levels", [900, 5000, 100_000])
def test_nesting_ends_in_words(refusing: ServerProcess, path: str, brackets: tuple[bytes, bytes], levels: int) -> None:
    nested = brackets[0] * levels + b"7" + brackets[1] * levels
    for field in (b"metadata", b"zz", b"messages", b"prompt", b"tools"):
        body = b'{"prompt":"x","max_tokens":1,"max_output_tokens":1,"%b":%b,"input":"x"}' % (field, nested)
        answer = refusing.http.post(path, content=body, headers=JSON)
        assert answer.status_code in (200, 400), answer.text


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/tokenize"])
@pytest.mark.parametrize("number", [b"9" * 5000, b"9" * SIZE, b"1e999999", b"-" + b"9" * 400, b"0." + b"1" * SIZE])
def test_numbers_of_any_length_end_in_words(refusing: ServerProcess, path: str, number: bytes) -> None:
    for field in (b"max_tokens", b"temperature", b"seed", b"zz"):
        answer = refusing.http.post(path, content=b'{"prompt":"x","%b":%b}' % (field, number), headers=JSON)
        assert answer.status_code in (200, 400), answer.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("body", [{"prompt_logprobs": 2}, {"echo": True, "logprobs": 2}], ids=str)
def test_scores_of_a_long_prompt_are_those_of_its_parts(
    refusing: ServerProcess, body: dict[str, Any], stream: bool
) -> None:
    """Written by a thread, in slices; the same numbers as a short prompt's, which are written at once."""
    prompt = [5 + i % 50 for i in range(600)]

    def first_choice(prompt: list[int], n: int) -> dict[str, Any]:
        asked = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "n": n, **body}
        if not stream:
            return refusing.post("/v1/completions", asked).json()["choices"][0]
        events = refusing.events("/v1/completions", asked)
        return next(choice for event in events for choice in event["choices"] if choice["index"] == 0)

    def scores(choice: dict[str, Any]) -> list[Any]:
        return choice.get("prompt_logprobs") or choice["logprobs"]["token_logprobs"]

    long, short = first_choice(prompt, 2), first_choice(prompt[:40], 1)
    assert len(scores(long)) >= len(prompt)
    assert scores(long)[:40] == scores(short)[:40]


def test_a_chat_has_the_scores_of_its_prompt_too(refusing: ServerProcess) -> None:
    messages = [{"role": "user", "content": "def add(a, b):\n" * 60}]
    asked = {"messages": messages, "max_tokens": 100, "temperature": 0, "prompt_logprobs": 1, "logprobs": True}
    whole = refusing.post("/v1/chat/completions", asked).json()
    events = refusing.events("/v1/chat/completions", asked)
    assert len(whole["prompt_logprobs"]) == whole["usage"]["prompt_tokens"] > 64
    assert events[0]["prompt_logprobs"] == whole["prompt_logprobs"]
    pieces = [choice["logprobs"]["content"] for event in events for choice in event["choices"] if choice["logprobs"]]
    assert [one for piece in pieces for one in piece] == whole["choices"][0]["logprobs"]["content"]


def test_long_texts_are_counted_whole(refusing: ServerProcess) -> None:
    text = "7" * 300_000
    counted = refusing.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert counted["count"] == len(counted["tokens"]) == len(counted["token_strs"])
    assert refusing.post("/detokenize", {"tokens": counted["tokens"]}).json()["prompt"] == text
    asked = {"messages": [{"role": "user", "content": text}]}
    assert refusing.post("/v1/messages/count_tokens", asked).json()["input_tokens"] > counted["count"]
    for path, body in (
        ("/v1/completions", {"prompt": text}),
        ("/v1/chat/completions", asked),
        ("/v1/embeddings", {"input": text}),
    ):
        answer = refusing.post(path, {**body, **({} if "embeddings" in path else {"max_tokens": 1})})
        assert answer.status_code == 400
        assert "max_model_len" in answer.json()["error"]["message"]


def test_a_large_body_may_begin_with_the_mark_of_utf_8(refusing: ServerProcess) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 1, "user": "u" * 100_000}).encode("utf-8-sig")
    assert send(refusing, "/v1/completions", body)[0] == 200
