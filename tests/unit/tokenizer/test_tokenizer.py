"""Ids and text equal the reference tokenizer's for the same folder; what cannot work is refused with a reason."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

import text_fakes
from tiers import examples
from twostroke.errors import CorruptCheckpoint, InvalidPrompt, ModelNotFound, SetupError
from twostroke.tokenizer.settings import read_eos_token_ids
from twostroke.tokenizer.token_text import ByteLevelText
from twostroke.tokenizer.tokenizer import LONG_TEXT, Tokenizer

KINDS = ("byte_level", "byte_fallback", "metaspace", "wordpiece")
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=50)


def variant(tmp_path: Path, kind: str, **config: Any) -> Path:
    """Return a copy of a small tokenizer with changes to its tokenizer_config.json."""
    folder = tmp_path / kind
    shutil.copytree(text_fakes.folder(kind), folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


def assert_equal_to_reference(folder: Path, lines: tuple[str, ...]) -> None:
    reference = AutoTokenizer.from_pretrained(str(folder))
    tokenizer = Tokenizer.from_folder(folder)
    for add_special_tokens in (True, False):
        expected = reference(list(lines), add_special_tokens=add_special_tokens)["input_ids"]
        for line, ids in zip(lines, expected, strict=True):
            assert tokenizer.encode(line, add_special_tokens) == ids, line
    for line, ids in zip(lines, expected, strict=True):
        for skip in (True, False):
            assert tokenizer.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip), line
    assert tokenizer.vocab_size == len(reference)


def test_real_vocabulary_equals_the_reference() -> None:
    assert len(text_fakes.corpus()) >= 1000
    assert_equal_to_reference(text_fakes.real_tokenizer_folder(), text_fakes.corpus())


def test_long_texts_equal_the_reference() -> None:
    """They go another way into the library than lines do."""
    texts = ["\n".join(text_fakes.corpus()[start : start + 200]) for start in range(0, 1000, 200)]
    assert min(map(len, texts)) > LONG_TEXT
    assert_equal_to_reference(text_fakes.real_tokenizer_folder(), tuple(texts))


def others_run_while(work: Callable[[], object]) -> int:
    """Return how often another thread ran meanwhile, at the interpreter's shortest switch interval."""
    worker = threading.Thread(target=work)
    worker.start()
    turns = 0
    while worker.is_alive():
        turns += 1
        time.sleep(0.001)
    return turns


def test_a_long_text_does_not_hold_up_the_process() -> None:
    tokenizer = Tokenizer.from_folder(text_fakes.real_tokenizer_folder())
    text = "\n".join(text_fakes.corpus()) * 20
    assert others_run_while(lambda: tokenizer.encode(text)) > 20


@given(st.data(), st.sampled_from(KINDS))
def test_a_text_has_no_fewer_tokens_than_said(data: st.DataObject, kind: str) -> None:
    tokenizer = Tokenizer.from_folder(text_fakes.folder(kind))
    text = data.draw(ANY_TEXT)
    assert tokenizer.min_num_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False))


def test_a_hopeless_text_is_known_by_its_length() -> None:
    tokenizer = Tokenizer.from_folder(text_fakes.real_tokenizer_folder())
    assert tokenizer.min_num_tokens("x" * 10**6) > 1000


@pytest.mark.parametrize("kind", KINDS)
def test_small_vocabularies_equal_the_reference(kind: str) -> None:
    assert_equal_to_reference(text_fakes.folder(kind), text_fakes.corpus()[-1000:])


