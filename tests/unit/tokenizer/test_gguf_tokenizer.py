"""Tokenizers from GGUF files: llama.cpp's own tokens, and what is refused."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from fixtures.gguf.vocabularies import VOCABULARIES, byte_alphabet
from gguf_files import FIXTURES, changed, fixture
from oracle import naive_sentencepiece
from twostroke.errors import CorruptCheckpoint, SetupError, UnsupportedModel
from twostroke.gguf.container import GGUFFile
from twostroke.gguf.metadata import Metadata
from twostroke.tokenizer.gguf_tokenizer import (
    read_gguf_eos_token_ids,
    read_gguf_sampling_defaults,
    tokenizer_from_gguf,
)
from twostroke.tokenizer.tokenizer import IncrementalDetokenizer, Tokenizer
from twostroke.tokenizer.word_rules import WORD_RULES

RECORDED: dict[str, list[dict[str, Any]]] = json.loads((FIXTURES / "tokenizations.json").read_text())["tokenizations"]
SPACE = "\u2581"


def metadata_of(path: Path) -> Metadata:
    return GGUFFile(path).metadata


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Tokenizer]:
    return {family: tokenizer_from_gguf(metadata_of(fixture(f"{family}-f32"))) for family in RECORDED}


@pytest.mark.parametrize("family", RECORDED)
def test_tokens_are_those_of_llama_cpp(family: str, tokenizers: dict[str, Tokenizer]) -> None:
    for entry in RECORDED[family]:
        assert tokenizers[family].encode(entry["text"]) == entry["token_ids"], entry["text"]


@pytest.mark.parametrize("family", RECORDED)
def test_text_comes_back(family: str, tokenizers: dict[str, Tokenizer]) -> None:
    """At once and in pieces; SentencePiece's space in front is taken off again."""
    tokenizer = tokenizers[family]
    for entry in RECORDED[family]:
        decoded = bytes.fromhex(entry["decoded"]).decode()
        expected = decoded.removeprefix(" ") if family == "llama" else decoded
        assert tokenizer.decode(entry["plain_token_ids"]) == expected
        stream = IncrementalDetokenizer(tokenizer)
        assert "".join(stream.push([i]) for i in entry["plain_token_ids"]) + stream.finish() == expected


@given(text=st.text(st.sampled_from(" abcdefhilnortuéü日本.!1230=\n\t😀"), max_size=40))
@example(text="bcabc" * 5)
@example(text="    " * 9 + "a")
def test_sentencepiece_joins_the_best_neighbours_first(tokenizers: dict[str, Tokenizer], text: str) -> None:
    vocabulary = VOCABULARIES["llama"]
    assert vocabulary.scores is not None
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    scores = dict(zip(vocabulary.tokens, vocabulary.scores, strict=True))
    found = tokenizers["llama"].encode(text, add_special_tokens=False)
    marked = (" " + text).replace(" ", SPACE) if text else ""
    assert found == naive_sentencepiece.tokenize(marked, scores, ids)


@pytest.mark.parametrize("run", ["aaaaaaa", "aaaaaaaaaaab", "baaaab", "aabaaabaaaab"])
def test_runs_of_one_character_are_joined_from_the_left(run: str, tmp_path: Path) -> None:
    """Several ways may lead to one token, with pieces of 2, 3 and 5 that overlap in every way."""
    check_joins(run, {"aa": 5.0, "aaa": 4.0, "aaaaa": 3.0, "ab": 6.0, "ba": 5.5}, tmp_path)


@pytest.mark.parametrize("length", [3, 5, 8, 11, 23])
def test_runs_of_spaces_with_one_score_are_joined_as_in_llama(length: int, tmp_path: Path) -> None:
    check_joins(SPACE * length, {SPACE * n: -1e9 for n in (2, 4, 8, 5, 3)}, tmp_path)


