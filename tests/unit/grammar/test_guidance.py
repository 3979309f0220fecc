"""Masks are exactly what a form leaves, for every kind of tokenizer; what cannot be followed is refused by name."""

from __future__ import annotations

import json
import random
import re
import sys
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import text_fakes
from grammar_walks import ENDS, allowed, backend, eos_id, matcher_of, num_columns, text_of, walk
from twostroke.errors import EngineUnavailable, InvalidParameter
from twostroke.grammar import guidance
from twostroke.grammar import trial as trial_module
from twostroke.grammar.backend import OptionalCallSyntax
from twostroke.grammar.guidance import Guidance
from twostroke.grammar.json_schema import to_llguidance
from twostroke.sampling_params import StructuredOutputs

KINDS = tuple(ENDS)

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 6},
        "id": {"type": "string", "pattern": "^[A-F]{2}-[0-9]{1,3}$"},
        "n": {"type": "integer", "minimum": 1, "maximum": 500},
        "tags": {"type": "array", "items": {"enum": ["a", "b", None, True]}, "maxItems": 3},
        "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/leaf"}]},
    },
    "required": ["name", "n", "next"],
    "additionalProperties": False,
    "$defs": {"leaf": {"type": "object", "properties": {"x": {"type": "boolean"}}, "additionalProperties": False}},
}
PARENTHESES = 'start: pair\npair: "(" pair? ")"'
EQUATIONS = 'root ::= (term "=" term "\\n")+\nterm ::= [a-z] | [0-9]+ | "(" term [-+] term ")"'


