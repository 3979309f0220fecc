"""The article's worked example: one sentence, nine ids of GPT-4o's vocabulary, by our tokenizer's own path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fixtures.o200k.ranks as o200k
from fixtures.o200k.make import SENTENCE, TARGET, TOKEN_IDS, WORDS, read_ranks
from twostroke.tokenizer.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def part() -> dict[str, Any]:
    """Return the committed ranks: single bytes, and every token that is a substring of the sentence."""
    return json.loads(TARGET.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def ranks(part: dict[str, Any]) -> dict[bytes, int]:
    return {bytes.fromhex(token): rank for token, rank in part["ranks"].items()}


@pytest.fixture(scope="module")
def tokenizer(part: dict[str, Any], ranks: dict[bytes, int], tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = o200k.write_tokenizer(tmp_path_factory.mktemp("o200k"), part["pattern"], ranks)
    return Tokenizer.from_folder(folder)


def test_the_sentence_has_the_articles_nine_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode(SENTENCE) == [33, 13969, 4123, 17203, 2602, 451, 19641, 91643, 13] == TOKEN_IDS
    assert tokenizer.decode(TOKEN_IDS) == SENTENCE


def test_the_pieces_are_the_articles(tokenizer: Tokenizer) -> None:
    pieces = [tokenizer.decoded_token(token_id) for token_id in TOKEN_IDS]
    assert pieces == ["B", "ento", "ML", " supports", " custom", " L", "LM", " inference", "."]


def test_ranks_alone_give_the_same_ids(ranks: dict[bytes, int]) -> None:
    """The slow rule needs no list of merges: join the two neighbours of the lowest rank."""
    assert [ranks[token] for word in WORDS for token in o200k.merge(word, ranks)] == TOKEN_IDS


def test_every_substring_that_is_a_token_takes_part(part: dict[str, Any], ranks: dict[bytes, int]) -> None:
    """The part needs every such token: without the longer ones the ids differ."""
    assert part["num_ranks"] == 199_998
    assert len([token for token in ranks if len(token) == 1]) == 256
    shorter = {token: rank for token, rank in ranks.items() if len(token) < 4}
    assert [shorter[token] for word in WORDS for token in o200k.merge(word, shorter)] != TOKEN_IDS


def test_a_ranks_module_is_read(tmp_path: Path) -> None:
    path = tmp_path / "ranks.js"
    path.write_text('export default {"pat_str":"\\\\S+","special_tokens":{},"bpe_ranks":"! 0 YQ== Yg==\\n! 7 YWI="};')
    assert read_ranks(path) == ("\\S+", {b"a": 0, b"b": 1, b"ab": 7})


def test_ranks_that_no_merges_make_are_refused() -> None:
    with pytest.raises(ValueError, match="made of 3 parts"):
        o200k.merges_of({b"a": 0, b"b": 1, b"c": 2, b"abc": 3})
