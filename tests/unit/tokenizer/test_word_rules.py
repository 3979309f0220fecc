"""Texts are cut into words as llama.cpp cuts them, by each name that GGUF files give the ways."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, pre_tokenizers

from twostroke.tokenizer.word_rules import WORD_RULES

RECORDED: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "fixtures" / "gguf_words" / "recordings.json").read_text(encoding="utf-8")
)
"""What llama.cpp made of them; see make.py there."""
WORDS = {name: recording["words"] for recording in RECORDED["recordings"] for name in recording["names"]}


def cut(pre: str, text: str) -> list[str]:
    """The words, spelt in GPT-2's letters."""
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in WORD_RULES[pre].patterns]
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return [word for word, _ in pre_tokenizers.Sequence([*cuts, as_bytes]).pre_tokenize_str(text)]


def test_every_name_is_recorded() -> None:
    assert set(WORDS) == set(WORD_RULES)


@pytest.mark.parametrize("pre", WORDS)
def test_words_are_llama_cpps(pre: str) -> None:
    assert [cut(pre, text) for text in RECORDED["texts"]] == WORDS[pre]