@pytest.mark.parametrize(
    "config",
    [
        {"add_bos_token": True},
        {"add_bos_token": False, "add_eos_token": True},
        {"add_bos_token": True, "bos_token": None},
        {"additional_special_tokens": ["[INST]"]},
        {"eos_token": {"content": "<|end|>", "lstrip": True, "__type": "AddedToken"}},
        {"sep_token": "<new separator>"},
        {"added_tokens_decoder": {"2000": {"content": "[INST]", "lstrip": False, "special": False}}},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_tokenizer_config_is_followed(tmp_path: Path, kind: str, config: dict[str, Any]) -> None:
    lines = (*text_fakes.UNICODE_LINES, "a <new separator>b", "x [INST] y", "text <|end|> text")
    assert_equal_to_reference(variant(tmp_path, kind, **config), lines)


def test_two_models_have_their_own_ids() -> None:
    one, other = text_fakes.tokenizer("byte_level"), text_fakes.tokenizer("byte_fallback")
    assert one.encode("hello world") != other.encode("hello world")


@settings(max_examples=examples(200), deadline=None)
@given(text=ANY_TEXT)
def test_byte_level_round_trip(text: str) -> None:
    tokenizer = text_fakes.tokenizer("byte_level")
    ids = tokenizer.encode(text)
    # The added token café is written in the byte alphabet as another text; the reference decodes it so as well.
    if not any(token in text for token in ("café", "<|two words|>")):
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", "replace") == tokenizer.decode(ids, False)


@settings(max_examples=examples(200), deadline=None)
@given(text=ANY_TEXT)
def test_real_vocabulary_round_trip(text: str) -> None:
    tokenizer = text_fakes.real_tokenizer()
    ids = tokenizer.encode(text)
    # This model composes characters (NFC); composed text round-trips unchanged.
    once = tokenizer.decode(ids, skip_special_tokens=False)
    assert tokenizer.decode(tokenizer.encode(once), skip_special_tokens=False) == once
    if text.isascii():
        assert once == text


@pytest.mark.parametrize("line", text_fakes.UNICODE_LINES)
def test_byte_fallback_round_trip(line: str) -> None:
    tokenizer = text_fakes.tokenizer("byte_fallback")
    if "<" not in line:
        assert tokenizer.decode(tokenizer.encode(line)) == line


def test_special_tokens_in_a_prompt_follow_the_model() -> None:
    tokenizer = text_fakes.tokenizer("byte_level")
    assert tokenizer.token_id("<|im_start|>") in tokenizer.encode("a<|im_start|>b")
    assert tokenizer.token_id("<|im_start|>") in tokenizer.special_token_ids
    assert tokenizer.token_id("<tool call>") not in tokenizer.special_token_ids


def test_pieces_and_single_tokens() -> None:
    tokenizer = text_fakes.tokenizer("byte_level")
    ids = tokenizer.encode("def 日 👍")
    assert b"".join(map(tokenizer.token_bytes, ids)) == "def 日 👍".encode()
    assert len(tokenizer.tokens(ids)) == len(ids)
    assert "".join(tokenizer.decoded_token(i) for i in tokenizer.encode(" import self")) == " import self"
    assert tokenizer.token(10**6) is None
    assert tokenizer.token_bytes(10**6) == b""
    assert tokenizer.tokens([10**6]) == [""]
    fallback = text_fakes.tokenizer("byte_fallback")
    assert fallback.token_bytes(3 + 0xE4) == b"\xe4"
    assert fallback.decoded_token(fallback.encode("self", add_special_tokens=False)[0]).startswith(" ")


def test_named_tokens() -> None:
    tokenizer = text_fakes.tokenizer("byte_fallback")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, None)
    assert tokenizer.named_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_settings_in_tokenizer_json_that_change_prompts_are_off(tmp_path: Path) -> None:
    folder = variant(tmp_path, "byte_level")
    raw = json.loads((folder / "tokenizer.json").read_text())
    raw["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    assert len(Tokenizer.from_folder(folder).encode("a b c d e f g")) > 3


def test_text_that_cannot_be_encoded(tmp_path: Path) -> None:
    """A tokenizer without a token for the unknown."""
    folder = variant(tmp_path, "metaspace")
    raw = json.loads((folder / "tokenizer.json").read_text())
    del raw["model"]["unk_id"]
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode("and")
    with pytest.raises(InvalidPrompt, match="cannot encode the text"):
        tokenizer.encode("\N{GRINNING FACE}")


def test_begin_token_that_does_not_exist(tmp_path: Path) -> None:
    """The library itself panics over it when it encodes the first prompt; here it is found at the start."""
    folder = variant(tmp_path, "byte_fallback")
    raw = json.loads((folder / "tokenizer.json").read_text())
    raw["post_processor"]["special_tokens"] = {}
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(CorruptCheckpoint, match="post_processor"):
        Tokenizer.from_folder(folder)


def test_check_vocab() -> None:
    tokenizer = text_fakes.tokenizer("byte_level")
    tokenizer.check_vocab(tokenizer.max_token_id + 1)
    tokenizer.check_vocab(10**6)
    with pytest.raises(SetupError, match=r"highest token id is \d+.*Use the tokenizer of this model"):
        tokenizer.check_vocab(tokenizer.max_token_id)


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="folder not found"):
        Tokenizer.from_folder(tmp_path / "nowhere")
    with pytest.raises(ModelNotFound, match=r"has no tokenizer\.json.*save_pretrained"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "{}", '{"model": {}}', "[1]", "\ufeff"])
