"""Encoding of a long text window by window: the library takes 200 bytes for each character that it encodes at once.

    text     aaaa bbbb cccc dddd eeee ffff
    window 1 ├──────────────┤    ╎         its end may be cut within a word, so its last words are not used
    window 2           ├──────────────┤    begins at a word boundary of window 1

The ids are those of the whole text. A pre-tokenizer that is a regular expression continues from the end of a word as
if the text began there. A word longer than a window is cut between two of its tokens. A byte-pair encoding is right
if every two neighbours are right, so two windows that share one token within a word continue each other (Berglund
and van der Merwe, Formalizing BPE tokenization, 2023). There is no result if a window's tokens are not the text's
own bytes, or if two windows contradict each other.
"""

from __future__ import annotations

import bisect
import itertools
import json
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import models, normalizers

from twostroke.process_memory import return_free_memory
from twostroke.tokenizer.token_text import ByteLevelText, TokenText

WINDOW_CHARS = 1 << 14
"""Characters of a window, which takes some 4 MB."""
_MARGIN_BYTES = 1 << 10
"""Bytes unused at the end of a window: a pre-tokenizer looks ahead by a few characters; every token is shorter."""
_OVERLAP_BYTES = 1 << 12
"""Bytes by which two windows within one word overlap."""

_MAX_CHAR_BYTES = 4
"""Maximum bytes of a character, and so maximum tokens of one: a token has at least one byte."""

_CLASS = re.compile(r"\[(?:\\.|[^\]\\])*\]")
"""A set of characters in a regular expression."""
_LOOKS_BACK = re.compile(r"\(\?<|\\[bBAGKzZ]|[\^$]")
"""Constructs of a regular expression that depend on preceding text or on an end of the text."""


class WindowEncoder:
    """Encoder of long texts, without begin and end tokens.

    Args:
        raw: tokenizer of the library; must not change any more.
        text: rule by which its tokens become text.
    """

    def __init__(self, raw: RawTokenizer, text: TokenText) -> None:
        self._raw = raw
        self._composes = isinstance(raw.normalizer, normalizers.NFC)
        is_known = (raw.normalizer is None or self._composes) and _merges_pairs(raw) and _words_are_independent(raw)
        self._text = text if isinstance(text, ByteLevelText) and is_known else None
        self._token_bytes: dict[int, bytes] = {}

    def encode(self, text: str, frame: tuple[Sequence[int], Sequence[int]] = ((), ())) -> Sequence[int] | None:
        """Return the ids; None if windows are not reliable with this tokenizer or this text.

        Args:
            text: any text.
            frame: ids to put before and after those of the text.
        """
        if self._text is None:
            return None
        if self._composes:
            text = unicodedata.normalize("NFC", text)
        return_free_memory()  # left behind by decoding, rendering and copying the request's body
        found = _Ids(sum(map(len, frame)) + _MAX_CHAR_BYTES * len(text))
        found.extend(frame[0])
        begin, before = 0, None
        while True:
            window = self._window(text[begin : begin + WINDOW_CHARS])
            first = 0 if before is None or window is None else before.continue_in(window, found)
            if window is None or first is None:
                return None
            if begin + WINDOW_CHARS >= len(text):
                found.extend(window.ids[first:])
                found.extend(frame[1])
                return found.view()
            before = window.from_word_boundary() or window.within_word()
            if before is None or before.cut < first:
                return None
            found.extend(window.ids[first : before.cut])
            begin += len(window.content[: before.begin].decode("utf-8"))

    def _window(self, content: str) -> _Window | None:
        encoding = self._raw.encode_batch([content], add_special_tokens=False)[0]
        pieces = [self._bytes_of(token_id) for token_id in encoding.ids]
        written = content.encode("utf-8")
        if b"".join(pieces) != written:
            return None
        ends = list(itertools.accumulate(map(len, pieces)))
        return _Window(encoding.ids, encoding.word_ids, ends, written)

    def _bytes_of(self, token_id: int) -> bytes:
        known = self._token_bytes.get(token_id)
        if known is None:
            assert self._text is not None
            known = self._token_bytes[token_id] = self._text.token_bytes(self._raw.id_to_token(token_id) or "")
        return known


