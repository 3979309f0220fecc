"""The tokenizer that a GGUF file carries, built so that it gives llama.cpp's tokens.

Three kinds of vocabulary (`tokenizer.ggml.model`), as llama.cpp reads them (its src/llama-vocab.cpp):

    gpt2    byte-level BPE: merges in order; `tokenizer.ggml.pre` names how a text is cut into words before
    llama   SentencePiece: of all neighbours that form a token, those with the highest score are joined first
    gemma4  its vocabulary with the merges of BPE

No normalizer runs, since llama.cpp has none: text that is not composed (NFC) is tokenized as it is, where transformers
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
"""What llama.cpp's other kinds of vocabulary are."""
_ALWAYS_WITH_BOS = ("gemma4",)
"""Kinds that begin every text with the begin token, whatever a file says: early ones of Gemma 4 say no."""
_NAMES_OF_PHI3 = ("phi-3", "phi3")
_KEEP_SPACES_BEHIND = frozenset(("<unk>", "<s>", "<|endoftext|>"))
"""Tokens of Phi-3 that do not swallow the white space behind them, as its other special tokens do."""


class _TokenType(IntEnum):
    """What `tokenizer.ggml.token_type` says of a token, as far as it matters."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4


_END_TEXTS = frozenset(
    (
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<turn|>", "<|endoftext|>", "</s>", "<|eom_id|>"),
        *("<EOT>", "_<EOT>", "[EOT]", "<|end_of_text|>", "<eos>", "[EOS]", "<end_of_utterance>", "[e~["),
        *("<｜end▁of▁sentence｜>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<|tool_response>"),  # noqa: RUF001
        # of texts with a gap to fill: padding, the name of a repository, the end of a file
        *("<|fim_pad|>", "<fim_pad>", "<fim-pad>", "<PAD>", "[PAD]"),
        *("<|fim_repo|>", "<|repo_name|>", "<reponame>", "<fim-repo>", "<REPO>", "<|file_sep|>"),
    )
)
"""Tokens at which llama.cpp ends a generation wherever a vocabulary has them: files name only one or two."""
_NO_ENDS_BESIDE: Mapping[str, frozenset[str]] = {
    "</s>": frozenset(("<|tool_response>",)),
    "<|end|>": frozenset(("<|return|>", "<|call|>")),
}
"""Of these, the ones that are none where a vocabulary has all of some others: Gemma 4's, gpt-oss's."""
_ENDING_ROLES = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")


def tokenizer_from_gguf(metadata: Metadata) -> Tokenizer:
    """Builds the tokenizer.

    Raises:
        UnsupportedModel: a kind of vocabulary, or a way to cut words, that is not implemented.
        CorruptCheckpoint: keys that are absent, of the wrong kind, or contradict each other.
    """
    vocabulary = _Vocabulary(metadata)
    kind = metadata.text("tokenizer.ggml.model")
    if kind == "gpt2":
        raw, adds_bos = _byte_level(metadata, vocabulary)
    elif kind == "llama":
        raw, adds_bos = _sentence_piece(metadata, vocabulary), True
    elif kind == "gemma4":
        raw, adds_bos = _merged_text(metadata, vocabulary), True
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
    """The ids that end a generation: those that the file names, and those whose text says so, as in llama.cpp.

    Raises:
        CorruptCheckpoint: ids that the model has no logits for.
    """
    texts = metadata.texts(_TOKENS)
    ends = _END_TEXTS.intersection(texts)
    ends -= {text for text, others in _NO_ENDS_BESIDE.items() if ends >= others}
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
    """The sampling values that a file recommends, by our names; they are not applied."""
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
    """Tokens by id, and what each is."""

    def __init__(self, metadata: Metadata) -> None:
        # llama.cpp's name for a token without a text
        self.texts = [text or f"[EMPTY_{i}]" for i, text in enumerate(metadata.texts(_TOKENS))]
        self.ids = {text: i for i, text in enumerate(self.texts)}
        name = metadata.text("general.name", "").lower()
        self._is_phi3 = any(part in name for part in _NAMES_OF_PHI3)  # no key says so, and llama.cpp asks the name
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
        """Makes control tokens special, and user-defined ones tokens that are found before anything is merged."""
        tokens: list[AddedToken] = []
        for text, kind in zip(self.texts, self.types, strict=False):
            is_special = kind in (_TokenType.CONTROL, _TokenType.UNKNOWN) or text in _END_TEXTS
            if is_special or kind == _TokenType.USER_DEFINED:
                strips = self._is_phi3 and text not in _KEEP_SPACES_BEHIND
                tokens.append(AddedToken(text, rstrip=strips, special=is_special, normalized=False))
        raw.add_special_tokens([token for token in tokens if token.special])
        raw.add_tokens([token for token in tokens if not token.special])


def _byte_level(metadata: Metadata, vocabulary: _Vocabulary) -> tuple[RawTokenizer, bool]:
    pre = metadata.text(_PRE, "")
    if not pre:
        pre = "default"
        log.warning(
            "%s: the file does not say how a text is cut into words (%s), so it is cut as by llama.cpp's default. "
            "Answers are worse if the model was trained otherwise; take a newer file of it",
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
    raw = RawTokenizer(_bpe(metadata, vocabulary, merges, ignore_merges=rule.takes_whole_words))
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rule.patterns]
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.pre_tokenizer = pre_tokenizers.Sequence([*cuts, as_bytes])
    raw.decoder = decoders.ByteLevel()
    return raw, rule.adds_bos


def _merge(metadata: Metadata, text: str) -> tuple[str, str]:
    """'a b', where a may begin with a space."""
    left, space, right = text[1:].partition(" ")
    if not space:
        raise CorruptCheckpoint(
            f"{metadata.file_name}: {_MERGES} has {shown(text)}; it must be two tokens and a space."
        )
    return text[0] + left, right


def _sentence_piece(metadata: Metadata, vocabulary: _Vocabulary) -> RawTokenizer:
    """BPE whose merges are the tokens, best score first, each in all the ways in which two tokens form it.

    Of equally good neighbours llama.cpp joins the leftmost, and so does BPE within a merge. Between different runs of
    one character, which Llama's runs of spaces are, the longest comes first: so a run grows from the left, too. Other
    tokens of one score come in the order of their ids, in which most trainers make them; so do all of a file that has
    no scores.
    """
    scores = metadata.numbers(_SCORES) if _SCORES in metadata else [0.0] * len(vocabulary.texts)
    if len(scores) < len(vocabulary.texts):
        raise CorruptCheckpoint(
            f"{metadata.file_name}: {_SCORES} has {len(scores)} entries for {len(vocabulary.texts)} tokens."
        )
    if any(math.isnan(score) for score in scores):
        raise CorruptCheckpoint(f"{metadata.file_name}: {_SCORES} has a score that is no number. Download it again.")
    _warn_of_equal_scores(metadata, vocabulary, scores)
    best_first = sorted(
        vocabulary.texts, key=lambda text: (-scores[vocabulary.ids[text]], -len(text) if _is_run(text) else 0)
    )
    pairs = ((text[:cut], text[cut:]) for text in best_first for cut in range(1, len(text)))
    merges = [(left, right) for left, right in pairs if left in vocabulary.ids and right in vocabulary.ids]
    _warn_of_foreign_characters(metadata, vocabulary)
    model = _bpe(metadata, vocabulary, merges, byte_fallback=True)
    # without tokens for all bytes a character may have none, and must not vanish
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


def _merged_text(metadata: Metadata, vocabulary: _Vocabulary) -> RawTokenizer:
    """BPE over text whose spaces are marked, with merges in order; only newlines are apart from the rest."""
    merges = [_merge(metadata, text) for text in metadata.texts(_MERGES)]
    model = _bpe(metadata, vocabulary, merges, byte_fallback=True)
    model.unk_token = _named_tokens(metadata, vocabulary).get("unk_token")  # see _sentence_piece
    raw = RawTokenizer(model)
    raw.normalizer = normalizers.Replace(" ", _SPACE)
    raw.pre_tokenizer = pre_tokenizers.Split(Regex("\n+"), "isolated")
    raw.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return raw


def _is_run(text: str) -> bool:
    """Whether a text is one character, repeated."""
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
            "%s: %d tokens have the score of another one, so the file does not say which of them are joined first; "
            "the first in the vocabulary are, where llama.cpp joins the leftmost",
            metadata.file_name,
            num_equal,
        )


def _warn_of_foreign_characters(metadata: Metadata, vocabulary: _Vocabulary) -> None:
    """Tokens that no tokens form: llama.cpp joins them from characters, which SentencePiece never does in training."""
    letters = {text for text in vocabulary.texts if len(text) == 1}
    foreign = [
        text
        for text, kind in zip(vocabulary.texts, vocabulary.types, strict=False)
        if kind == _TokenType.NORMAL and len(text) > 1 and not letters.issuperset(text)
    ]
    if foreign:
        log.warning(
            "%s: %d tokens, such as %s, have characters that are no tokens; texts with them are spelt in bytes, where "
            "llama.cpp takes the token",
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
    except Exception as error:  # the library raises plain Exception for every kind of bad input
        raise CorruptCheckpoint(f"{metadata.file_name}: {_TOKENS} and {_MERGES} do not fit ({error}).") from error


_ROLES = {
    "bos_token": ("bos", 1),
    "eos_token": ("eos", 2),
    "unk_token": ("unknown", 0),
    "pad_token": ("padding", None),
    "sep_token": ("seperator", None),  # so spelled in the format
    "mask_token": ("mask", None),
}
"""Our names to those of `tokenizer.ggml.NAME_token_id`, and what llama.cpp takes where a 'llama' kind has none."""


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
    """Puts the begin and end tokens around a text that the file asks for, or the begin token `always`."""
    frame = {
        "bos_token": metadata.flag("tokenizer.ggml.add_bos_token", adds_bos) or always,
        "eos_token": metadata.flag("tokenizer.ggml.add_eos_token", default=False),
    }
    used = [role for role, is_added in frame.items() if is_added]
    absent = [role for role in used if role not in named]
    if absent:
        raise CorruptCheckpoint(f"{metadata.file_name}: a text is framed by its {absent[0]}, but the file names none.")
    if used:
        before, after = ["bos_token:0"] if frame["bos_token"] else [], ["eos_token:0"] if frame["eos_token"] else []
        raw.post_processor = processors.TemplateProcessing(
            single=[*before, "$A:0", *after],
            special_tokens=[
                {"id": role, "ids": [raw.token_to_id(named[role])], "tokens": [named[role]]} for role in used
            ],
        )


def load_tokenizer(path: Path) -> Tokenizer:
    """Reads it.

    Raises:
        SetupError: there is none, or a file that cannot be read as one.
    """
    if path.is_dir():
        return Tokenizer.from_folder(path)
    return tokenizer_from_gguf(GGUFFile(path).metadata)
