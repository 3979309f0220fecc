"""Fields are found in a published schema, each with a body around it and the values that are wrong for it."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest

from benchmarks.hostile.fields import VALUES, fields_of, is_right_within, value_of, wrong_for
from benchmarks.hostile.heavy import heavy_requests, long_texts, many_parts
from benchmarks.hostile.probe import Effect
from benchmarks.reproduce import hostile_bodies

ASKED: dict[str, Any] = {
    "type": "object",
    "required": ["name", "items"],
    "properties": {
        "name": {"type": "string"},
        "size": {"type": "integer"},
        "items": {"type": "array", "items": {"$ref": "#/components/schemas/Item"}},
        "stop": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
    },
}
ITEM: dict[str, Any] = {
    "type": "object",
    "required": ["kind"],
    "properties": {"kind": {"enum": ["a", "b"], "type": "string"}, "ids": {"type": "array", "items": {}}},
}
SCHEMA: dict[str, Any] = {
    "paths": {
        "/ask": {
            "get": {},
            "post": {
                "requestBody": {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Asked"}}}}
            },
        },
        "/look": {"get": {}},
    },
    "components": {"schemas": {"Asked": ASKED, "Item": ITEM}},
}
FIELDS = {field.path: field for field in fields_of(SCHEMA)}


def test_each_text_and_each_list_is_found_once() -> None:
    assert list(FIELDS) == ["name", "items", "items.0.kind", "items.0.ids", "stop", "stop.0"]
    assert FIELDS["stop"].kinds == {"string", "array", "null"}
    assert FIELDS["stop"].item_kinds == {"string"}
    assert str(FIELDS["items.0.kind"]) == "/ask items.0.kind"


def test_a_body_is_right_but_for_the_field() -> None:
    assert json.loads(FIELDS["items.0.ids"].body(b"[1]")) == {"name": "x", "items": [{"kind": "a", "ids": [1]}]}
    assert json.loads(FIELDS["stop.0"].body(b"5")) == {"name": "x", "items": [{"kind": "a"}], "stop": [5]}


def test_what_is_wrong_for_a_field() -> None:
    assert "text" in wrong_for(FIELDS["items"])
    assert not {"text", "escapes"} & set(wrong_for(FIELDS["stop"]))
    assert is_right_within(FIELDS["stop"], "texts")
    assert not is_right_within(FIELDS["stop"], "objects")
    assert not is_right_within(FIELDS["name"], "texts")
    assert is_right_within(FIELDS["items"], "objects")
    assert is_right_within(FIELDS["items.0.ids"], "numbers")


@pytest.mark.parametrize("name", VALUES)
def test_values_have_their_size_and_their_type(name: str) -> None:
    assert 0.8 < len(value_of(name, 1000)) / 1000 < 1.2
    kinds = {"array": list, "object": dict, "string": str, "number": int}
    assert isinstance(json.loads(value_of(name, 200)), kinds[VALUES[name][0]])


@pytest.mark.parametrize("divisor", [1, 8])
def test_heavy_requests_are_many_kinds_of_json(divisor: int) -> None:
    found = list(heavy_requests(4096, divisor))
    assert len({name for name, _, _ in found}) == len(found) > 25
    assert len({route for _, route, _ in found}) == 8
    named = {key for _, _, body in found for key in json.loads(body)}
    assert {"prompt_logprobs", "response_format", "tools", "logit_bias", "stop", "bad_words", "documents"} <= named


def test_long_texts_are_cut_at_either_end_and_sent_back() -> None:
    found = {name: json.loads(body) for name, _, body in long_texts(10_000)}
    assert len(found) == 12
    assert all(9000 < len(json.dumps(body)) < 11_000 for body in found.values())
    assert {"left", "right"} == {body.get("truncation_side", "left") for body in found.values()}


@pytest.mark.parametrize(
    ("held_s", "counted"),
    [([0.05], 0.05), ([0.3, 0.02], 0.02), ([0.3, 0.2, 0.25], 0.2), ([0.3, 0.11, 0.12, 0.0], 0.11)],
)
def test_a_time_above_the_goal_is_measured_again(held_s: list[float], counted: float) -> None:
    """Time that other processes took does not count; the memory is the largest that was seen."""
    effects = [Effect(400, held, 0.0, number, 10) for number, held in enumerate(held_s)]
    num_sent = min(len(effects), 3)

    class Sent:
        def effect_of(self, route: str, body: bytes, kind: str) -> Effect:
            assert (route, body, kind) == ("/ask", b"{}", "k")
            return effects.pop(0)

    settled = hostile_bodies._settled(cast(Any, Sent()), "/ask", b"{}", "k")
    assert (settled.held_s, settled.grown_bytes, len(effects)) == (counted, num_sent - 1, len(held_s) - num_sent)


def test_bodies_of_many_parts_are_json_and_as_large_as_may_be_sent() -> None:
    sent = {name: (route, body) for name, route, body in many_parts(40)}
    assert len(sent) > 50
    for route, body in sent.values():
        assert 40 * len(body) < 4 * 2**20
        if b"[" * 500 not in body:  # the deepest that Python reads
            assert isinstance(json.loads(body), dict), route
