"""A list of the wrong type is refused at its first wrong element; its length is looked at before any."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from typing import Annotated, Any, get_args, get_origin

import pytest
from pydantic import ValidationError

from benchmarks.hostile.fields import Field, fields_of
from twostroke.api.generation import LARGE_INPUT, input_size
from twostroke.api.http_errors import HTTPError, validation_answer
from twostroke.api.protocol.chat import ChatRequest, unknown_in_messages
from twostroke.api.protocol.fields import MAX_CONTAINERS, MAX_FIELDS, MAX_PARAMETER_ITEMS, AtMost, WireObject
from twostroke.api.protocol.sampling import CompletionRequest
from twostroke.api.protocol.shapes import CHECKED_BYTES, check_shape
from twostroke.api.reference import ENDPOINTS
from twostroke.api.routes.models import DetokenizeRequest, TokenizeRequest
from twostroke.api.routes.operations import PoolSizes
from twostroke.errors import InvalidPrompt, UnknownParameter, shown
from twostroke.tokenizer.messages import checked_messages

KINDS: dict[str, type[WireObject]] = {
    **{name.removeprefix("POST "): kind for name, kind in ENDPOINTS.items()},
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/pools": PoolSizes,
}
ELEMENTS = {"number": b"1.5", "object": b"{}", "list": b"[]", "null": b"null", "switch": b"true", "text": b'"ab"'}
MANY = 5000


def fields(route: str) -> list[Field]:
    schema = KINDS[route].model_json_schema()
    operation = {"post": {"requestBody": {"content": {"application/json": {"schema": schema}}}}}
    return fields_of({**schema, "paths": {route: operation}})


LISTS = [field for route in KINDS for field in fields(route) if "array" in field.kinds]


def refusal(field: Field, value: bytes) -> dict[str, Any] | None:
    """Return the error of the reader of large bodies; None if the shape is right."""
    try:
        check_shape(KINDS[field.route], field.body(value))
    except HTTPError as error:
        return error.answer.body["error"]
    return None


def problems(kind: type[WireObject], body: Any) -> list[Any]:
    """Return pydantic's errors of a body."""
    try:
        kind.model_validate(body)
    except ValidationError as error:
        return error.errors()
    return []


def test_every_list_is_among_them() -> None:
    assert len(LISTS) > 40
    named = {str(field) for field in LISTS}
    assert {"/v1/chat/completions messages.0.content", "/v1/completions structured_outputs.choice"} < named
    assert {"/v1/messages messages.0.content", "/v1/responses input.0.content", "/detokenize tokens"} < named


@pytest.mark.parametrize("field", LISTS, ids=str)
def test_at_most_one_wrong_element_is_looked_at(field: Field) -> None:
    for element in ELEMENTS.values():
        body = json.loads(field.body(b"[%b]" % b",".join([element] * MANY)))
        errors = problems(KINDS[field.route], body)
        # every wrong element that is looked at is an error of its own, with its index in the path
        depth = len(field.path.split("."))
        looked_at = {part for each in errors for part in each["loc"][depth:] if isinstance(part, int)}
        assert looked_at <= {0}, element
        assert len(errors) <= 4, "one for each kind that the field may have"


@pytest.mark.parametrize("field", LISTS, ids=str)
def test_nothing_behind_the_first_wrong_element_is_read(field: Field) -> None:
    """The rest is not JSON, which is not noticed."""
    num_wrong = 0
    for element in ELEMENTS.values():
        told = refusal(field, b"[%b]" % element)
        if told is not None:
            num_wrong += 1
            assert refusal(field, b"[%b, \xff\xfe" % element) == told
            assert len(told["message"]) < 300
    assert num_wrong or field.path.endswith(("annotations", "logprobs", "summary")), "these may hold anything"