def check_joins(run: str, of_pieces: dict[str, float], tmp_path: Path) -> None:
    """Compare our tokens with the naive ones, in the fixture's vocabulary with some other pieces."""
    vocabulary = VOCABULARIES["llama"]
    assert vocabulary.scores is not None
    tokens, scores = list(vocabulary.tokens), list(vocabulary.scores)
    first = tokens.index("[PAD383]") - len(of_pieces)
    for i, (token, score) in enumerate(of_pieces.items()):
        if token in tokens:
            scores[tokens.index(token)] = score
        else:
            tokens[first + i], scores[first + i] = token, score
    values = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.add_space_prefix": False,
    }
    tokenizer = tokenizer_from_gguf(metadata_of(changed("llama-f32", tmp_path / "x.gguf", values)))
    ids = {token: i for i, token in enumerate(tokens)}
    expected = naive_sentencepiece.tokenize(run, dict(zip(tokens, scores, strict=True)), ids)
    assert tokenizer.encode(run, add_special_tokens=False) == expected
    assert tokenizer.decode(expected) == run.replace(SPACE, " ")


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("qwen2", "I'LL pay 1234!\n\n  ok", ["I", "'LL", " pay", " ", "1", "2", "3", "4", "!\n\n", " ", " ok"]),
        ("llama-bpe", "I'LL pay 1234!\n\n  ok", ["I", "'LL", " pay", " ", "123", "4", "!\n\n", " ", " ok"]),
        ("gpt-2", "I'LL pay 1234!\n\n  ok", ["I", "'", "LL", " pay", " 1234", "!", "\n\n ", " ok"]),
        ("smollm", "pay 1234", ["pay", " ", "1", "2", "3", "4"]),
        ("default", "a+=b 12345", ["a", "+=", "b", " ", "123", "45"]),
        ("tekken", "camelCase 12/\n", ["camel", "Case", " ", "1", "2", "/\n"]),
    ],
)
def test_words_are_cut_as_the_file_says(pre: str, text: str, words: list[str], tmp_path: Path) -> None:
    """A vocabulary in which any two bytes join, so that every word is as few tokens as its bytes allow."""
    alphabet = byte_alphabet()
    letters = [alphabet[byte] for byte in sorted(set(text.encode()))]
    pieces = list(dict.fromkeys("".join(alphabet[byte] for byte in word.encode()) for word in words))
    prefixes = dict.fromkeys(piece[:end] for piece in all_pieces(text, alphabet) for end in range(2, len(piece) + 1))
    tokens = [*letters, *(prefix for prefix in prefixes if prefix not in letters)]
    values = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [f"{prefix[:-1]} {prefix[-1]}" for prefix in prefixes],
        "tokenizer.ggml.token_type": [1] * len(tokens),
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
    }
    tokenizer = tokenizer_from_gguf(metadata_of(changed("qwen3-f32", tmp_path / "x.gguf", values)))
    assert set(pieces) <= set(tokens)
    found = tokenizer.tokens(tokenizer.encode(text, add_special_tokens=False))
    assert found == ["".join(alphabet[byte] for byte in word.encode()) for word in words]


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("deepseek-llm", "Größe 1234,日本\n", ["Gr", "öß", "e", " ", "1234", ",", "日本", "\n"]),  # : to ~ has letters
        ("deepseek-coder", "a-b 12", ["a", "-", "b", " ", "1", "2"]),
        ("deepseek-v3", "日本x .foo 1234 ++\n", ["日本", "x", " .", "foo", " ", "123", "4", " ++\n"]),
        ("falcon", "a`b 12345", ["a", "`", "b", " ", "123", "45"]),
        ("command-r", "it's 42", ["it", "'s", " ", "4", "2"]),
        ("dbrx", "I'LL 1234", ["I", "'LL", " ", "123", "4"]),
        ("jais-2", "a     b", ["a", "    ", " b"]),
        ("minicpm5", "x 1234", ["x", " ", "123", "4"]),
        ("qwen35", "e\u0301a 12", ["e\u0301a", " ", "1", "2"]),
        ("laguna", "a \n b", ["a", " ", "\n", " b"]),
        ("youtu", "aB日か한\uff0c1", ["a", "B", "日か", "한", "\uff0c", "1"]),
        ("poro-chat", "ab, cd", ["ab", ",", " cd"]),
        ("viking", "a1b2", ["a", "1", "b", "2"]),
        ("chameleon", "IMGIMGABZ  a.1", ["IMGIMGABZ", "  ", "a", ".", "1"]),
        ("gpt-4o", "camelCase's 1234/\n", ["camel", "Case's", " ", "123", "4", "/\n"]),
        ("tiny_aya", "12345 ÄbÄ", ["12", "345", " Äb", "Ä"]),
        ("bailingmoe", "a\n\n bé'D", ["a", "\n\n", " bé", "'D"]),
        ("seed-coder", "a!\n1", ["a", "!", "\n", "1"]),
        ("exaone-moe", "ab cd 1", ["ab cd", " ", "1"]),
    ],
)
def test_words_of_each_rule(pre: str, text: str, words: list[str]) -> None:
    assert cutter(*WORD_RULES[pre].patterns)(text) == words


