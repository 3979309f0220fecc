"""Real tokenizers of every kind, small, made in the test session; and the folder of a big one if it is there."""
# ruff: noqa: RUF001  (look-alikes of many scripts are the point)

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as RawTokenizer

from twostroke.tokenizer.tokenizer import Tokenizer

REPOSITORY = Path(__file__).resolve().parent.parent
KINDS = ("byte_level", "byte_fallback", "metaspace", "wordpiece", "opaque")

UNICODE_LINES = [
    "Grüße aus Köln, naïve café, cafe\u0301, ﬁancé, ﷺ, ⅷ, ™",
    "Привет, мир! Съешь же ещё этих мягких французских булок.",
    "你好，世界。今天天气怎么样？ 我想要一杯咖啡。",
    "こんにちは世界。カタカナ ｶﾀｶﾅ ひらがな",
    "안녕하세요 세계 각",
    "नमस्ते दुनिया क्षत्रिय",
    "مرحبا بالعالم ١٢٣",
    "שלום עולם",
    "👩‍👩‍👧‍👦 🇩🇪🇫🇷 👍🏽 ❤️ 🏴󠁧󠁢󠁥󠁮󠁧󠁿",
    "\x00\x01\x02\x1b[0m\x7f\x80\x9f\ufeff\ufffd\uffff",
    "tabs\t\tand   runs    of     spaces   \r\n\r\n  end",
    "   leading, trailing   ",
    "\u00a0\u2003\u200b\u3000|",
    "0123456789 3.14159 1e-9 0xFF 1,000,000",
    "don't I'LL we've 'tis it's",
    "unbelievable antidisestablishmentarianism",
    "<|im_start|>user\n[INST] <s> </s> <|endoftext|> <unk>",
    "𝕳𝖊𝖑𝖑𝖔 𐍈 𓀀",
    "",
]


@functools.cache
def corpus() -> tuple[str, ...]:
    """Lines of code and prose: standard library sources and lines in many scripts."""
    library = Path(functools.__file__).parent
    lines: list[str] = []
    for name in ("argparse.py", "textwrap.py", "this.py", "difflib.py", "json/decoder.py"):
        lines += (library / name).read_text(encoding="utf-8").splitlines(keepends=True)
    return (*lines[:3000], *UNICODE_LINES)


def real_tokenizer_folder() -> Path:
    """A folder with a vocabulary of 151,936; the test is skipped where there is none."""
    given = os.environ.get("TWOSTROKE_TEST_TOKENIZER")  # noqa: TID251  (tests may be told where data is)
    path = Path(given) if given else REPOSITORY.parent / "shared" / "data" / "tokenizers" / "qwen2"
    if not (path / "tokenizer.json").is_file():
        pytest.skip(f"no tokenizer in {path}; name a folder in TWOSTROKE_TEST_TOKENIZER")
    return path


@functools.cache
def real_tokenizer() -> Tokenizer:
    """The big one, loaded once."""
    return Tokenizer.from_folder(real_tokenizer_folder())


@functools.cache
def folder(kind: str) -> Path:
    """The folder of a small tokenizer of one kind."""
    path = Path(_scratch().name) / kind
    path.mkdir()
    raw, config = _MAKERS[kind]()
    raw.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


@functools.cache
def tokenizer(kind: str) -> Tokenizer:
    """A small tokenizer of one kind."""
    return Tokenizer.from_folder(folder(kind))


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="twostroke-tokenizers-")


def _byte_level() -> tuple[RawTokenizer, dict[str, object]]:
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        special_tokens=["<|begin|>", "<|end|>", "<|im_start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(corpus(), trainer)
    # Texts that the byte alphabet cannot write, and one that it writes as another byte than its own.
    raw.add_tokens([AddedToken("<tool call>", normalized=False), AddedToken("日本", normalized=False), "café"])
    raw.add_special_tokens([AddedToken("<|two words|>", special=True, rstrip=True)])
    raw.post_processor = processors.ByteLevel(trim_offsets=False)
    return raw, {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin|>", "eos_token": "<|end|>"}


def _byte_fallback() -> tuple[RawTokenizer, dict[str, object]]:
    trained = RawTokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(
        corpus()[:1500], trainers.BpeTrainer(vocab_size=600, limit_alphabet=80, show_progress=False)
    )
    model = json.loads(trained.to_str())["model"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {name: i for i, name in enumerate(names)}
    for token in sorted(model["vocab"], key=model["vocab"].get):
        vocab.setdefault(token, len(vocab))
    merges = [tuple(pair) for pair in model["merges"]]
    raw = RawTokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    raw.add_special_tokens(["<unk>", "<s>", "</s>"])
    raw.add_tokens(["<tool call>"])
    raw.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    config: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"}
    return raw, config | {"eos_token": {"content": "</s>", "__type": "AddedToken", "special": True}}


def _metaspace() -> tuple[RawTokenizer, dict[str, object]]:
    raw = RawTokenizer(models.Unigram())
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Metaspace()
    raw.train_from_iterator(
        corpus()[:1500],
        trainers.UnigramTrainer(
            vocab_size=400, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
        ),
    )
    return raw, {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "unk_token": "<unk>"}


def _wordpiece() -> tuple[RawTokenizer, dict[str, object]]:
    raw = RawTokenizer(models.WordPiece(unk_token="[UNK]"))
    raw.normalizer = normalizers.BertNormalizer()
    raw.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    raw.decoder = decoders.WordPiece()
    raw.train_from_iterator(
        corpus()[:1500],
        trainers.WordPieceTrainer(vocab_size=800, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False),
    )
    return raw, {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]", "sep_token": "[SEP]"}


def _opaque() -> tuple[RawTokenizer, dict[str, object]]:
    """A decoder in which the last token looks different from the others."""
    raw = RawTokenizer(models.BPE(end_of_word_suffix="</w>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.decoder = decoders.BPEDecoder()
    raw.train_from_iterator(
        corpus()[:800],
        trainers.BpeTrainer(vocab_size=500, end_of_word_suffix="</w>", special_tokens=["</s>"], show_progress=False),
    )
    return raw, {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}


_MAKERS = {
    "byte_level": _byte_level,
    "byte_fallback": _byte_fallback,
    "metaspace": _metaspace,
    "wordpiece": _wordpiece,
    "opaque": _opaque,
}


def chunked(items: list[int], sizes: Iterator[int]) -> Iterator[list[int]]:
    """Cut a list into pieces of the given sizes."""
    start = 0
    while start < len(items):
        size = max(1, next(sizes))
        yield items[start : start + size]
        start += size