@pytest.mark.parametrize("kind", KINDS)
@given(texts=st.lists(st.text("ab <=é日\n", min_size=1, max_size=6), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_a_mask_is_what_the_texts_leave(kind: str, texts: list[str], seed: int) -> None:
    """For a finite language the masks are known: a token is allowed if some text continues with it."""
    tokenizer, vocab_size, eos = text_fakes.tokenizer(kind), num_columns(kind), eos_id(kind)
    whole = {text.encode() for text in texts}
    matcher = backend(kind).matcher(to_llguidance(StructuredOutputs(choice=tuple(texts))))
    rng, so_far, is_first = random.Random(seed), b"", True
    while True:
        read = tokenizer.first_token_bytes if is_first else tokenizer.token_bytes
        special = tokenizer.special_token_ids
        pieces = {i: read(i) for i in range(tokenizer.max_token_id + 1) if i not in special and i != eos}
        expected = {i for i, piece in pieces.items() if piece and any(t.startswith(so_far + piece) for t in whole)}
        assert allowed(matcher, vocab_size) == expected | ({eos} if so_far in whole else set())
        assert matcher.is_accepting == (so_far in whole)
        if not expected:
            return
        token_id = rng.choice(sorted(expected))
        matcher.accept(token_id)
        so_far, is_first = so_far + pieces[token_id], False


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 2**32))
def test_a_random_walk_has_the_form(kind: str, seed: int) -> None:
    """Whatever is sampled, another implementation of the format accepts the text that the user sees."""
    rng, tokenizer, eos = random.Random(seed), text_fakes.tokenizer(kind), [eos_id(kind)]
    for wanted, is_right in (
        ({"regex": r"(ab|[0-9]{2,3}) ?[x-z]+"}, lambda text: re.fullmatch(r"(ab|[0-9]{2,3}) ?[x-z]+", text)),
        ({"choice": ["yes", "no", "yes, but"]}, ("yes", "no", "yes, but").__contains__),
        ({"grammar": PARENTHESES}, lambda text: text == "(" * (len(text) // 2) + ")" * (len(text) // 2)),
        ({"grammar": EQUATIONS}, lambda text: all(_is_equation(line) for line in text.split("\n")[:-1])),
        ({"json": SCHEMA}, lambda text: jsonschema_rs.is_valid(SCHEMA, json.loads(text))),
        ({"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
    ):
        token_ids, has_ended = walk(matcher_of(kind, **wanted), num_columns(kind), eos, rng, max_tokens=150)
        if has_ended:  # with a vocabulary of words the end may be unreachable, or far away
            assert is_right(text_of(tokenizer, token_ids)), (wanted, text_of(tokenizer, token_ids))


def _is_equation(line: str) -> bool:
    """Reduces terms until nothing but two variables is left."""
    line = re.sub("[0-9]+", "n", line)
    while (shorter := re.sub(r"\([a-z][-+][a-z]\)", "t", line)) != line:
        line = shorter
    return re.fullmatch("[a-z]=[a-z]", line) is not None


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_most_walks_end(kind: str) -> None:
    """The walks above say nothing about those that do not."""
    ended = [
        walk(matcher_of(kind, json=SCHEMA), num_columns(kind), [eos_id(kind)], random.Random(seed))[1]
        for seed in range(20)
    ]
    assert sum(ended) >= 18


def test_a_space_that_is_stripped_is_no_part_of_the_form() -> None:
    """SentencePiece's usual first token has a space that the user never sees."""
    tokenizer = text_fakes.tokenizer("byte_fallback")
    with_space, without = tokenizer.token_id("▁def"), tokenizer.token_id("def")
    assert with_space is not None
    matcher = matcher_of("byte_fallback", regex="def def")
    assert with_space in allowed(matcher, num_columns("byte_fallback"))
    assert without is None or without in allowed(matcher, num_columns("byte_fallback"))
    matcher.accept(with_space)
    assert with_space in allowed(matcher, num_columns("byte_fallback"))
    matcher.accept(with_space)
    assert matcher.is_accepting
    assert text_of(tokenizer, [with_space, with_space]) == "def def"


def test_the_text_of_a_special_token_is_not_that_token() -> None:
    """A special token would not show in the text, and would steer the model."""
    tokenizer, special = text_fakes.tokenizer("byte_level"), "<|im_start|>"
    matcher = matcher_of("byte_level", choice=[special, "<tool call>"])
    begin = allowed(matcher, num_columns("byte_level"))
    assert tokenizer.token_id(special) not in begin
    assert tokenizer.token_id("<tool call>") in begin  # an added token that is text
    assert tokenizer.token_id("<") in begin
    with pytest.raises(InvalidParameter, match="special token"):
        matcher_of("byte_level", grammar=f'start: {special} "a"')


def test_white_space_between_the_parts_of_json_is_bounded() -> None:
    tokenizer = text_fakes.tokenizer("byte_level")
    (space,) = tokenizer.encode(" ")
    matcher = matcher_of("byte_level", json_object=True)
    (brace,) = tokenizer.encode("{")
    matcher.accept(brace)
    for _ in range(32):
        assert space in allowed(matcher, num_columns("byte_level"))
        matcher.accept(space)
    assert space not in allowed(matcher, num_columns("byte_level"))
    assert not matcher.failure


def test_after_a_token_that_was_not_allowed_none_is() -> None:
    matcher = matcher_of("byte_level", regex="ab")
    copy = matcher.copy()
    (wrong,) = text_fakes.tokenizer("byte_level").encode("x")
    matcher.accept(wrong)
    assert not allowed(matcher, num_columns("byte_level"))
    assert "doesn't satisfy the grammar" in matcher.failure
    assert not matcher.is_accepting
    assert allowed(copy, num_columns("byte_level"))


def test_a_model_without_an_end_of_text_token() -> None:
    tokenizer = text_fakes.tokenizer("byte_level")
    grammars = Guidance(tokenizer, num_columns("byte_level"), ())
    matcher = grammars.matcher(grammars.compile(StructuredOutputs(regex="a+b")))
    token_ids, has_ended = walk(matcher, num_columns("byte_level"), (), random.Random(0))
    assert not has_ended  # no token is allowed at the end, which `is_accepting` shows
    assert matcher.is_accepting
    assert re.fullmatch("a+b", text_of(tokenizer, token_ids))


def test_every_spelling_of_a_certain_text_is_allowed() -> None:
    tokenizer = text_fakes.tokenizer("byte_level")
    letters = [tokenizer.token_id(letter) for letter in "def"]
    matcher = matcher_of("byte_level", choice=["def"])
    assert tokenizer.token_id("def") in allowed(matcher, num_columns("byte_level"))
    for letter in letters:
        assert letter is not None
        assert letter in allowed(matcher, num_columns("byte_level"))
        matcher.accept(letter)
    assert matcher.is_accepting


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        ({"json": {"type": "array", "uniqueItems": True}}, 'Unimplemented keys: \\["uniqueItems"\\]'),
        ({"json": {"not": {"type": "string"}}}, '"not"'),
        ({"json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "oneOf constraints are not supported"),
        ({"json": {"not": {"type": "string"}}}, r'Unimplemented keys: \["not"\]'),
        ({"regex": "(a{1,1000}){1,1000}"}, "too many expressions"),
        ({"json": {"type": "strin"}}, "Invalid type: strin"),
        ({"json": {"$ref": "http://example.com/schema"}}, "does not fetch resources"),
        ({"json": {"$ref": "#/$defs/missing"}}, "'/\\$defs/missing' does not exist"),
        ({"json": {"$ref": "#"}}, "no text but the empty one matches it"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "Unsatisfiable schema"),
        ({"json": {"type": "string", "pattern": "(?=a)b"}}, "look-around"),
        ({"json": {"uniqueItems": True, "x-guidance": {"lenient": True}}}, "uniqueItems"),
        ({"regex": "(?=a)b"}, "look-around, including look-ahead and look-behind, is not supported"),
        ({"regex": r"(a)\1"}, "backreferences are not supported"),
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "(" * 1000 + ")" * 1000}, "nested"),
        ({"regex": ""}, "no text but the empty one matches it"),
        ({"regex": r"[^\s\S]"}, "no text but the empty one matches it"),
        ({"grammar": "start: A\nA: /(.*[ab].{40})/ & /(.*[bc].{41}.*)/ & ~/(.*x.{30}y)/"}, "fuel exhausted"),
        ({"grammar": "start: missing"}, 'unknown name: "missing"'),
        ({"grammar": "start: start"}, "no text but the empty one matches it"),
        ({"grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000}, "too deeply nested"),
        ({"grammar": 'root ::= ( "a"'}, r"Expected '\)'"),
        ({"grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000}, "recursion"),
        ({"grammar": "not a grammar"}, "Expected ::="),
        ({"json": {"type": "integer", "multipleOf": 10_000_019}}, "more than 0.5 s to compile"),
        ({"json": {"allOf": [{"pattern": f"a.*{i}.*b"} for i in range(40)]}}, "more than 0.5 s to compile"),
    ],
)
def test_what_cannot_be_followed_is_named(wanted: dict[str, Any], reason: str) -> None:
    (field,) = wanted
    with pytest.raises(InvalidParameter, match=reason) as refused:
        backend("byte_level").compile(StructuredOutputs(**wanted))
    assert refused.value.name == f"structured_outputs.{field}"
    assert len(str(refused.value)) < 600


def test_a_trial_that_gets_no_time_is_not_told_of_the_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial is repeated on the next request, and no refusal is cached."""
    grammars = backend("byte_level")
    wanted = StructuredOutputs(regex="[a-c]{3}x{2}")
    with monkeypatch.context() as patch:
        patch.setattr(trial_module, "child_command", lambda _: (sys.executable, "-c", "import signal; signal.pause()"))
        patch.setattr(trial_module, "MAX_WALL_S", 0.01)
        with pytest.raises(EngineUnavailable, match=r"is too busy\. Try again"):
            grammars.compile(wanted)
    assert grammars.compile(wanted)


def test_every_character_can_be_a_choice() -> None:
    characters = [chr(code) for code in (*range(0x300), 0x2028, 0x200B, 0xD7FF, 0xE000, 0xFEFF, 0xFFFD, 0x1F44D)]
    texts = [f"{character}{character}" for character in characters] + [
        "\\n",
        '"',
        "\\",
        "a/b",
        "<[5]>",
        "%json {}",
        "// a",
    ]
    grammars = backend("byte_level")
    first = grammars.matcher(grammars.compile(StructuredOutputs(choice=texts)))
    ids = {token: text_fakes.tokenizer("byte_level").token_bytes(token) for token in range(256 + 200)}
    one = {piece: token for token, piece in ids.items() if len(piece) == 1}
    for text in texts:
        matcher = first.copy()
        for byte in text.encode():
            if bytes([byte]) not in one:
                break
            matcher.accept(one[bytes([byte])])
        else:
            assert matcher.is_accepting, text
        assert not matcher.failure, text


def _object(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*required]}


PLACES: dict[str, Any] = {
    "alone": lambda schema: schema,
    "inside": lambda schema: _object({"list": {"type": "array", "minItems": 1, "items": schema}}, "list"),
    "no others": lambda schema: {**schema, "additionalProperties": False},
    # where no short text leads
    "behind an optional property": lambda schema: _object({"a": {"type": "integer"}, "b": schema}),
    "behind a long text": lambda schema: _object({"a": {"type": "string", "minLength": 300}, "b": schema}, "a", "b"),
    "by a pattern": lambda schema: {"type": "object", "patternProperties": {"^x": schema}},
    "in the last of many kinds": lambda schema: {"anyOf": [*({"const": number} for number in range(40)), schema]},
    "in a definition": lambda schema: _object({"a": {"$ref": "#/$defs/b"}}) | {"$defs": {"b": schema}},
}


@pytest.mark.parametrize("count", [500, 600, 1000, 2000])
@pytest.mark.parametrize("place", [*PLACES])
def test_many_optional_properties_work_or_are_refused_at_once(count: int, place: str) -> None:
    schema = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(count)}}
    schema = PLACES[place](schema)
    grammars = backend("byte_level")
    if count > 500:
        with pytest.raises(InvalidParameter, match="more than 500 optional properties of one object"):
            grammars.compile(StructuredOutputs(json=schema))
        return
    matcher = grammars.matcher(grammars.compile(StructuredOutputs(json=schema)))
    walk(matcher, num_columns("byte_level"), [eos_id("byte_level")], random.Random(0), max_tokens=100)
    assert not matcher.failure


CALLS = OptionalCallSyntax(markers=("<tool_call>", "[f("), markup=("</tool_call>", "<|end|>"))


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_of_a_form_or_a_call(kind: str) -> None:
    grammars, tokenizer, eos = backend(kind), text_fakes.tokenizer(kind), eos_id(kind)
    form = StructuredOutputs(json={"type": "object", "properties": {}, "additionalProperties": False})
    matcher = grammars.matcher(grammars.compile(form, CALLS))

    def is_allowed(text: str) -> bool:
        trial, token_ids = matcher.copy(), tokenizer.encode(text, add_special_tokens=False)
        if text_of(tokenizer, token_ids) != text:
            pytest.skip("a vocabulary of words cannot write it")
        if not tokenizer.first_token_bytes(token_ids[0]):  # a space that the beginning of a text does not have
            token_ids = token_ids[1:]
        for token_id in token_ids:
            if token_id not in allowed(trial, num_columns(kind)):
                return False
            trial.accept(token_id)
        return eos in allowed(trial, num_columns(kind))

    assert is_allowed("{}")
    assert is_allowed('<tool_call>{"name": 5}</tool_call>\nand more')
    assert is_allowed("[f(a=1)]")
    assert not is_allowed("words")
    assert not is_allowed("[g(a=1)]")


def test_a_call_without_a_marker_is_one_of_the_functions() -> None:
    grammars, tokenizer = backend("byte_level"), text_fakes.tokenizer("byte_level")
    call = {"name": {"enum": ["f"]}, "parameters": {"type": "object"}}
    bare = {"type": "object", "properties": call, "required": list(call), "additionalProperties": False}
    form = StructuredOutputs(json={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    matcher = grammars.matcher(grammars.compile(form, OptionalCallSyntax(bare=bare)))
    for text, is_right in [
        ('{"name": "f", "parameters": {"x": 1}}', True),
        ('{"a": 1}', True),
        ('{"name": "g", "parameters": {}}', False),
    ]:
        trial = matcher.copy()
        for token_id in tokenizer.encode(text, add_special_tokens=False):
            trial.accept(token_id)
        assert (trial.is_accepting and not trial.failure) == is_right, text


def test_an_opaque_tokenizer_is_refused() -> None:
    tokenizer = text_fakes.tokenizer("opaque")
    grammars = Guidance(tokenizer, tokenizer.vocab_size, [0])
    with pytest.raises(InvalidParameter, match="the text of a token depends on the tokens around it"):
        grammars.compile(StructuredOutputs(choice=["a"]))


def test_nothing_is_made_before_it_is_asked_for() -> None:
    class Unread:
        decodes_independently = True
        special_token_ids = frozenset[int]()

        def token_bytes(self, token_id: int) -> bytes:
            raise AssertionError(f"token {token_id} was read")

        def all_token_bytes(self, count: int) -> tuple[list[bytes], list[bytes]]:
            raise AssertionError(f"{count} tokens were read")

    grammars = Guidance(Unread(), 100, [0])
    with pytest.raises(AssertionError, match="100 tokens were read"):
        grammars.compile(StructuredOutputs(choice=["a"]))


def test_kept_grammars_are_bounded_and_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guidance, "MAX_KEPT", 3)  # each is tried in a process of its own, which takes its time
    grammars = Guidance(text_fakes.tokenizer("byte_level"), num_columns("byte_level"), [eos_id("byte_level")])
    first = grammars.compile(StructuredOutputs(choice=["text 0"]))
    matcher = grammars.matcher(first)
    begin = allowed(matcher, num_columns("byte_level"))
    matcher.accept(min(begin))
    for number in range(6):
        grammars.compile(StructuredOutputs(choice=[f"text {number}"]))
        assert allowed(grammars.matcher(first), num_columns("byte_level")) == begin
    assert len(grammars._kept) == 3


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_a_vocabulary_that_only_checks_allows_the_same(kind: str) -> None:
    tokenizer = text_fakes.tokenizer(kind)
    size, wanted = tokenizer.max_token_id + 1, StructuredOutputs(json={"type": "string", "maxLength": 5})
    masks: list[np.ndarray[tuple[int], np.dtype[np.int32]]] = []
    for draws in (True, False):
        grammars = Guidance(tokenizer, size, [0], draws=draws)
        matcher = grammars.matcher(grammars.compile(wanted))
        masks.append(np.zeros(-(-size // 32), np.int32))
        matcher.fill_mask(masks[-1])
    assert masks[0].any()
    assert np.array_equal(masks[0], masks[1])
