"""Long texts that are encoded window by window have the ids of the whole text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder

import twostroke
from tiers import examples
from twostroke.model.model_files import find_model
from twostroke.tokenizer import tokenizer as tokenizer_module
from twostroke.tokenizer import windows
from twostroke.tokenizer.settings import TokenizerSettings
from twostroke.tokenizer.token_text import make_token_text
from twostroke.tokenizer.tokenizer import Tokenizer
from twostroke.tokenizer.windows import WindowEncoder

PATTERNS = {
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "llama3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+",
}
"""As those models' own."""
LEARNT = [path.read_text() for path in sorted(Path(twostroke.__file__).parent.glob("*.py"))] + [
    "7" * 40,
    "ab" * 40,
    "a" * 64,
    " " * 64,
    "''" * 20,
    "\n" * 16,
    "ééé" * 9,
    "日本語" * 9,
    "123123" * 9,
]
RUNS = st.tuples(
    st.sampled_from(
        [
            "7",
            "12",
            "a",
            "ab",
            " ",
            "  \n",
            "\n",
            "'",
            "'s",
            "é",
            "日",
            "🙂",
            "<|end|>",
            "<|en",
            "def f(x):\n    ",
            "= ",
        ]
    ),
    st.integers(1, 400),
).map(lambda run: run[0] * run[1])
TEXTS = st.lists(RUNS | st.text(max_size=40), min_size=1, max_size=12).map("".join)


def trained(pattern: str, *, normalizer: Any = None) -> RawTokenizer:
    raw = RawTokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    raw.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    raw.decoder = ByteLevelDecoder()
    if normalizer is not None:
        raw.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(LEARNT, trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet))
    raw.add_special_tokens(["<|end|>"])
    return raw


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, RawTokenizer]:
    found = {name: trained(pattern) for name, pattern in PATTERNS.items()}
    found["qwen2 composed"] = trained(PATTERNS["qwen2"], normalizer=normalizers.NFC())
    found["embedded"] = RawTokenizer.from_str(find_model("embedded", with_weights=False).tokenizer()._raw.to_str())
    one_word = trained(PATTERNS["gpt2"])
    one_word.pre_tokenizer = pre_tokenizers.ByteLevel(False, use_regex=False)
    found["one word"] = one_word
    return found


NAMES = [*PATTERNS, "qwen2 composed", "embedded", "one word"]


@pytest.fixture(autouse=True, scope="module")
def small_windows() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(windows, "WINDOW_CHARS", 400)
        patch.setattr(windows, "_MARGIN_BYTES", 40)
        patch.setattr(windows, "_OVERLAP_BYTES", 120)
        yield


def encoder_of(raw: RawTokenizer) -> WindowEncoder:
    return WindowEncoder(raw, make_token_text(raw))


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=examples(60))
@given(text=TEXTS)
def test_the_ids_are_those_of_the_whole_text(tokenizers: dict[str, RawTokenizer], name: str, text: str) -> None:
    raw = tokenizers[name]
    found = encoder_of(raw).encode(text)
    assert found is None or found.tolist() == raw.encode(text, add_special_tokens=False).ids


HOSTILE = {
    "digits": "7" * 3000,
    "letters": "a" * 3000,
    "two letters": "ab" * 2000,
    "spaces": "x" + " " * 3000 + "y",
    "lines": "\n" * 3000,
    "quotes": "'" * 2999 + "s",
    "characters of three bytes": "日" * 3000,
    "characters of four bytes": "🙂" * 1500,
    "words": "the quick brown fox " * 300,
    "code": "def f(x):\n    return x + 12345\n\n\n" * 100,
    "special tokens": "<|end|>" * 500,
    "numbers": " 1234567890123" * 300,
}


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("name", NAMES)
def test_hostile_texts_need_no_more_than_a_window(
    tokenizers: dict[str, RawTokenizer], name: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = tokenizers[name]
    encoder = encoder_of(raw)
    found = encoder.encode(HOSTILE[text])
    assert found is not None
    assert found.tolist() == raw.encode(HOSTILE[text], add_special_tokens=False).ids


@pytest.mark.parametrize(
    "pattern", [r"(?<=a)b|.", r"\bfoo\b|.", r"^a|.", r"a$|."], ids=["look-behind", "boundary", "begin", "end"]
)
def test_a_pattern_that_looks_back_is_left_to_the_library(pattern: str) -> None:
    assert encoder_of(trained(pattern)).encode("ab" * 1000) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: setattr(raw, "normalizer", normalizers.Lowercase()),
        lambda raw: setattr(raw, "pre_tokenizer", pre_tokenizers.Whitespace()),
        lambda raw: setattr(raw, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
        lambda raw: setattr(raw, "decoder", None),
    ],
)
def test_tokenizers_that_change_the_text_are_left_to_the_library(change: Any) -> None:
    raw = trained(PATTERNS["gpt2"])
    change(raw)
    assert encoder_of(raw).encode("Some words. " * 200) is None


def test_a_long_text_has_its_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_module, "WINDOWED_CHARS", 1000)
    raw = trained(PATTERNS["llama3"])
    raw.add_special_tokens(["<s>"])
    begin = ("<s>", raw.token_to_id("<s>"))
    end = ("<|end|>", raw.token_to_id("<|end|>"))
    raw.post_processor = processors.TemplateProcessing("<s> $A <|end|>", special_tokens=[begin, end])
    tokenizer = Tokenizer(raw, TokenizerSettings())
    text = "Some words, 12345 times.\n" * 100
    for frames in (True, False):
        found = tokenizer.encode_compact(text, add_special_tokens=frames)
        assert not isinstance(found, list)
        assert list(found) == tokenizer.encode(text, add_special_tokens=frames)
    for skips in (True, False):
        ids = [begin[1], *tokenizer.encode(text), 10**6]
        assert tokenizer._decode_by_slices(ids, skips) == raw.decode(ids, skip_special_tokens=skips)


def test_bytes_that_are_no_text_are_decoded_alike() -> None:
    tokenizer = find_model("embedded", with_weights=False).tokenizer()
    ids = [(i * 7919) % tokenizer.vocab_size for i in range(20_000)]
    assert tokenizer._decode_by_slices(ids, False) == tokenizer.decode(ids, skip_special_tokens=False)
