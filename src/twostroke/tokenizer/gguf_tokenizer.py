"""The tokenizer stored in a GGUF file, built to give llama.cpp's tokens.

Three kinds of vocabulary (`tokenizer.ggml.model`), read as in llama.cpp (its src/llama-vocab.cpp):

    gpt2    byte-level BPE: merges in order; `tokenizer.ggml.pre` names the rule that first splits a text into words
    llama   SentencePiece: of all neighbours that form a token, those with the highest score are merged first
    gemma4  SentencePiece vocabulary with BPE merges

No normalizer runs, because llama.cpp has none. Text that is not composed (NFC) is tokenized as it is; transformers
composes it for Qwen.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import IntEnum
from pathlib import Path

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as RawTokenizer

from twostroke.errors import CorruptCheckpoint, UnsupportedModel, shown
from twostroke.gguf.container import GGUFFile
from twostroke.gguf.metadata import Metadata
from twostroke.log import get_logger
from twostroke.tokenizer.settings import TokenizerSettings
from twostroke.tokenizer.tokenizer import Tokenizer
from twostroke.tokenizer.word_rules import WORD_RULES, nearest_names

log = get_logger(__name__)

_TOKENS, _MERGES, _SCORES = "tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.scores"
_TOKEN_TYPES, _PRE = "tokenizer.ggml.token_type", "tokenizer.ggml.pre"
_SPACE = "\u2581"
"""SentencePiece's mark for a space."""
_OTHER_KINDS = {
    "bert": "WordPiece",
    "t5": "unigrams of SentencePiece",
    "rwkv": "the longest token of a tree",
    "plamo2": "PLaMo 2's",
    "none": "no tokenizer",
    "no_vocab": "no tokenizer",
}
"""llama.cpp's other kinds of vocabulary and the algorithms behind them."""
_ALWAYS_WITH_BOS = ("gemma4",)
"""Kinds that put the begin token before every text, whatever a file says: early Gemma 4 files say no."""
_NAMES_OF_PHI3 = ("phi-3", "phi3")
_KEEP_SPACE_AFTER = frozenset(("<unk>", "<s>", "<|endoftext|>"))
"""Special tokens of Phi-3 that keep the white space behind them; its other special tokens strip it."""


