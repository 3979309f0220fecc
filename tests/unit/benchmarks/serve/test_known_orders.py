"""Orders that are known once they have been answered: what is the same, what differs, and what is no answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.serving.clients import MAX_TOKENS, Answers, OrderKind, TimedAnswer, make_known_requests

DECK = make_known_requests(64, seed=3)


def whole(text: str, status: int = 200, **more: Any) -> TimedAnswer:
    heard = TimedAnswer()
    heard.on_head(status, {b"content-type": b"application/json"}, 0.0)
    choice = {"index": 0, "text": text, "finish_reason": "stop", "token_ids": [len(text)], **more}
    heard.on_body(json.dumps({"id": "any", "choices": [choice]}).encode(), 0.1)
    return heard


def streamed(*texts: str, ends: bool = True) -> TimedAnswer:
    heard = TimedAnswer()
    heard.on_head(200, {b"content-type": b"text/event-stream; charset=utf-8"}, 0.0)
    for i, text in enumerate(texts):
        choice = {"index": 0, "text": text, "token_ids": [7] * len(text), "finish_reason": None}
        heard.on_body(b"data: " + json.dumps({"id": str(i), "choices": [choice]}).encode() + b"\n\n", 0.1 * i)
    if ends:
        heard.on_body(b"data: [DONE]\n\n", 1.0)
    return heard


def test_a_deck_has_every_kind_and_is_the_same_for_a_seed() -> None:
    assert {order.kind for order in DECK} == set(OrderKind)
    assert DECK == make_known_requests(64, seed=3) != make_known_requests(64, seed=4)
    for order in DECK:
        asked = json.loads(order.body)
        assert len(asked.get("prompt", ())) + asked["max_tokens"] <= MAX_TOKENS
        assert (order.status == 400) is (order.kind is OrderKind.REFUSED)


def test_the_first_answer_is_the_one_to_compare_with() -> None:
    answers, order = Answers(), DECK[0]
    assert answers.take(order, whole("abc"))
    assert answers.take(order, whole("abc"))
    assert (answers.num_repeated, answers.differing) == (1, [])
    for other in (whole("abd"), whole("abc", finish_reason="length"), whole("abc", logprobs={"content": [1]})):
        answers.take(order, other)
    assert answers.differing == [order.number] * 3
    assert answers.take(DECK[1], whole("x"))
    assert answers.num_repeated == 4, "of another order nothing is known"


def test_how_tokens_are_dealt_out_to_events_is_no_difference() -> None:
    assert streamed("ab", "c").answer_digest == streamed("a", "bc").answer_digest != streamed("ab", "d").answer_digest


@pytest.mark.parametrize("heard", [whole("abc", status=500), streamed("ab", ends=False), TimedAnswer()])
def test_what_is_no_answer_is_said(heard: TimedAnswer) -> None:
    answers = Answers()
    assert not answers.take(DECK[0], heard)
    assert len(answers.wrong) == 1


def test_an_error_within_a_stream_is_no_answer() -> None:
    heard = streamed("ab", ends=False)
    heard.on_body(b'data: {"error": {"message": "lost"}}\n\ndata: [DONE]\n\n', 1.0)
    answers = Answers()
    assert not answers.take(DECK[0], heard)
    assert "lost" in answers.wrong[0]
