"""Rules for splitting a text into words before byte-level BPE, by `tokenizer.ggml.pre`, as in llama.cpp.

They are in its src/llama-vocab.cpp. A rule is a list of regular expressions. Each splits all pieces left by the ones
before, at its matches and between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches


@dataclass(frozen=True, slots=True)
class WordRule:
    """A rule for splitting a text into words, within which BPE merges."""

    patterns: tuple[str, ...]
    """Regular expressions applied in order, each to the pieces of the ones before; a match is a word."""
    ignores_merges_for_words: bool = False
    """Whether a word that is a token becomes that token, whatever the merges say."""
    adds_bos: bool = False


_CONTRACTIONS = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
"""A character before a word that belongs to it, usually a space."""
_WORDS = rf"{_BEFORE}\p{{L}}+"
_LINES = r"\s*[\r\n]+"
_SPACES = r"\s+(?!\S)|\s+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+"
_REST = rf"{_SIGNS}[\r\n]*|{_LINES}|{_SPACES}"
_REST_WITH_SLASHES = rf"{_SIGNS}[\r\n/]*|{_LINES}|{_SPACES}"


def _by_case(upper: str, lower: str, ending: str = "") -> str:
    """Return a pattern for words that end before a capital letter: `camelCase` is two."""
    return rf"{_BEFORE}{upper}*{lower}+{ending}|{_BEFORE}{upper}+{lower}*{ending}"


_UPPER, _LOWER = r"[\p{L}&&[^a-z]]", r"[\p{L}&&[^A-Z]]"
"""Letters by case; llama.cpp does not know the case of letters outside ASCII here."""
_MARKED_UPPER, _MARKED_LOWER = r"[[\p{L}\p{M}]&&[^a-z]]", r"[[\p{L}\p{M}]&&[^A-Z]]"
_TRUE_UPPER, _TRUE_LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

_HAN_AND_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_HAN_AND_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_CASED = (
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
"""Letters with a case, from the Unicode version that DeepSeek's first tokenizer was made with."""
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_CASED}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _HAN_AND_HANGUL,
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_AND_HANGUL, r"\p{N}")
_CODE = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    _HAN_AND_KANA,
    rf"{_CODE}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINES}|{_SPACES}",
)
_HANGUL = "[\uac00-\ud7a3\u3131-\u318e]+"
_WIDE_SIGNS = "[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
_BOPOMOFO = "[\u3105-\u312f]+"
_YOUTU = (
    f"{_HANGUL}|{_WIDE_SIGNS}|{_BOPOMOFO}|{_HAN_AND_KANA}",
    rf"{_by_case(_TRUE_UPPER, _TRUE_LOWER, f'{_CONTRACTIONS}?')}|\p{{N}}|{_REST_WITH_SLASHES}",
)
_CHAMELEON = (
    r"<sentinel:[0-9]+>",
    r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
    r"([\t\n]|    |  )",
    r"\p{N}",
    r"[\p{P}!-/:-@\[-`{-~]",
    _GPT2,
)
_SPACES_BY_POWERS = "".join(rf"\s{{{1 << power}}}(?!\S)|" for power in range(9, 1, -1)) + r"\s{1,2}(?!\S)|\s{1}"
_NO_PUNCTUATION = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"

