"""Whatever the ids and however they come, the pieces add up to the one-shot text and never split a character."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import text_fakes
from tiers import examples
from twostroke.tokenizer.tokenizer import IncrementalDetokenizer

QUICK = settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.too_slow])


@QUICK
@given(data=st.data(), kind=st.sampled_from(text_fakes.KINDS), skip=st.booleans())
def test_pieces_add_up_to_the_one_shot_text(data: st.DataObject, kind: str, skip: bool) -> None:
    tokenizer = text_fakes.tokenizer(kind)
    ids = data.draw(st.lists(st.integers(0, tokenizer.max_token_id + 3), max_size=40))
    sizes = itertools.cycle(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=5)))
    detokenizer = IncrementalDetokenizer(tokenizer, skip)
    pieces = [detokenizer.push(chunk) for chunk in text_fakes.chunked(ids, sizes)]
    assert "".join(pieces) + detokenizer.finish() == tokenizer.decode(ids, skip)


@QUICK
@given(data=st.data(), kind=st.sampled_from(("byte_level", "byte_fallback")))
def test_bytes_of_every_kind_add_up(data: st.DataObject, kind: str) -> None:
    """Only byte tokens and a few others: broken, overlong and interrupted UTF-8 is the rule here."""
    tokenizer = text_fakes.tokenizer(kind)
    single = [i for i in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(i)) == 1]
    other = [i for token in ("<tool call>", "日本", "café") if (i := tokenizer.token_id(token)) is not None]
    ids = data.draw(st.lists(st.sampled_from(single + other + sorted(tokenizer.special_token_ids)), max_size=30))
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [detokenizer.push([i]) for i in ids]
    assert "".join(pieces) + detokenizer.finish() == tokenizer.decode(ids)


@QUICK
@given(text=st.text(max_size=60))
def test_valid_text_never_shows_a_replacement_character(text: str) -> None:
    tokenizer = text_fakes.tokenizer("byte_level")
    ids = tokenizer.encode(text)
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
    pieces = [detokenizer.push([i]) for i in ids]
    assert sum(piece.count("\ufffd") for piece in pieces) == text.count("\ufffd")
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=False)
    assert detokenizer.finish() == ""


class DetokenizerMachine(RuleBasedStateMachine):
    """Drives one detokenizer in every order of pushes; the text so far must always begin the final text."""

    @initialize(kind=st.sampled_from(text_fakes.KINDS), skip=st.booleans())
    def start(self, kind: str, skip: bool) -> None:
        self.tokenizer, self.skip = text_fakes.tokenizer(kind), skip
        self.detokenizer = IncrementalDetokenizer(self.tokenizer, skip)
        self.ids: list[int] = []
        self.text = ""

    @rule(data=st.data())
    def push(self, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.integers(0, self.tokenizer.max_token_id), max_size=6))
        self.ids += ids
        self.text += self.detokenizer.push(ids)

    @rule(line=st.sampled_from(text_fakes.UNICODE_LINES), cut=st.integers(0, 8))
    def push_text(self, line: str, cut: int) -> None:
        ids = self.tokenizer.encode(line, add_special_tokens=False)
        ids = ids[: len(ids) - cut] if cut < len(ids) else ids
        self.ids += ids
        for token_id in ids:
            self.text += self.detokenizer.push([token_id])

    @invariant()
    def text_is_final(self) -> None:
        if hasattr(self, "ids"):
            assert self.tokenizer.decode(self.ids, self.skip).startswith(self.text)

    def teardown(self) -> None:
        if hasattr(self, "ids"):
            assert self.text + self.detokenizer.finish() == self.tokenizer.decode(self.ids, self.skip)


DetokenizerMachine.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=15, deadline=None)
TestDetokenizerMachine = DetokenizerMachine.TestCase


def test_real_vocabulary_random_ids() -> None:
    tokenizer = text_fakes.real_tokenizer()
    random = __import__("random").Random(7)
    for _ in range(300):
        ids = [random.randrange(tokenizer.vocab_size) for _ in range(random.randrange(60))]
        skip = random.random() < 0.5
        detokenizer = IncrementalDetokenizer(tokenizer, skip)
        text = "".join(detokenizer.push(c) for c in text_fakes.chunked(ids, itertools.cycle((1, 3, 2))))
        assert text + detokenizer.finish() == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("kind", text_fakes.KINDS)
def test_known_kind_is_chosen(kind: str) -> None:
    names = {
        "byte_level": "ByteLevelText",
        "byte_fallback": "ByteFallbackText",
        "metaspace": "ByTokenText",
        "wordpiece": "ByTokenText",
        "opaque": "OpaqueText",
    }
    assert type(text_fakes.tokenizer(kind).text).__name__ == names[kind]
