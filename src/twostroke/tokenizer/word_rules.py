"""How a text is cut into words, within which BPE merges, by the names that GGUF files give the ways.

The names and the patterns are facts of the format: those that llama.cpp keeps under `tokenizer.ggml.pre`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WordRule:
    """One way to cut a text into words."""

    patterns: tuple[str, ...]
    """Applied one after the other, each to what the ones before have left whole; a match is a word."""
    takes_whole_words: bool = False
    """A word that is a token is that token, whatever the merges say."""
    adds_bos: bool = False


_SUFFIXES = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKED_WORDS = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_REST = rf"{_SIGNS}|{_SPACES}"
_PHRASES = r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_UPPER, _LOWER, _NOT_TEXT = r"[\p{L}&&[^a-z]]", r"[\p{L}&&[^A-Z]]", r"[^\r\n\p{L}\p{N}]?"
_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_CJK = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+"
_BLOOM = r" ?[^(\s|.,!?\x{2026}\x{3002}\x{FF0C}\x{3001}\x{0964}\x{06D4}\x{060C})]+"


def _cased(numbers: str, suffixes: str = "") -> str:
    """Words that change to small letters at most once, with what may follow them; then numbers and the rest."""
    return (
        rf"{_NOT_TEXT}{_UPPER}*{_LOWER}+{suffixes}|{_NOT_TEXT}{_UPPER}+{_LOWER}*{suffixes}|{numbers}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


_NUMBERS_OF_3 = rf"{_SUFFIXES}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_DIGITS = rf"{_SUFFIXES}|{_WORDS}|\p{{N}}|{_REST}"
_LLAMA3 = WordRule((_NUMBERS_OF_3,), takes_whole_words=True, adds_bos=True)
_PLAIN = WordRule((_GPT2,))
_PLAIN_WITH_DIGITS = WordRule((r"\p{N}", _GPT2))
_QWEN2 = WordRule((_DIGITS,))
_GPT4O = WordRule((_cased(r"\p{N}{1,3}", f"{_SUFFIXES}?"),))
_DEEPSEEK3 = WordRule(
    (
        r"\p{N}{1,3}",
        _CJK,
        rf"{_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
    )
)
_ONE_NEWLINE = r"\s*[\r\n]|\s+(?!\S)|\s+"
_BAILING = WordRule(
    (rf"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_ONE_NEWLINE}",)
)
_NARROWING_SPACES = "|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))

WORD_RULES: Mapping[str, WordRule] = {
    "default": WordRule((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), _LLAMA3
    ),
    **dict.fromkeys(("smaug-bpe", "dbrx", "glm4", "chatglm-bpe"), WordRule((_NUMBERS_OF_3,))),
    **dict.fromkeys(("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "mpt", "olmo", "jais"), _PLAIN),
    **dict.fromkeys(("trillion", "granite-docling", "exaone4"), _PLAIN),
    **dict.fromkeys(("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone"), _PLAIN_WITH_DIGITS),
    **dict.fromkeys(("minerva-7b", "mellum2"), _PLAIN_WITH_DIGITS),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "stablelm2", "hunyuan"), _QWEN2),
    **dict.fromkeys(("solar-open", "grok-2", "megrez"), _QWEN2),
    "qwen35": WordRule((rf"{_SUFFIXES}|{_MARKED_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",)),
    "seed-coder": WordRule((rf"{_SUFFIXES}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)),
    "minicpm5": WordRule((r"\p{N}{1,3}", rf"{_SUFFIXES}|{_WORDS}|\p{{N}}+|{_REST}"), takes_whole_words=True),
    "laguna": WordRule((r"[^\n]+|[\n]+", _DIGITS)),
    "tekken": WordRule((_cased(r"\p{N}"),), takes_whole_words=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _GPT4O),
    "falcon": WordRule((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "jais-2": WordRule((rf"{_SUFFIXES}|{_WORDS}|\p{{N}}{{1,3}}|{_SIGNS}|\s*[\r\n]+|{_NARROWING_SPACES}|\s{{1}}",)),
    "deepseek-coder": WordRule(
        ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[\x{4E00}-\x{9FA5}\x{0800}-\x{4E00}\x{AC00}-\x{D7FF}]+", r"\p{N}")
    ),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK3),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _BAILING),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), WordRule((_BLOOM,))),
    "viking": WordRule((_BLOOM, r"\p{N}")),
    "exaone-moe": WordRule((rf"{_SUFFIXES}|{_PHRASES}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|{_ONE_NEWLINE}",)),
}
"""By `tokenizer.ggml.pre`."""
