"""The text that a token stands for, for the four kinds of decoders in tokenizer.json files.

    kind            a token is                      pieces of text may be sent
    byte level      bytes of UTF-8                  as soon as a character is complete
    byte fallback   text, or one byte <0xE4>        as soon as a run of byte tokens has ended
    by token        text, other at the beginning    at once
    opaque          known only with its neighbours  at the end

Each kind is a rule (`TokenText`, one per tokenizer) and a state (`TextStream`, one per generation). The pieces of a
stream always add up to the decoder's output for all tokens at once, whatever the tokens are.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as RawTokenizer

REPLACEMENT = "\ufffd"


class TextStream(Protocol):
    """The text of one generation, decoded incrementally."""

    is_settled: bool
    """Whether nothing is held back and the next token adds its `settled_text`, if it has one."""

    def push(self, tokens: Iterable[str]) -> str:
        """Add the next tokens; return the text that is now certain."""
        ...

    def finish(self) -> str:
        """End the stream; return the text that was held back."""
        ...


class TokenText(Protocol):
    """The rule by which one tokenizer's tokens become text."""

    @property
    def decodes_independently(self) -> bool:
        """Whether a text is exactly `first_bytes` of its first token and `token_bytes` of the others."""
        ...

    def token_bytes(self, token: str) -> bytes:
        """Return the bytes that the token adds in the middle of a text."""
        ...

    def first_bytes(self, token: str) -> bytes:
        """Return the bytes that the token adds at the beginning of a text."""
        ...

    def settled_text(self, token: str) -> str | None:
        """Return the text that the token adds to a settled stream; None if it may leave the stream unsettled."""
        ...

    def start(self) -> TextStream:
        """Return a stream for a new generation."""
        ...


def make_token_text(raw: RawTokenizer) -> TokenText:
    """Return the rule for the tokenizer's decoder."""
    rules: dict[str, Any] = json.loads(raw.decoder.__getstate__()) if raw.decoder is not None else {"type": None}
    steps: list[dict[str, Any]] = rules["decoders"] if rules["type"] == "Sequence" else [rules]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return ByteLevelText()
    if (byte_fallback := _byte_fallback(steps)) is not None:
        return byte_fallback
    if len(kinds) == 1 and kinds[0] in (None, "Metaspace", "WordPiece"):
        return ByTokenText(raw)
    return OpaqueText(raw)


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each character of byte-level BPE.

    Each byte is written as one visible character: itself if it is visible, else one from U+0100 on.
    """
    visible = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = (b for b in range(256) if b not in visible)
    return {chr(b): b for b in visible} | {chr(0x100 + i): b for i, b in enumerate(hidden)}


_NO_BYTE, _BORDER = -1, -2


@cache
def _byte_table() -> NDArray[np.int16]:
    """Return the byte of each character of the byte alphabet, indexed by code point."""
    alphabet = _byte_alphabet()
    table = np.full(max(map(ord, alphabet)) + 2, _NO_BYTE, np.int16)  # the last entry is for all higher code points
    table[[ord(character) for character in alphabet]] = list(alphabet.values())
    table[ord("\n")] = _BORDER  # not in the byte alphabet, so it can separate tokens
    return table


class ByteLevelText:
    """Tokens are bytes written in the byte alphabet; a character may be spread over several."""

    decodes_independently = True

    def __init__(self) -> None:
        self._alphabet = _byte_alphabet()
        self._bytes: dict[str, bytes] = {}

    def token_bytes(self, token: str) -> bytes:
        """Return the bytes of a token; added tokens with other characters (such as a space) are encoded as UTF-8."""
        known = self._bytes.get(token)
        if known is None:
            try:
                known = bytes(self._alphabet[c] for c in token)
            except KeyError:
                known = token.encode("utf-8")
            self._bytes[token] = known
        return known

    def all_bytes(self, tokens: Sequence[str]) -> list[bytes]:
        """Return `token_bytes` of a whole vocabulary, in a tenth of the time."""
        table = _byte_table()
        joined = np.frombuffer("\n".join([*tokens, ""]).encode("utf-32-le", "surrogatepass"), np.uint32)
        found = table[np.minimum(joined, len(table) - 1)]
        ends = np.flatnonzero(found == _BORDER)
        if len(ends) != len(tokens):  # some added tokens contain a line break
            return [self.token_bytes(token) for token in tokens]
        content = found.astype(np.uint8).tobytes()
        texts = [content[begin + 1 : end] for begin, end in pairwise([-1, *ends.tolist()])]
        for i in map(int, np.unique(np.searchsorted(ends, np.flatnonzero(found == _NO_BYTE)))):
            texts[i] = self.token_bytes(tokens[i])
        return texts

    def first_bytes(self, token: str) -> bytes:
        return self.token_bytes(token)

    def settled_text(self, token: str) -> str | None:
        """Return the token's text; None unless it consists of complete characters."""
        try:
            return self.token_bytes(token).decode("utf-8")
        except UnicodeDecodeError:
            return None

    def start(self) -> TextStream:
        """Return an incremental UTF-8 decoder, which holds back only an incomplete character."""
        return _ByteLevelStream(self)


