"""Events of a stream: three ways to count tokens, and all kinds of failed answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from twostroke.measure.serve.openai_wire import Exchange, StreamedAnswer, body

HEADERS = {b"content-type": b"text/event-stream; charset=utf-8"}
DONE = b"data: [DONE]\n\n"


def event(**content: Any) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def chunk(text: str | None = " w", usage: int | None = None, **more: Any) -> bytes:
    told = {} if usage is None else {"usage": {"prompt_tokens": 5, "completion_tokens": usage}}
    return event(choices=[{"index": 0, "text": text, **more}], **told)


def read(*parts: bytes, status: int = 200, headers: dict[bytes, bytes] = HEADERS) -> Exchange:
    """An exchange whose parts came a second after another, the head at second 10, the start of the run."""
    exchange = Exchange(scheduled_s=0.0)
    answer = StreamedAnswer(exchange, start_s=10.0)
    answer.on_head(status, headers, 10.0)
    for i, part in enumerate(parts, start=1):
        answer.on_body(part, 10.0 + i)
    answer.end()
    return exchange


def final_usage(count: int) -> bytes:
    return event(choices=[], usage={"prompt_tokens": 5, "completion_tokens": count})


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param([chunk(usage=2), chunk(usage=3), final_usage(3), DONE], id="usage counts along"),
        pytest.param(
            [chunk("", usage=2), chunk(" w w w", usage=3), final_usage(3), DONE], id="a token without text yet"
        ),
        pytest.param([chunk(token_ids=[1, 2]), chunk(token_ids=[3]), final_usage(3), DONE], id="token ids"),
        pytest.param(
            [chunk(token_ids=[1, 2]), chunk(token_ids=[3], usage=3), DONE], id="token ids and usage at the end"
        ),
        pytest.param([chunk() + chunk(), chunk(), final_usage(3), DONE], id="chunks, of which two came in one read"),
        pytest.param([chunk() + chunk(), chunk(usage=3), DONE], id="chunks, usage with the last one"),
    ],
)
def test_tokens_are_counted(parts: list[bytes]) -> None:
    exchange = read(*parts)
    assert exchange.failure is None
    assert exchange.chunk_times_s == [1.0, 2.0]
    assert exchange.chunk_tokens == [2, 1]
    assert exchange.num_output_tokens == 3
    assert exchange.prompt_tokens == 5


def test_the_opening_and_the_end_of_a_chat_are_no_tokens() -> None:
    opening = event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
    says = event(choices=[{"index": 0, "delta": {"content": " w"}}])
    thinks = event(choices=[{"index": 0, "delta": {"reasoning_content": "hm"}}])
    calls = event(choices=[{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}}])
    end = event(choices=[{"index": 0, "delta": {}, "finish_reason": "tool_calls"}])
    exchange = read(opening, thinks, says, calls, end, DONE)
    assert exchange.chunk_times_s == [2.0, 3.0, 4.0]
    assert exchange.finish_reason == "tool_calls"
    assert exchange.completion_tokens is None
    assert exchange.num_output_tokens == 3


def test_the_servers_count_is_the_bill() -> None:
    exchange = read(chunk(), chunk(), final_usage(7), DONE)
    assert sum(exchange.chunk_tokens) == 2
    assert exchange.num_output_tokens == 7


def test_cached_tokens_are_read() -> None:
    details = {"cached_tokens": 4}
    exchange = read(chunk(), event(choices=[], usage={"completion_tokens": 1, "prompt_tokens_details": details}), DONE)
    assert exchange.cached_tokens == 4


@pytest.mark.parametrize(
    ("parts", "kind", "message"),
    [
        ([chunk()], "truncated", "without data: [DONE]"),
        ([chunk(), b"data: {not json}\n\n", DONE], "malformed", "JSON is malformed"),
        ([chunk(), event(choices=7), DONE], "malformed", "Expected `array`"),
        ([chunk(), event(error={"message": "engine died"}), DONE], "error event", "engine died"),
    ],
)
def test_an_answer_that_is_none_is_named(parts: list[bytes], kind: str, message: str) -> None:
    exchange = read(*parts)
    assert exchange.failure == kind
    assert message in exchange.message
    assert exchange.chunk_tokens == [1]  # what arrived before stays


def test_a_refusal_keeps_its_body_and_its_advice() -> None:
    exchange = read(b'{"error": {"message"', b': "full"}}', status=429, headers={b"retry-after": b"3"})
    assert (exchange.failure, exchange.message) == ("429", '{"error": {"message": "full"}}')
    assert exchange.retry_after_s == 3.0


def test_retry_after_as_a_date_is_no_number() -> None:
    assert read(b"", status=503, headers={b"retry-after": b"Fri, 31 Dec 1999 23:59:59 GMT"}).retry_after_s is None


def test_an_answer_that_is_no_stream_is_named() -> None:
    exchange = read(b'{"choices": []}', headers={b"content-type": b"application/json"})
    assert exchange.failure == "no stream"
    assert "application/json" in exchange.message


def test_more_fields_win() -> None:
    sent = json.loads(body("completions", (1, 2), 9, "token-ids", {"max_tokens": 4, "top_k": 5}))
    assert sent["prompt"] == [1, 2]
    assert sent["max_tokens"] == 4
    assert sent["top_k"] == 5
    assert sent["return_token_ids"] is True
    chat = json.loads(body("chat", " w", 9, "usage", {}))
    assert chat["messages"] == [{"role": "user", "content": " w"}]
    assert chat["max_completion_tokens"] == 9
    assert chat["stream_options"]["continuous_usage_stats"] is True