_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"
_QWEN35 = rf"{_CONTRACTIONS}|{_BEFORE}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LINES}|{_SPACES}"
_GPT4O = rf"{_by_case(_UPPER, _LOWER, f'{_CONTRACTIONS}?')}|\p{{N}}{{1,3}}|{_REST_WITH_SLASHES}"
_MARKED_GPT4O = rf"{_by_case(_MARKED_UPPER, _MARKED_LOWER, f'{_CONTRACTIONS}?')}|\p{{N}}{{1,3}}|{_REST_WITH_SLASHES}"
_TRUE_GPT4O = rf"{_by_case(_TRUE_UPPER, _TRUE_LOWER, f'{_CONTRACTIONS}?')}|\p{{N}}{{1,3}}|{_REST_WITH_SLASHES}"
_TEKKEN = rf"{_by_case(_UPPER, _LOWER)}|\p{{N}}|{_REST_WITH_SLASHES}"
_BAILING = rf"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|{_WORDS}|\p{{N}}|{_SIGNS}[\r\n]*|\s*[\r\n]|{_SPACES}"
_SEED_CODER = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_LINES}|{_SPACES}"
_EXAONE_MOE = (
    rf"{_CONTRACTIONS}|{_BEFORE}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}|{_SIGNS}[\r\n/]?|\s*[\r\n]|{_SPACES}"
)

_RULES: tuple[tuple[WordRule, str], ...] = (
    (WordRule((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")), "default"),
    (
        WordRule((_GPT2,)),
        "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de gigachat a.x-4.0 mellum modern-bert mpt olmo jais trillion",
    ),
    (WordRule((_GPT2,)), "granite-docling exaone4"),
    (
        WordRule((_LLAMA3,), ignores_merges_for_words=True, adds_bos=True),
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
    ),
    (WordRule((_LLAMA3,)), "dbrx smaug-bpe chatglm-bpe"),
    (WordRule((_LLAMA3,), ignores_merges_for_words=True), "glm4"),
    (
        WordRule((rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_SIGNS}[\r\n]*|{_LINES}|{_SPACES_BY_POWERS}",)),
        "jais-2",
    ),
    (
        WordRule((r"\p{N}{1,3}", rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}+|{_REST}"), ignores_merges_for_words=True),
        "minicpm5",
    ),
    (WordRule((_QWEN2,)), "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2"),
    (WordRule((_QWEN35,)), "qwen35"),
    (WordRule((r"[^\n]+|[\n]+", _QWEN2)), "laguna"),
    (WordRule((r"\p{N}", _GPT2)), "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2"),
    (WordRule((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")), "falcon"),
    (WordRule(_DEEPSEEK_LLM), "deepseek-llm"),
    (WordRule(_DEEPSEEK_CODER), "deepseek-coder"),
    (WordRule(_DEEPSEEK3), "deepseek-v3 hunyuan-dense joyai-llm"),
    (WordRule(_YOUTU, ignores_merges_for_words=True), "youtu"),
    (WordRule((_NO_PUNCTUATION,)), "poro-chat bloom gpt3-finnish"),
    (WordRule((_NO_PUNCTUATION, r"\p{N}")), "viking"),
    (WordRule((_TEKKEN,), ignores_merges_for_words=True, adds_bos=True), "tekken"),
    (WordRule(_CHAMELEON, adds_bos=True), "chameleon"),
    (WordRule((_GPT4O,)), "gpt-4o llama4 kanana2 talkie minimax-m2"),
    (WordRule((_MARKED_GPT4O,), ignores_merges_for_words=True), "granite-embed-multi-97m"),
    (WordRule((r"\d{1,3}(?=(?:\d{3})*\b)", _TRUE_GPT4O)), "tiny_aya cohere2moe"),
    (WordRule((_BAILING,)), "bailingmoe bailingmoe2 llada-moe"),
    (WordRule((_SEED_CODER,)), "seed-coder"),
    (WordRule((_EXAONE_MOE,)), "exaone-moe"),
)

WORD_RULES = {name: rule for rule, names in _RULES for name in names.split()}
"""Rule for each `tokenizer.ggml.pre`, except names for which llama.cpp has a function, not regular expressions."""


def nearest_names(name: str) -> tuple[str, ...]:
    """Return the known names that are spelled most like `name`; all names if none is close.

    >>> nearest_names("deepseek-v4")
    ('deepseek-v3', 'deepseek-llm', 'deepseek-coder')
    """
    return tuple(get_close_matches(name[:80], WORD_RULES, 3, 0.5)) or tuple(WORD_RULES)