@pytest.mark.parametrize("field", LISTS, ids=str)
def test_too_many_right_elements_are_counted_before_any_is_made(field: Field) -> None:
    """Objects are read by the reader, which makes less than ten times their size of them."""
    objects = (b'{"role":"user","content":""}', b'{"type":"text","text":""}', b"{}")
    for element in (b'"ab"', b'""', b"[7]", b'["a"]', b"7", *objects):
        body = field.body(b"[%b]" % b",".join([element] * 80_000))
        tracemalloc.start()
        try:
            told = refusal(field, body)
            made = tracemalloc.get_traced_memory()[1] / len(body)
        finally:
            tracemalloc.stop()
        if element[:1] in b'"[':
            assert told is not None, element
            assert made < 4, (element, made)
        else:
            assert made < 12, (element, made)


@pytest.mark.parametrize("end", [b"", b", \xff", b"]} x"])
def test_a_list_that_is_too_long_is_not_read_whatever_follows(end: bytes) -> None:
    for prompt in (b"[7],", b'"a]}\\"",', b" [ 7 , 8 ] ,", b'\n"ab"\t,'):
        with pytest.raises(HTTPError, match="valid at prompt: must have at most 2048 items"):
            check_shape(CompletionRequest, b'{"prompt" : [' + prompt * 2100 + end)
    within = (
        b'{"prompt":"x","metadata":{"prompt":['
        + b'"a",' * 3000
        + b'"a"]},"stop":["\\"prompt\\":['
        + b"1," * 9000
        + b'"]}'
    )
    check_shape(CompletionRequest, within)
    check_shape(CompletionRequest, b'{"prompt":[' + b'"a",' * 2047 + b'"a"]}')
    check_shape(CompletionRequest, b'{"prompt":[' + b"7," * 100_000 + b"7]}")


@pytest.mark.parametrize("route", KINDS)
def test_a_text_is_not_read_for_a_list_nor_a_list_for_a_text(route: str) -> None:
    for field in fields(route):
        for kind, value in (("string", b'"ab"'), ("array", b"[7]"), ("object", b"{}")):
            if kind not in field.kinds and "any" not in field.kinds:
                told = refusal(field, value)
                assert told is not None, (str(field), kind)
                assert refusal(field, value + b" \xff") == told
                assert told["param"] == field.path.partition(".")[0]


def test_every_list_has_a_limit_that_is_checked_first() -> None:
    def hints(hint: Any) -> Iterator[tuple[Any, bool]]:
        """Yield every list within a type, and whether it is bounded."""
        origin, parts = get_origin(hint), get_args(hint)
        if origin is Annotated:
            if get_origin(parts[0]) is list:
                yield parts[0], any(isinstance(extra, AtMost) for extra in parts[1:])
                yield from hints(get_args(parts[0])[0])
            else:
                yield from hints(parts[0])
        elif origin is list:
            yield hint, False
        elif isinstance(hint, type) and issubclass(hint, WireObject):
            for info in hint.model_fields.values():
                bounded = any(isinstance(extra, AtMost) for extra in info.metadata)
                yield from hints(Annotated[info.annotation, AtMost(1)] if bounded else info.annotation)
        else:
            for part in parts:
                yield from hints(part)

    found = [(kind.__name__, hint, bounded) for kind in KINDS.values() for hint, bounded in hints(kind)]
    assert len(found) > 35
    assert not [each for each in found if not each[2]]


def test_lists_and_objects_are_counted_and_brackets_in_texts_are_not() -> None:
    def body(number: int) -> bytes:
        """Return a body with this many lists and objects, and twice as many brackets in strings."""
        texts = b'"\\"[{","]{[",' * number
        return b'{"prompt":"[","metadata":{"a":[%b[]%b]}}' % (texts, b",{}" * (number - 4))

    check_shape(CompletionRequest, body(MAX_CONTAINERS))
    with pytest.raises(HTTPError, match="more than 32768 lists and objects"):
        check_shape(CompletionRequest, body(MAX_CONTAINERS + 1))