class _ByteLevelStream:
    def __init__(self, text: ByteLevelText) -> None:
        self._token_bytes = text.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.is_settled = True

    def push(self, tokens: Iterable[str]) -> str:
        text = self._decoder.decode(b"".join(map(self._token_bytes, tokens)))
        self.is_settled = not self._decoder.getstate()[0]
        return text

    def finish(self) -> str:
        return self._decoder.decode(b"", True)


_BYTE_TOKEN = re.compile(r"<0x(\+[0-9A-Fa-f]|[0-9A-Fa-f]{2})>")


def _byte_fallback(steps: list[dict[str, Any]]) -> ByteFallbackText | None:
    """Return the rule for Replace*, ByteFallback, Fuse and an optional Strip at the left; None for other decoders."""
    kinds = " ".join(str(step["type"]) for step in steps)
    if re.fullmatch(r"(Replace )*ByteFallback Fuse( Strip)?", kinds) is None:
        return None
    replace = [(step["pattern"].get("String"), step["content"]) for step in steps if step["type"] == "Replace"]
    no_strip: dict[str, Any] = {"content": " ", "start": 0, "stop": 0}
    strip = steps[-1] if steps[-1]["type"] == "Strip" else no_strip
    if strip["stop"] or any(pattern is None for pattern, _ in replace):
        return None
    return ByteFallbackText(replace, strip["content"], strip["start"])


class ByteFallbackText:
    """Tokens are text with a mark for the space; characters outside the vocabulary come as single bytes."""

    def __init__(self, replace: list[tuple[str, str]], strip: str, num_strip: int) -> None:
        self._replace = replace
        self.strip, self.num_strip = strip, num_strip

    def piece(self, token: str) -> str | int:
        """Return the token's text, or its byte."""
        for pattern, content in self._replace:
            token = token.replace(pattern, content)
        byte = _BYTE_TOKEN.fullmatch(token)
        return int(byte.group(1), 16) if byte else token

    def token_bytes(self, token: str) -> bytes:
        """Return the byte itself, or the text with its leading space."""
        piece = self.piece(token)
        return bytes([piece]) if isinstance(piece, int) else piece.encode("utf-8")

    @property
    def decodes_independently(self) -> bool:
        """Whether at most one token is affected by stripping at the beginning."""
        return self.num_strip <= 1

    def first_bytes(self, token: str) -> bytes:
        """Return the token's bytes without the stripped space."""
        return self.token_bytes(token).removeprefix(self.strip.encode("utf-8") if self.num_strip else b"")

    def settled_text(self, token: str) -> str | None:
        """Return the token's text; None for a byte token."""
        piece = self.piece(token)
        return None if isinstance(piece, int) else piece

    def start(self) -> TextStream:
        """Return a stream that holds back a run of byte tokens until it ends: one wrong byte makes the whole run
        U+FFFD."""
        return _ByteFallbackStream(self)