class _TokenType(IntEnum):
    """Values of `tokenizer.ggml.token_type` that are used here."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4


_END_TEXTS = frozenset(
    (
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<turn|>", "<|endoftext|>", "</s>", "<|eom_id|>"),
        *("<EOT>", "_<EOT>", "[EOT]", "<|end_of_text|>", "<eos>", "[EOS]", "<end_of_utterance>", "[e~["),
        *("<｜end▁of▁sentence｜>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<|tool_response>"),  # noqa: RUF001
        # for filling in the middle (FIM): padding, the name of a repository, the end of a file
        *("<|fim_pad|>", "<fim_pad>", "<fim-pad>", "<PAD>", "[PAD]"),
        *("<|fim_repo|>", "<|repo_name|>", "<reponame>", "<fim-repo>", "<REPO>", "<|file_sep|>"),
    )
)
"""Tokens at which llama.cpp ends a generation if a vocabulary has them; files name only one or two."""
_NOT_END_BESIDE: Mapping[str, frozenset[str]] = {
    "</s>": frozenset(("<|tool_response>",)),
    "<|end|>": frozenset(("<|return|>", "<|call|>")),
}
"""Tokens of _END_TEXTS that end nothing if a vocabulary has all of some others (Gemma 4, gpt-oss)."""
_ENDING_ROLES = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")


def tokenizer_from_gguf(metadata: Metadata) -> Tokenizer:
    """Build the tokenizer described by a file's metadata.

    Raises:
        UnsupportedModel: a kind of vocabulary, or a rule for splitting words, that is not implemented.
        CorruptCheckpoint: keys that are absent, of the wrong kind, or contradict each other.
    """
    vocabulary = _Vocabulary(metadata)
    kind = metadata.text("tokenizer.ggml.model")
    if kind == "gpt2":
        raw, adds_bos = _byte_level(metadata, vocabulary)
    elif kind == "llama":
        raw, adds_bos = _sentence_piece(metadata, vocabulary), True
    elif kind == "gemma4":
        raw, adds_bos = _marked_space_bpe(metadata, vocabulary), True
    else:
        what = f" ({_OTHER_KINDS[kind]})" if kind in _OTHER_KINDS else ""
        raise UnsupportedModel(
            f"{metadata.file_name}: tokenizer.ggml.model {shown(kind)}{what} is not implemented; known: gpt2, llama, "
            "gemma4. Give the model's tokenizer with --tokenizer FOLDER."
        )
    vocabulary.add_special_tokens(raw)
    named = _named_tokens(metadata, vocabulary)
    _frame(raw, metadata, named, adds_bos=adds_bos, always=kind in _ALWAYS_WITH_BOS)
    templates = {"default": "tokenizer.chat_template"} if "tokenizer.chat_template" in metadata else {}
    others = [key for key in metadata if key.startswith("tokenizer.chat_template.")]
    templates |= {key.removeprefix("tokenizer.chat_template."): key for key in others}
    settings = TokenizerSettings(
        named_tokens=named, chat_templates={name: metadata.text(key) for name, key in templates.items()}
    )
    return Tokenizer(raw, settings)


def read_gguf_eos_token_ids(metadata: Metadata, vocab_size: int) -> frozenset[int]:
    """Return the ids that end a generation: those that the file names, and tokens known by their text, as in llama.cpp.

    Raises:
        CorruptCheckpoint: ids that the model has no logits for.
    """
    texts = metadata.texts(_TOKENS)
    ends = _END_TEXTS.intersection(texts)
    ends -= {text for text, others in _NOT_END_BESIDE.items() if ends >= others}
    found = {token_id for token_id, text in enumerate(texts) if text in ends}
    for role in _ENDING_ROLES:
        key = f"tokenizer.ggml.{role}_token_id"
        if key in metadata:
            found.add(metadata.count(key, least=0))
    outside = [token_id for token_id in found if token_id >= vocab_size]
    if outside:
        raise CorruptCheckpoint(f"{metadata.file_name}: end token {outside[0]} is outside vocab_size {vocab_size}.")
    return frozenset(found)


def read_gguf_sampling_defaults(metadata: Metadata) -> dict[str, float]:
    """Return the sampling values that a file recommends, under our names; they are not applied."""
    names = {
        "temperature": "temp",
        "top_p": "top_p",
        "top_k": "top_k",
        "min_p": "min_p",
        "repetition_penalty": "penalty_repeat",
    }
    given = {name: f"general.sampling.{theirs}" for name, theirs in names.items()}
    return {name: metadata.number(key) for name, key in given.items() if key in metadata}


class _Vocabulary:
    """Tokens by id, with the type of each."""

    def __init__(self, metadata: Metadata) -> None:
        # llama.cpp's name for a token without text
        self.texts = [text or f"[EMPTY_{i}]" for i, text in enumerate(metadata.texts(_TOKENS))]
        self.ids = {text: i for i, text in enumerate(self.texts)}
        name = metadata.text("general.name", "").lower()
        self._is_phi3 = any(part in name for part in _NAMES_OF_PHI3)  # no key says so; llama.cpp looks at the name, too
        has_types = _TOKEN_TYPES in metadata
        self.types: Sequence[int] = (
            metadata.whole_numbers(_TOKEN_TYPES) if has_types else [_TokenType.NORMAL] * len(self.texts)
        )
        if len(self.ids) != len(self.texts):
            twice = next(text for i, text in enumerate(self.texts) if self.ids[text] != i)
            raise CorruptCheckpoint(f"{metadata.file_name}: {_TOKENS} has {shown(twice)} twice.")
        if len(self.types) < len(self.texts):
            raise CorruptCheckpoint(
                f"{metadata.file_name}: {_TOKEN_TYPES} has {len(self.types)} entries for {len(self.texts)} tokens."
            )

    def add_special_tokens(self, raw: RawTokenizer) -> None:
        """Add control tokens as special tokens, and user-defined tokens as tokens that are matched before merging."""
        tokens: list[AddedToken] = []
        for text, kind in zip(self.texts, self.types, strict=False):
            is_special = kind in (_TokenType.CONTROL, _TokenType.UNKNOWN) or text in _END_TEXTS
            if is_special or kind == _TokenType.USER_DEFINED:
                strips = self._is_phi3 and text not in _KEEP_SPACE_AFTER
                tokens.append(AddedToken(text, rstrip=strips, special=is_special, normalized=False))
        raw.add_special_tokens([token for token in tokens if token.special])
        raw.add_tokens([token for token in tokens if not token.special])


def _byte_level(metadata: Metadata, vocabulary: _Vocabulary) -> tuple[RawTokenizer, bool]:
    pre = metadata.text(_PRE, "")
    if not pre:
        pre = "default"
        log.warning(
            "%s: the file does not say how a text is split into words (%s), so llama.cpp's default is used. "
            "Answers are worse if the model was trained otherwise; use a newer file of this model",
            metadata.file_name,
            _PRE,
        )
    if pre not in WORD_RULES:
        raise UnsupportedModel(
            f"{metadata.file_name}: {_PRE} {shown(pre)} is not implemented; nearest known: "
            f"{', '.join(nearest_names(pre))}. Give the model's tokenizer with --tokenizer FOLDER."
        )
    rule = WORD_RULES[pre]
    merges = [_merge(metadata, text) for text in metadata.texts(_MERGES)]
    raw = RawTokenizer(_bpe(metadata, vocabulary, merges, ignore_merges=rule.ignores_merges_for_words))
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rule.patterns]
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.pre_tokenizer = pre_tokenizers.Sequence([*cuts, as_bytes])
    raw.decoder = decoders.ByteLevel()
    return raw, rule.adds_bos


def _merge(metadata: Metadata, text: str) -> tuple[str, str]:
    """Split a merge written as 'a b', where a may begin with a space."""
    left, space, right = text[1:].partition(" ")
    if not space:
        raise CorruptCheckpoint(
            f"{metadata.file_name}: {_MERGES} has {shown(text)}; it must be two tokens separated by a space."
        )
    return text[0] + left, right


def _sentence_piece(metadata: Metadata, vocabulary: _Vocabulary) -> RawTokenizer:
    """Build BPE whose merges are the tokens, best score first, each split in every way into two tokens.

    Of equally good neighbours llama.cpp merges the leftmost, and so does BPE within one merge. Among tokens of equal
    score that are runs of one character (Llama's runs of spaces), the longest comes first, so a run also grows from
    the left. Other tokens of equal score come in the order of their ids, in which most trainers make them. If a file
    has no scores, all tokens come in this order.
    """
    scores = metadata.numbers(_SCORES) if _SCORES in metadata else [0.0] * len(vocabulary.texts)
    if len(scores) < len(vocabulary.texts):
        raise CorruptCheckpoint(
            f"{metadata.file_name}: {_SCORES} has {len(scores)} entries for {len(vocabulary.texts)} tokens."
        )
    if any(math.isnan(score) for score in scores):
        raise CorruptCheckpoint(f"{metadata.file_name}: {_SCORES} has a score that is not a number. Download it again.")
    _warn_of_equal_scores(metadata, vocabulary, scores)
    best_first = sorted(
        vocabulary.texts, key=lambda text: (-scores[vocabulary.ids[text]], -len(text) if _is_run(text) else 0)
    )
    pairs = ((text[:cut], text[cut:]) for text in best_first for cut in range(1, len(text)))
    merges = [(left, right) for left, right in pairs if left in vocabulary.ids and right in vocabulary.ids]
    _warn_of_foreign_characters(metadata, vocabulary)
    model = _bpe(metadata, vocabulary, merges, byte_fallback=True)
    # if some bytes have no token, a character outside the vocabulary becomes the unknown token instead of vanishing
    model.unk_token = _named_tokens(metadata, vocabulary)["unk_token"]
    raw = RawTokenizer(model)
    marks = [normalizers.Replace(" ", _SPACE)]
    strips: list[decoders.Decoder] = []
    if metadata.flag("tokenizer.ggml.add_space_prefix", default=True):
        marks = [normalizers.Prepend(_SPACE), *marks]
        strips = [decoders.Strip(" ", 1, 0)]
    raw.normalizer = normalizers.Sequence(marks)
    raw.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strips])
    return raw


def _marked_space_bpe(metadata: Metadata, vocabulary: _Vocabulary) -> RawTokenizer:
    """Build BPE with ordered merges over text whose spaces are marked; only newlines are split off."""
    merges = [_merge(metadata, text) for text in metadata.texts(_MERGES)]
    model = _bpe(metadata, vocabulary, merges, byte_fallback=True)
    model.unk_token = _named_tokens(metadata, vocabulary).get("unk_token")  # see _sentence_piece
    raw = RawTokenizer(model)
    raw.normalizer = normalizers.Replace(" ", _SPACE)
    raw.pre_tokenizer = pre_tokenizers.Split(Regex("\n+"), "isolated")
    raw.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return raw


def _is_run(text: str) -> bool:
    """Return whether a text consists of one repeated character."""
    return len(set(text)) == 1


def _warn_of_equal_scores(metadata: Metadata, vocabulary: _Vocabulary, scores: Sequence[float]) -> None:
    joined = (
        score
        for text, kind, score in zip(vocabulary.texts, vocabulary.types, scores, strict=False)
        if kind == _TokenType.NORMAL and not _is_run(text)
    )
    num_equal = sum(count for count in Counter(joined).values() if count > 1)
    if num_equal:
        log.warning(
            "%s: %d tokens share a score with another one, so the file does not say which of them are merged first; "
            "the order of the vocabulary decides here, while llama.cpp merges the leftmost",
            metadata.file_name,
            num_equal,
        )


def _warn_of_foreign_characters(metadata: Metadata, vocabulary: _Vocabulary) -> None:
    """Warn of tokens with characters outside the vocabulary, which cannot be reached by merges.

    llama.cpp joins such tokens from characters. SentencePiece never does so in training.
    """
    letters = {text for text in vocabulary.texts if len(text) == 1}
    foreign = [
        text
        for text, kind in zip(vocabulary.texts, vocabulary.types, strict=False)
        if kind == _TokenType.NORMAL and len(text) > 1 and not letters.issuperset(text)
    ]
    if foreign:
        log.warning(
            "%s: %d tokens, such as %s, have characters that are not in the vocabulary; their text is encoded as byte "
            "tokens, while llama.cpp uses the token",
            metadata.file_name,
            len(foreign),
            shown(foreign[0]),
        )


def _bpe(
    metadata: Metadata,
    vocabulary: _Vocabulary,
    merges: list[tuple[str, str]],
    *,
    ignore_merges: bool = False,
    byte_fallback: bool = False,
) -> models.BPE:
    try:
        return models.BPE(vocabulary.ids, merges, ignore_merges=ignore_merges, byte_fallback=byte_fallback)
    except Exception as error:  # the library raises plain Exception for all bad input
        told = f"{metadata.file_name}: {_TOKENS} and {_MERGES} do not fit together ({error})."
        raise CorruptCheckpoint(told) from error


_ROLES = {
    "bos_token": ("bos", 1),
    "eos_token": ("eos", 2),
    "unk_token": ("unknown", 0),
    "pad_token": ("padding", None),
    "sep_token": ("seperator", None),  # so spelled in the format
    "mask_token": ("mask", None),
}
"""Our names to NAME in `tokenizer.ggml.NAME_token_id`, and llama.cpp's default id for vocabularies of kind 'llama'."""


def _named_tokens(metadata: Metadata, vocabulary: _Vocabulary) -> dict[str, str]:
    named: dict[str, str] = {}
    for role, (name, default) in _ROLES.items():
        key = f"tokenizer.ggml.{name}_token_id"
        if key in metadata:
            token_id = metadata.count(key, least=0)
            if token_id >= len(vocabulary.texts):
                raise metadata.refuse(key, f"an id of the {len(vocabulary.texts)} tokens")
            named[role] = vocabulary.texts[token_id]
        elif default is not None and metadata.text("tokenizer.ggml.model") == "llama":
            named[role] = vocabulary.texts[default]
    return named


def _frame(raw: RawTokenizer, metadata: Metadata, named: dict[str, str], *, adds_bos: bool, always: bool) -> None:
    """Add the begin and end tokens that the file asks for; `always` adds the begin token in any case."""
    frame = {
        "bos_token": metadata.flag("tokenizer.ggml.add_bos_token", adds_bos) or always,
        "eos_token": metadata.flag("tokenizer.ggml.add_eos_token", default=False),
    }
    used = [role for role, is_added in frame.items() if is_added]
    absent = [role for role in used if role not in named]
    if absent:
        raise CorruptCheckpoint(f"{metadata.file_name}: every text should get a {absent[0]}, but the file names none.")
    if used:
        before, after = ["bos_token:0"] if frame["bos_token"] else [], ["eos_token:0"] if frame["eos_token"] else []
        raw.post_processor = processors.TemplateProcessing(
            single=[*before, "$A:0", *after],
            special_tokens=[
                {"id": role, "ids": [raw.token_to_id(named[role])], "tokens": [named[role]]} for role in used
            ],
        )


def load_tokenizer(path: Path) -> Tokenizer:
    """Read the tokenizer of a model folder or a GGUF file.

    Raises:
        SetupError: there is no tokenizer, or it cannot be read.
    """
    if path.is_dir():
        return Tokenizer.from_folder(path)
    return tokenizer_from_gguf(GGUFFile(path).metadata)