@pytest.mark.parametrize("field", [b'"":0', b'"a:\\":":"b:"', b'"\\\\" :\n":"'], ids=str)
def test_fields_are_counted_before_any_is_made_and_colons_in_texts_are_not(field: bytes) -> None:
    def body(number: int) -> bytes:
        """Return a body with so many fields."""
        return b'{"prompt":"::","zz":{%b}}' % b",".join([field] * (number - 2))

    check_shape(CompletionRequest, body(MAX_FIELDS))
    too_many = body(MAX_FIELDS + 1)
    tracemalloc.start()
    try:
        with pytest.raises(HTTPError, match="more than 163840 fields together"):
            check_shape(CompletionRequest, too_many)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_as_many_biases_as_may_be_are_not_too_many_fields() -> None:
    biases = {str(i): 1 for i in range(MAX_PARAMETER_ITEMS)}
    check_shape(CompletionRequest, json.dumps({"prompt": "x", "logit_bias": biases}).encode())


def test_a_part_that_is_refused_by_name_has_no_unknown_fields() -> None:
    def unknown(kind: str) -> list[str]:
        part = {"type": kind, kind: {"url": "data:,"}}
        return list(unknown_in_messages([{"role": "user", "content": [part]}]))

    assert unknown("image_url") == unknown("input_audio") == []
    assert unknown("odd") == ["messages.content.odd"]


def test_an_object_of_unknown_fields_is_refused_before_one_is_read() -> None:
    unknown = {f"k{i}": float("nan") for i in range(300)}
    for body, place in (
        ({"prompt": "x", **unknown}, ""),
        ({"prompt": "x", "stream_options": unknown}, "stream_options"),
    ):
        with pytest.raises(ValidationError, match="it has more than 64 unknown fields") as caught:
            CompletionRequest.model_validate(body)
        assert place in str(caught.value)


def test_lengths_come_before_elements() -> None:
    for prompt, most in ((["a"] * 3000, 2048), ([[7]] * 3000, 2048), (["a"] * 3000 + [1.5], 2048)):
        with pytest.raises(ValidationError) as caught:
            CompletionRequest.model_validate({"prompt": prompt})
        told = validation_answer(caught.value.errors()).body["error"]
        assert f"must have at most {most} items; it has {len(prompt)}" in told["message"]
        assert told["param"] == "prompt"
    with pytest.raises(ValidationError, match="must have at least 1 item; it has 0"):
        ChatRequest.model_validate({"messages": []})


def test_a_map_of_biases_is_read_up_to_the_first_wrong_one() -> None:
    for wrong in ("x", 101, -100.5, True, None, [1], 10**400, float("nan")):
        biases: dict[str, Any] = {"1": 5, "2": wrong} | {str(i): "x" for i in range(3, MANY)}
        with pytest.raises(ValidationError, match="for '2'") as caught:
            CompletionRequest.model_validate({"prompt": "x", "logit_bias": biases})
        assert caught.value.error_count() == 1
    kept = CompletionRequest.model_validate({"prompt": "x", "logit_bias": {"1": -100, "2": 0.5}}).logit_bias
    assert kept == {"1": -100, "2": 0.5}