def test_gpt_4o_cuts_english_as_its_own_expression_does() -> None:
    """o200k's, which tells capital letters of all scripts; llama.cpp's rule those of ASCII."""
    their_pattern = json.loads((FIXTURES.parent / "o200k" / "part.json").read_text())["pattern"]
    theirs = cutter(their_pattern)
    ours = cutter(*WORD_RULES["gpt-4o"].patterns)
    rng = random.Random(5)
    for _ in range(500):
        text = "".join(rng.choices("aBcD'sT1234 /!?\n\t", k=24))
        assert ours(text) == theirs(text), text


def cutter(*patterns: str) -> Callable[[str], list[str]]:
    cuts = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns])

    def cut(text: str) -> list[str]:
        return [word for word, _ in cuts.pre_tokenize_str(text)]

    return cut


@pytest.mark.parametrize("name", WORD_RULES)
def test_no_rule_loses_a_character(name: str) -> None:
    cut, rng = cutter(*WORD_RULES[name].patterns), random.Random(7)
    for _ in range(50):
        text = "".join(rng.choices("aZ'sé1\u0663\uff12 \u3000\n\r\t.,!`$日かㄅ한😀e\u0301", k=30))
        assert "".join(cut(text)) == text


def test_phi_3_swallows_white_space_behind_special_tokens(tmp_path: Path) -> None:
    """llama.cpp does so by the model's name, for all but three of them."""
    for name in ("Phi-3 mini", "Other"):
        path = changed("llama-f32", tmp_path / "x.gguf", {"general.name": name})
        tokenizer = tokenizer_from_gguf(metadata_of(path))
        swallows = len(tokenizer.encode("</s>  the", add_special_tokens=False)) < len(
            tokenizer.encode("<s>  the", add_special_tokens=False)
        )
        assert swallows == (name == "Phi-3 mini"), name


def test_a_character_without_tokens_for_its_bytes_is_the_unknown_token(tmp_path: Path) -> None:
    tokens = [f"[GONE{i}]" if text.startswith("<0x") else text for i, text in enumerate(VOCABULARIES["llama"].tokens)]
    path = changed("llama-f32", tmp_path / "x.gguf", {"tokenizer.ggml.tokens": tokens})
    tokenizer = tokenizer_from_gguf(metadata_of(path))
    assert "<unk>" in tokenizer.tokens(tokenizer.encode("the \U0001f9ff the", add_special_tokens=False))


def all_pieces(text: str, alphabet: dict[int, str]) -> list[str]:
    """Return every suffix; their prefixes are all substrings, so every cut is one token."""
    written = "".join(alphabet[byte] for byte in text.encode())
    return [written[begin:] for begin in range(len(written))]


def test_a_frame_is_what_the_file_asks_for(tmp_path: Path) -> None:
    key = "tokenizer.ggml.add_{}_token"
    for name, values, frame in [
        ("llama-f32", {}, ["<s>"]),
        ("llama-f32", {key.format("bos"): None}, ["<s>"]),
        ("llama-f32", {key.format("bos"): False, key.format("eos"): True}, ["</s>"]),
        ("llama3-f32", {key.format("bos"): None}, ["<|endoftext|>"]),
        ("qwen3-f32", {key.format("bos"): None}, []),
        ("qwen3-f32", {key.format("eos"): True}, ["<|im_end|>"]),
    ]:
        tokenizer = tokenizer_from_gguf(metadata_of(changed(name, tmp_path / "x.gguf", values)))
        assert tokenizer.tokens(tokenizer.encode("")) == frame, (name, values)