class _Ids:
    """Token ids that take four bytes each.

    Room for the maximum is reserved at the start, and takes no memory before it is written to. A growing list would
    be copied from time to time, with twice the memory meanwhile.
    """

    def __init__(self, most: int) -> None:
        self._room = np.empty(most, np.uint32)
        self._size = 0

    def extend(self, ids: Sequence[int]) -> None:
        """Append some ids."""
        self._room[self._size : self._size + len(ids)] = ids
        self._size += len(ids)

    def view(self) -> Sequence[int]:
        """Return all ids."""
        return self._room[: self._size].data


@dataclass(frozen=True, slots=True)
class _Window:
    """Tokens of a part of a text."""

    ids: list[int]
    words: list[int | None]
    """Index of the word of each token."""
    ends: list[int]
    """End of each token, in bytes of the content."""
    content: bytes

    def from_word_boundary(self) -> _Overlap | None:
        """Return the tokens from the last word boundary before the margin on; None if there is no boundary."""
        most = len(self.content) - _MARGIN_BYTES
        for cut in range(len(self.ids) - 1, 0, -1):
            if self.ends[cut - 1] <= most and self.words[cut] != self.words[cut - 1]:
                # the last word may continue beyond the window, and the word before may depend on it
                last = self.words.index(self.words[-1])
                usable = self.words.index(self.words[last - 1]) if last > cut else cut
                return self._rest(cut, usable, self.ends[cut - 1], is_word=True)
        return None

    def within_word(self) -> _Overlap | None:
        """Return the tokens from a character before the margin on; None if the window is too short."""
        first, most = len(self.content) - _OVERLAP_BYTES, len(self.content) - _MARGIN_BYTES
        # prefer the end of a token, where tokens of a run stay aligned; if none ends with a character, take any one
        begins = (*reversed(self.ends[: bisect.bisect_right(self.ends, first)]), *range(max(0, first), most))
        begin = next((place for place in begins if self.content[place] & 0xC0 != 0x80), 0)
        cut = bisect.bisect_left(self.ends, begin) + 1
        usable = bisect.bisect_right(self.ends, most)
        return self._rest(cut, usable, begin, is_word=False) if begin > 0 and cut < usable else None

    def _rest(self, cut: int, usable: int, begin: int, *, is_word: bool) -> _Overlap:
        ends = [end - begin for end in self.ends[cut - 1 : usable]]
        return _Overlap(cut, begin, self.ids[cut:usable], ends[:-1], ends[1:], is_word=is_word)


@dataclass(frozen=True, slots=True)
class _Overlap:
    """Tokens that the next window should have, too."""

    cut: int
    """Index of the first of them in their window."""
    begin: int
    """Begin of the next window, in bytes of this one."""
    ids: list[int]
    starts: list[int]
    ends: list[int]
    """Ends in bytes of the next window."""
    is_word: bool
    """Whether they begin a word; otherwise they lie within one, and the next window may begin with other tokens."""

    def continue_in(self, window: _Window, found: _Ids) -> int | None:
        """Append tokens up to one that both windows have; return the index of the window's token behind it, or None."""
        if self.is_word:
            return 0 if window.ids[: len(self.ids)] == self.ids else None
        mine = theirs = 0
        while mine < len(self.ids) and theirs < len(window.ids) and window.words[theirs] == window.words[0]:
            if self._token(mine) == (window.ids[theirs], window.ends[theirs - 1] if theirs else 0, window.ends[theirs]):
                found.extend(self.ids[: mine + 1])
                return theirs + 1
            my_end, their_end = self.ends[mine], window.ends[theirs]
            mine += my_end <= their_end
            theirs += their_end <= my_end
        return None

    def _token(self, place: int) -> tuple[int, int, int]:
        return self.ids[place], self.starts[place], self.ends[place]


def _merges_pairs(raw: RawTokenizer) -> bool:
    """Return whether tokens of a word are merged by rank alone."""
    model = raw.model
    return (
        isinstance(model, models.BPE)
        and not model.dropout
        and not model.continuing_subword_prefix
        and not model.end_of_word_suffix
    )


def _words_are_independent(raw: RawTokenizer) -> bool:
    """Return whether words do not depend on the text before the preceding word."""
    if raw.pre_tokenizer is None:
        return True
    waiting: list[dict[str, Any]] = [json.loads(raw.pre_tokenizer.__getstate__())]
    while waiting:
        step = waiting.pop()
        waiting += step.get("pretokenizers", ())
        if step["type"] not in ("Sequence", "Split", "ByteLevel", "Digits"):
            return False
        if _LOOKS_BACK.search(_CLASS.sub("", step.get("pattern", {}).get("Regex", ""))):
            return False
    return True