class _ByteFallbackStream:
    def __init__(self, text: ByteFallbackText) -> None:
        self._piece = text.piece
        self._strip, self._num_strip = text.strip, text.num_strip
        self._run = bytearray()
        self.is_settled = not text.num_strip

    def push(self, tokens: Iterable[str]) -> str:
        pieces: list[str] = []
        for token in tokens:
            piece = self._piece(token)
            if isinstance(piece, int):
                self._run.append(piece)
            else:
                pieces += [self._end_run(), piece]
        text = self._stripped("".join(pieces))
        self.is_settled = not self._run and not self._num_strip
        return text

    def finish(self) -> str:
        return self._stripped(self._end_run())

    def _end_run(self) -> str:
        try:
            text = self._run.decode("utf-8")
        except UnicodeDecodeError:
            text = REPLACEMENT * len(self._run)
        self._run.clear()
        return text

    def _stripped(self, text: str) -> str:
        """Strip spaces at the beginning of the whole text, also if they are spread over several pieces."""
        while self._num_strip and text:
            if not text.startswith(self._strip):
                self._num_strip = 0
                break
            text = text[len(self._strip) :]
            self._num_strip -= 1
        return text


class ByTokenText:
    """Each token adds its own text; the first token's text differs (no leading space)."""

    decodes_independently = True

    def __init__(self, raw: RawTokenizer) -> None:
        self._raw = raw
        self._alone = self._decode(["a"])
        self._rest: dict[str, str] = {}

    def first(self, token: str) -> str:
        """Return the token's text at the beginning."""
        return self._decode([token])

    def rest(self, token: str) -> str:
        """Return the token's text anywhere else."""
        known = self._rest.get(token)
        if known is None:
            known = self._rest[token] = self._decode(["a", token])[len(self._alone) :]
        return known

    def token_bytes(self, token: str) -> bytes:
        """Return the token's text with its leading space."""
        return self.rest(token).encode("utf-8")

    def first_bytes(self, token: str) -> bytes:
        return self.first(token).encode("utf-8")

    def settled_text(self, token: str) -> str | None:
        return self.rest(token)

    def start(self) -> TextStream:
        """Return a stream that only tracks whether a token has come."""
        return _ByTokenStream(self)

    def _decode(self, tokens: list[str]) -> str:
        return " ".join(tokens) if self._raw.decoder is None else self._raw.decoder.decode(tokens)


class _ByTokenStream:
    def __init__(self, text: ByTokenText) -> None:
        self._text = text
        self.is_settled = False

    def push(self, tokens: Iterable[str]) -> str:
        pieces: list[str] = []
        for token in tokens:
            pieces.append(self._text.rest(token) if self.is_settled else self._text.first(token))
            self.is_settled = True
        return "".join(pieces)

    def finish(self) -> str:
        return ""


class OpaqueText:
    """An unknown decoder: a later token may change the text of an earlier one, so no text is certain before the end."""

    decodes_independently = False

    def __init__(self, raw: RawTokenizer) -> None:
        self._raw = raw

    def decode(self, tokens: list[str]) -> str:
        """Decode all tokens at once."""
        return self._raw.decoder.decode(tokens) if self._raw.decoder is not None else " ".join(tokens)

    def token_bytes(self, token: str) -> bytes:
        """Return the token decoded alone, as an approximation."""
        return self.decode([token]).encode("utf-8")

    def first_bytes(self, token: str) -> bytes:
        return self.token_bytes(token)

    def settled_text(self, token: str) -> str | None:
        """Return None, because no text is certain before the end."""
        return None

    def start(self) -> TextStream:
        """Return a stream that collects all tokens until the end."""
        return _OpaqueStream(self)


class _OpaqueStream:
    def __init__(self, text: OpaqueText) -> None:
        self._text = text
        self._tokens: list[str] = []
        self.is_settled = False

    def push(self, tokens: Iterable[str]) -> str:
        self._tokens.extend(tokens)
        return ""

    def finish(self) -> str:
        text = self._text.decode(self._tokens)
        self._tokens.clear()
        return text
