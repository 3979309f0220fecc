"""Texts are cut into words as llama.cpp cuts them, by each name that GGUF files give the ways."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, pre_tokenizers

from fixtures.gguf_words.vocabularies import whole_text
from twostroke.gguf.metadata import Metadata
from twostroke.tokenizer.gguf_tokenizer import tokenizer_from_gguf
from twostroke.tokenizer.word_rules import WORD_RULES

RECORDED: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "fixtures" / "gguf_words" / "recordings.json").read_text(encoding="utf-8")
)
"""What llama.cpp made of them; see make.py there."""
WORDS = {name: recording["words"] for recording in RECORDED["recordings"] for name in recording["names"]}


def cut(pre: str, text: str) -> list[str]:
    """Return the words, in GPT-2's byte letters."""
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in WORD_RULES[pre].patterns]
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return [word for word, _ in pre_tokenizers.Sequence([*cuts, as_bytes]).pre_tokenize_str(text)]


def test_every_name_is_recorded() -> None:
    assert set(WORDS) == set(WORD_RULES)


BY_CASE = {"youtu", "tiny_aya", "cohere2moe"}
"""Their rules tell capital letters from small ones, which llama.cpp's expressions cannot. These words are cut as the
rule says, which is what the models were trained with."""


@pytest.mark.parametrize("pre", WORDS)
def test_words_are_llama_cpps(pre: str) -> None:
    for text, words in zip(RECORDED["texts"], WORDS[pre], strict=True):
        if pre in BY_CASE and text.startswith("camelCase"):
            assert (cut(pre, text)[:2], words[:1]) == (["camel", "Case"], ["camelCaseWORDSAndMore"])
        else:
            assert cut(pre, text) == words


@pytest.mark.parametrize("text", RECORDED["texts"])
def test_gemma_4s_tokens_are_llama_cpps(text: str) -> None:
    """Text with marked spaces, merged in order, and bytes for letters that are no tokens."""
    tokens, merges, types = whole_text(text)
    values = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
    }
    tokenizer = tokenizer_from_gguf(Metadata("x.gguf", values))
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert [tokens[token_id] for token_id in token_ids] == RECORDED["gemma4"][RECORDED["texts"].index(text)]
    assert tokenizer.decode(token_ids) == text


def test_a_character_of_gemma_4_without_tokens_for_its_bytes_is_the_unknown_token() -> None:
    values = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "a", "b"],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.token_type": [2, 3, 1, 1],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    tokenizer = tokenizer_from_gguf(Metadata("x.gguf", values))
    assert list(tokenizer.encode("a\U0001f9ffb", add_special_tokens=False)) == [2, 0, 3]