@pytest.mark.parametrize(
    ("prompt", "place"),
    [([1, 2, "x"], "prompt.2='x'"), (["a", 1.5], "prompt.1=1.5"), ([[1], ["x"]], "prompt.1.0='x'"), (5, "prompt=5")],
)
def test_the_error_is_about_the_kind_of_prompt_that_was_meant(prompt: Any, place: str) -> None:
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate({"prompt": prompt})
    assert place in validation_answer(caught.value.errors()).body["error"]["message"]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b'{"prompt": "x", "temperature": NaN}', "is not valid JSON"),
        (b'{"prompt": "\\ud800 ...."}', "lone surrogates"),
        (b'{"prompt": "x"} x', "is not valid JSON"),
        (b'["a"]', "expected an object, got a list"),
        (b'{"max_tokens": 5}', "object missing required field `prompt`"),
        (b'{"prompt": "x", "stop": ["a", 5]}', "at stop[1]: expected a string, got a whole number"),
        (b'{"prompt": "x", "stream_options": {"include_usage": 1}}', "at stream_options.include_usage"),
        (b'{"prompt": "x", "max_tokens": 1.5}', "at max_tokens: expected a whole number or null, got a number"),
        (b'{"prompt": [[], []]}', "at prompt[0]"),
        (b"[" * 100_000, "expected an object"),
        (b'{"prompt": "x", "zz": ' + b"[" * 100_000, "the body is"),
        (b'{"prompt": "x", "max_tokens": ' + b"9" * 100_000 + b"}", "at max_tokens"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_wrong_is_said_in_words(body: bytes, told: str) -> None:
    with pytest.raises(HTTPError) as caught:
        check_shape(CompletionRequest, body)
    message = str(caught.value)
    assert told in message
    assert not any(name in message for name in ("`str`", "`int`", "`array`", "Struct"))


def test_right_bodies_pass() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, "b"], "mood": {"any": ["thing"]}},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
        {"role": "tool", "content": "", "tool_call_id": "1"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "reasoning": "so"},
    ]
    check_shape(ChatRequest, json.dumps({"messages": messages, "new": [{}], "metadata": {"a": [1]}}).encode())
    for prompt in ("a", [1, 2], ["a", "b"], [[1], [2, 3]], []):
        check_shape(CompletionRequest, json.dumps({"prompt": prompt, "stop": "x", "audio": [{}]}).encode())
    for route, kind in KINDS.items():
        for field in fields(route):
            if "any" not in field.kinds:
                check_shape(kind, field.body(b'"user"' if "string" in field.kinds else b"[]"))
    assert CHECKED_BYTES < 10**6


class Counted(dict[str, Any]):
    """Counts how often it is read."""

    num_read = 0

    def items(self) -> Any:
        Counted.num_read += 1
        return super().items()


@pytest.mark.parametrize("name", ["content", "tool_calls"])
def test_parts_of_a_message_are_read_up_to_the_first_wrong_one(name: str) -> None:
    Counted.num_read = 0
    with pytest.raises(InvalidPrompt, match=rf"messages\[0\]\.{name}\[0\]"):
        checked_messages([{"role": "assistant", "content": "", name: [Counted(a=1) for _ in range(MANY)]}])
    assert Counted.num_read == 1


class Written:
    """Counts how often it is written."""

    num_written = 0

    def __repr__(self) -> str:
        Written.num_written += 1
        return "w"


@pytest.mark.parametrize(
    "value", [[Written()] * MANY, {str(i): Written() for i in range(MANY)}, ((Written(),) * MANY,)]
)
def test_a_value_is_shown_by_its_beginning(value: Any) -> None:
    Written.num_written = 0
    assert len(shown(value)) < 100
    assert Written.num_written < 30
    assert shown([[[[[[5]]]]]]) == "[[[[…]]]]"
    assert shown(10**5000) == "a number of 16610 bits"
    for small in ("a", b"b", [1, {"a": (2, 3)}], {"x": 1.5}, (), ("a",), 10**20):
        assert shown(small) == repr(small)


def test_no_name_is_looked_for_among_the_known_that_is_a_book() -> None:
    told = str(UnknownParameter("a" * 10**6, ["story", "a"], "an experiment"))
    assert "known: a, story" in told
    assert len(told) < 200
    assert "did you mean 'story'" in str(UnknownParameter("storry", ["story"], "an experiment"))


def test_an_amount_is_not_counted_to_its_end() -> None:
    class Values(dict[str, Any]):
        num_read = 0

        def values(self) -> Any:
            Values.num_read += 1
            return super().values()

    assert input_size([Values(a=[]) for _ in range(300_000)]) > 1 << 18
    assert Values.num_read < 20_000
    assert input_size("a" * 100, None, 5, ["b"] * 50) == 216


@pytest.mark.parametrize("item", [[], {}, [1], [[]]], ids=str)
def test_lists_and_objects_count_however_little_they_hold(item: Any) -> None:
    """Each takes a step of the counting; as many as a request may have are long."""
    assert input_size({"a": [item] * 20_000}) > LARGE_INPUT