def test_special_tokens_steer_and_user_defined_ones_are_text(tokenizers: dict[str, Tokenizer]) -> None:
    qwen3, llama = tokenizers["qwen3"], tokenizers["llama"]
    assert {qwen3.token(i) for i in qwen3.special_token_ids} == {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}
    assert qwen3.decode(qwen3.encode("<think>the<|im_end|>")) == "<think>the"
    assert {llama.token(i) for i in llama.special_token_ids} == {"<unk>", "<s>", "</s>"}
    assert qwen3.named_tokens == {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    assert llama.named_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert "<|im_start|>" in qwen3.chat_templates["default"]


def test_generation_ends_where_llama_cpp_ends_it(tmp_path: Path) -> None:
    """At what the file names, and at tokens whose text says so."""
    tokens = VOCABULARIES["qwen3"].tokens
    ends = [tokens.index(text) for text in ("<|im_end|>", "<|endoftext|>")]
    assert read_gguf_eos_token_ids(metadata_of(fixture("qwen3-f32")), 384) == set(ends)
    other = metadata_of(changed("qwen3-f32", tmp_path / "x.gguf", {"tokenizer.ggml.eot_token_id": 7}))
    assert read_gguf_eos_token_ids(other, 384) == {*ends, 7}
    with pytest.raises(CorruptCheckpoint, match="outside vocab_size 7"):
        read_gguf_eos_token_ids(other, 7)


@pytest.mark.parametrize(
    ("texts", "ends"),
    [
        (["<turn|>", "<eos>", "<|tool_response>", "</s>"], ["<turn|>", "<eos>", "<|tool_response>"]),
        (["<eos>", "</s>", "<start_of_turn>"], ["<eos>", "</s>"]),
        (["<|end|>", "<|return|>", "<|call|>"], ["<|return|>", "<|call|>"]),
        (["<|end|>", "<|call|>", "<|user|>"], ["<|end|>", "<|call|>"]),
        (
            ["<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|fim_middle|>"],
            ["<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"],
        ),
        (["[EOT]", "[EOS]", "<end_of_utterance>", "<\uff5cend\u2581of\u2581sentence\uff5c>"], None),
    ],
)
def test_ends_are_those_of_llama_cpp(texts: list[str], ends: list[str] | None, tmp_path: Path) -> None:
    """llama.cpp's library gave these results for vocabularies with these texts."""
    tokens = [f"token {i}" for i in range(20)] + texts
    values = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eos_token_id": 5}
    metadata = metadata_of(changed("qwen3-f32", tmp_path / "x.gguf", values))
    expected = {tokens[i] for i in read_gguf_eos_token_ids(metadata, 384)}
    assert expected == {"token 5", *(texts if ends is None else ends)}


def test_end_tokens_are_special_in_a_file_without_types(tmp_path: Path) -> None:
    found = tokenizer_from_gguf(
        metadata_of(changed("qwen3-f32", tmp_path / "x.gguf", {"tokenizer.ggml.token_type": None}))
    )
    end = VOCABULARIES["qwen3"].tokens.index("<|im_end|>")
    assert found.encode("<|im_end|>", add_special_tokens=False) == [end]
    assert end in found.special_token_ids


@pytest.mark.parametrize("equal", [None, [-1000.0]])
def test_pieces_without_scores_are_joined_in_their_order(
    equal: list[float] | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In which trainers make them; converters write one score for all where there was no file with others."""
    tokens = VOCABULARIES["llama"].tokens
    falling, same = [-float(i) for i in range(len(tokens))], equal and equal * len(tokens)
    trained, found = (
        tokenizer_from_gguf(metadata_of(changed("llama-f32", tmp_path / name, {"tokenizer.ggml.scores": scores})))
        for name, scores in (("trained.gguf", falling), ("x.gguf", same))
    )
    for text in ("1234567890", "hello  world the and in", "abcbcabc 12 123"):
        assert found.encode(text) == trained.encode(text)
    assert [record.message for record in caplog.records if "the file does not say which of them" in record.message]


def test_a_file_of_gemma_4_that_wants_no_begin_token_gets_one(tmp_path: Path) -> None:
    values = {"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.add_bos_token": False}
    found = tokenizer_from_gguf(metadata_of(changed("qwen3-f32", tmp_path / "x.gguf", values)))
    assert found.encode("a")[0] == found.bos_token_id


@pytest.mark.parametrize("pre", [None, ""])
def test_a_file_that_names_no_way_to_cut_words_is_told(
    pre: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = changed("qwen3-f32", tmp_path / "x.gguf", {"tokenizer.ggml.pre": pre})
    default = changed("qwen3-f32", tmp_path / "y.gguf", {"tokenizer.ggml.pre": "default"})
    text = "don't x=1 12345 ..."
    assert tokenizer_from_gguf(metadata_of(path)).encode(text) == tokenizer_from_gguf(metadata_of(default)).encode(text)
    told = [record.message for record in caplog.records if "how a text is split into words" in record.message]
    assert len(told) == 1
    assert told[0].startswith("x.gguf")


def test_glm_4_takes_whole_words(tmp_path: Path) -> None:
    """llama.cpp does so: a word that is a token needs no merges."""
    tokens = VOCABULARIES["qwen3"].tokens
    found = tokenizer_from_gguf(metadata_of(changed("qwen3-f32", tmp_path / "x.gguf", {"tokenizer.ggml.pre": "glm4"})))
    whole = "\u0120" + "".join(byte_alphabet()[byte] for byte in "\u00e9".encode())
    assert found.encode(" \u00e9", add_special_tokens=False) == [tokens.index(whole)]


@pytest.mark.parametrize("role", ["eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep"])
def test_ends_that_a_file_names(role: str, tmp_path: Path) -> None:
    values = {f"tokenizer.ggml.{role}_token_id": 7}
    assert 7 in read_gguf_eos_token_ids(metadata_of(changed("qwen3-f32", tmp_path / "x.gguf", values)), 384)


def test_more_templates_and_sampling_values(tmp_path: Path) -> None:
    values = {
        "tokenizer.chat_template.tool_use": "{{ tools }}",
        "general.sampling.temp": 0.5,
        "general.sampling.top_k": 4,
    }
    metadata = metadata_of(changed("qwen3-f32", tmp_path / "x.gguf", values))
    assert tokenizer_from_gguf(metadata).chat_templates["tool_use"] == "{{ tools }}"
    assert read_gguf_sampling_defaults(metadata) == {"temperature": 0.5, "top_k": 4}


@pytest.mark.parametrize(
    ("name", "values", "error", "message"),
    [
        (
            "qwen3",
            {"tokenizer.ggml.pre": "qwen-2"},
            UnsupportedModel,
            r"pre 'qwen-2' is not .*; nearest known: qwen2, ",
        ),
        ("qwen3", {"tokenizer.ggml.pre": "ΩΩΩ"}, UnsupportedModel, r"nearest known: default, gpt-2, .*viking"),
        (
            "llama",
            {"tokenizer.ggml.model": "bert"},
            UnsupportedModel,
            r"model 'bert' \(WordPiece\) is not implemented; known: gpt2, llama",
        ),
        (
            "llama",
            {"tokenizer.ggml.model": "t5"},
            UnsupportedModel,
            r"model 't5' \(unigrams of SentencePiece\) is not implemented; known: gpt2, llama",
        ),
        ("llama", {"tokenizer.ggml.tokens": None}, CorruptCheckpoint, "the metadata has no tokenizer.ggml.tokens"),
        ("llama", {"tokenizer.ggml.scores": [0.5]}, CorruptCheckpoint, "scores has 1 entries for 384 tokens"),
        ("llama", {"tokenizer.ggml.token_type": [1]}, CorruptCheckpoint, "token_type has 1 entries for 384 tokens"),
        ("llama", {"tokenizer.ggml.tokens": ["a", "b", "a"]}, CorruptCheckpoint, "tokens has 'a' twice"),
        (
            "llama",
            {"tokenizer.ggml.bos_token_id": 999},
            CorruptCheckpoint,
            "bos_token_id must be an id of the 384 tokens",
        ),
        ("qwen3", {"tokenizer.ggml.merges": ["ab"]}, CorruptCheckpoint, "merges has 'ab'; it must be two tokens"),
        ("qwen3", {"tokenizer.ggml.merges": ["no such"]}, CorruptCheckpoint, "merges do not fit"),
        (
            "qwen3",
            {"tokenizer.ggml.bos_token_id": None, "tokenizer.ggml.add_bos_token": True},
            CorruptCheckpoint,
            "every text should get a bos_token, but the file names none",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_work_is_refused(
    name: str, values: dict[str, Any], error: type[SetupError], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        tokenizer_from_gguf(metadata_of(changed(f"{name}-f32", tmp_path / "x.gguf", values)))


def test_scores_have_an_order(tmp_path: Path) -> None:
    path = changed("llama-f32", tmp_path / "x.gguf", {"tokenizer.ggml.scores": [float("nan")] * 384})
    with pytest.raises(CorruptCheckpoint, match="scores has a score that is not a number"):
        tokenizer_from_gguf(metadata_of(path))


def test_tokens_of_characters_that_are_none_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokens = ["Ж日" if token == "abc" else token for token in VOCABULARIES["llama"].tokens]
    path = changed("llama-f32", tmp_path / "x.gguf", {"tokenizer.ggml.tokens": tokens})
    with caplog.at_level(logging.WARNING):
        tokenizer_from_gguf(metadata_of(path))
    assert "1 tokens, such as 'Ж日'" in caplog.text