def test_corrupt_tokenizer_json(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CorruptCheckpoint, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"[]",
        b"\xff",
        b"[" * 100_000,
        b'{"eos_token": 5}',
        b'{"eos_token": {"content": 5}}',
        b'{"eos_token": ""}',
        b'{"add_bos_token": "yes"}',
        b'{"additional_special_tokens": "x"}',
        b'{"additional_special_tokens": [1]}',
        b'{"added_tokens_decoder": []}',
        b'{"added_tokens_decoder": {"x": {}}}',
        b'{"added_tokens_decoder": {"5": "x"}}',
        b'{"added_tokens_decoder": {"5": {}}}',
        b'{"chat_template": 5}',
        b'{"chat_template": [5]}',
        b'{"chat_template": [{"name": "x"}]}',
        b'{"chat_template": [{"name": "x", "template": 5}]}',
    ],
    ids=lambda content: content[:40].decode("latin-1"),
)
def test_corrupt_tokenizer_config(tmp_path: Path, content: bytes) -> None:
    folder = variant(tmp_path, "byte_level")
    (folder / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(CorruptCheckpoint, match=r"tokenizer_config\.json"):
        Tokenizer.from_folder(folder)


def test_tokenizer_config_is_optional(tmp_path: Path) -> None:
    folder = variant(tmp_path, "byte_level")
    (folder / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.eos_token_id is None
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<|end|>"}')
    assert Tokenizer.from_folder(folder).eos_token_id == tokenizer.token_id("<|end|>")


def test_eos_token_ids(tmp_path: Path) -> None:
    assert read_eos_token_ids(tmp_path, None) == frozenset()
    assert read_eos_token_ids(tmp_path, 7) == {7}
    (tmp_path / "config.json").write_text('{"eos_token_id": 3}')
    assert read_eos_token_ids(tmp_path, 7) == {3, 7}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [4, 5]}')
    assert read_eos_token_ids(tmp_path, 7, vocab_size=8) == {4, 5, 7}
    with pytest.raises(CorruptCheckpoint, match="eos_token_id 5 is outside vocab_size 5"):
        read_eos_token_ids(tmp_path, 4, vocab_size=5)
    for wrong in ("true", '"x"', "[1.5]", "-1"):
        (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {wrong}}}')
        with pytest.raises(CorruptCheckpoint, match="eos_token_id"):
            read_eos_token_ids(tmp_path, None)


def test_chat_template_files(tmp_path: Path) -> None:
    folder = variant(tmp_path, "byte_level", chat_template="in the config")
    assert Tokenizer.from_folder(folder).chat_templates == {"default": "in the config"}
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    (folder / "chat_template.jinja").write_text("in a file")
    assert Tokenizer.from_folder(folder).chat_templates == {"default": "in a file", "tool_use": "tools"}
    named = [{"name": "default", "template": "a"}, {"name": "rag", "template": "b"}]
    (tmp_path / "list").mkdir()
    listed = variant(tmp_path / "list", "byte_level", chat_template=named)
    assert Tokenizer.from_folder(listed).chat_templates == {"default": "a", "rag": "b"}


def test_a_whole_vocabulary_is_read_as_token_by_token() -> None:
    """With added tokens whose characters stand for no byte, and one with a line break."""
    text = ByteLevelText()
    tokens = ["Ġdef", "", "<tool call>", "Ċ", "日", "é", "\U0001f44d<", "", "a"]
    assert text.all_bytes(tokens) == [text.token_bytes(token) for token in tokens]
    assert text.all_bytes([*tokens, "two\nlines"]) == [text.token_bytes(token) for token in [*tokens, "two\nlines"]]
    assert text.all_bytes([]) == []
    for kind in ("byte_level", "byte_fallback"):
        tokenizer = text_fakes.tokenizer(kind)
        middle, first = tokenizer.all_token_bytes(tokenizer.max_token_id + 3)
        ids = range(tokenizer.max_token_id + 3)
        assert middle == [tokenizer.token_bytes(i) for i in ids]
        assert first == [tokenizer.first_token_bytes(i) for i in ids]
        assert tokenizer.all_token_bytes(2) == (middle[:2], first[:2])
