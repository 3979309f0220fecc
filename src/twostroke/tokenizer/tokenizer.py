"""Conversion of text to token ids and back, also incrementally, by the rules in the model's own folder."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType

from tokenizers import AddedToken, normalizers
from tokenizers import Tokenizer as RawTokenizer

from twostroke.errors import CorruptCheckpoint, InvalidPrompt, ModelNotFound
from twostroke.lfs_pointer import remedy_for
from twostroke.log import get_logger
from twostroke.tokenizer.settings import TokenizerSettings
from twostroke.tokenizer.token_text import ByteLevelText, TextStream, TokenText, make_token_text
from twostroke.tokenizer.windows import WINDOW_CHARS, WindowEncoder

log = get_logger(__name__)

NFC_CLASSES = frozenset({"Qwen2Tokenizer", "Qwen2TokenizerFast"})
"""Tokenizer classes that compose characters (NFC) even if their tokenizer.json lacks the normalizer."""


LONG_TEXT = 1024
"""Characters from which on encoding releases the GIL; for a shorter text, releasing it costs more than encoding."""
WINDOWED_CHARS = 4 * WINDOW_CHARS
"""Characters from which on a text is encoded window by window, if only its ids are wanted."""
_DECODED_TOKENS = 4096
"""Tokens per slice when many are decoded."""


class Tokenizer:
    """The tokenizer of one model; safe to share between threads.

    It encodes like `transformers.AutoTokenizer` for the same folder. tokenizer.json decides, begin and end tokens
    included; tokenizer_config.json may add special tokens.
    """

    def __init__(self, raw: RawTokenizer, settings: TokenizerSettings) -> None:
        # both would change a prompt without a request for it
        raw.no_truncation()
        raw.no_padding()
        if raw.normalizer is None and settings.tokenizer_class in NFC_CLASSES:
            log.info("normalizer: none in tokenizer.json -> NFC (tokenizer_class is %s)", settings.tokenizer_class)
            raw.normalizer = normalizers.NFC()
        _add_tokens(raw, settings)
        self._raw = raw
        self._named_tokens = settings.named_tokens
        self._chat_templates = settings.chat_templates
        self._special_token_ids = frozenset(i for i, t in raw.get_added_tokens_decoder().items() if t.special)
        self._tokens = _tokens_by_id(raw)
        self._text = make_token_text(raw)
        self._all_bytes: list[bytes] | None = None
        """Bytes of each token by id, if tokens are bytes; else None."""
        if isinstance(self._text, ByteLevelText):
            self._all_bytes = self._text.all_bytes([token or "" for token in self._tokens])
        self._max_token_bytes = self._longest_token()
        self._windows = WindowEncoder(raw, self._text)
        self.settled_texts = _SettledTexts(self)
        """Text that each token adds to a settled TextStream; None if it is not certain, and for special tokens."""
        self._check_framing(settings.add_bos_token)

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Read the tokenizer of a model folder.

        Raises:
            ModelNotFound: there is no folder, or no tokenizer.json in it.
            CorruptCheckpoint: a file cannot be read as a tokenizer or its settings.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not folder.is_dir():
            raise ModelNotFound(f"{folder}: folder not found, so there is no tokenizer. Give the folder of a model.")
        if not path.is_file():
            raise ModelNotFound(
                f"{folder}: has no tokenizer.json. Give a tokenizer folder that has one (--tokenizer FOLDER), "
                "use the one in the package (--tokenizer embedded), or convert the existing files with transformers: "
                "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)."
            )
        try:
            raw = RawTokenizer.from_file(str(path))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # bad files raise plain Exceptions, or panics, which are not Exceptions
            remedy = remedy_for(path, "Fetch the file again.")
            raise CorruptCheckpoint(f"{path}: cannot be read as a tokenizer ({error}). {remedy}") from error
        return cls(raw, TokenizerSettings.from_folder(folder))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text.

        Args:
            text: any text without lone surrogates; special tokens written in it become those tokens if the tokenizer's
                own rules say so.
            add_special_tokens: whether to add the tokens that the model expects around a text (usually a begin token).

        Raises:
            InvalidPrompt: the tokenizer has no ids for the text, and no token for unknown text either.
        """
        try:
            if len(text) < LONG_TEXT:
                return self._raw.encode(text, add_special_tokens=add_special_tokens).ids
            # only the batch form releases the GIL
            return self._raw.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic inside the library is not an Exception, and must not end the engine
            raise InvalidPrompt(f"the model's tokenizer cannot encode the text ({error}).") from error

    def encode_compact(self, text: str, add_special_tokens: bool = True) -> Sequence[int]:
        """Encode a text of any length in little more memory than its ids need, at four bytes each.

        This holds if tokens are bytes and words are found by regular expressions. Other tokenizers use 200 bytes per
        character.
        """
        frame = self._frame if add_special_tokens else ((), ())
        if len(text) < WINDOWED_CHARS or frame is None:
            return self.encode(text, add_special_tokens)
        try:
            found = self._windows.encode(text, frame)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # as in encode
            raise InvalidPrompt(f"the model's tokenizer cannot encode the text ({error}).") from error
        return self.encode(text, add_special_tokens) if found is None else found

    @functools.cached_property
    def _frame(self) -> tuple[Sequence[int], Sequence[int]] | None:
        """Ids put before and after the ids of a text; None if they cannot be told apart from the text's own."""
        plain, framed = self.encode("a", add_special_tokens=False), self.encode("a")
        places = [i for i in range(len(framed)) if framed[i : i + len(plain)] == plain]
        return (framed[: places[0]], framed[places[0] + len(plain) :]) if len(places) == 1 else None

    def min_num_tokens(self, text: str) -> int:
        """Return a lower bound on the tokens of a text, found without encoding it; 0 if there is none.

        There is a bound if tokens are bytes and the text is encoded unchanged or composed (NFC). Composing leaves at
        least a third of the characters (Unicode Standard Annex 15, table 16: the largest growth of a decomposition).
        """
        if self._max_token_bytes is None:
            return 0
        return len(text) // (1 if self._raw.normalizer is None else 3) // self._max_token_bytes

    def _longest_token(self) -> int | None:
        """Return the bytes of the longest token; None if texts are not cut into bytes."""
        if self._all_bytes is None or not isinstance(self._raw.normalizer, (NoneType, normalizers.NFC)):
            return None
        return max(map(len, self._all_bytes), default=None)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; unknown ids are left out, and broken UTF-8 becomes U+FFFD."""
        if len(token_ids) > WINDOWED_CHARS:
            return self._decode_by_slices(token_ids, skip_special_tokens)
        ids = list(token_ids)
        if len(ids) < LONG_TEXT:
            return self._raw.decode(ids, skip_special_tokens=skip_special_tokens)
        # as in encode: the batch form releases the GIL
        return self._raw.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]

    def _decode_by_slices(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Decode in slices without the library, which takes 80 bytes for each token."""
        left_out = self._special_token_ids if skip_special_tokens else frozenset[int]()
        stream = self._text.start()
        texts: list[str] = []
        for begin in range(0, len(token_ids), _DECODED_TOKENS):
            known = (self.token(i) for i in token_ids[begin : begin + _DECODED_TOKENS] if i not in left_out)
            texts.append(stream.push(token for token in known if token is not None))
        return "".join([*texts, stream.finish()])

    def token(self, token_id: int) -> str | None:
        """Return the vocabulary entry of an id as written there; None for an unknown id."""
        return self._tokens[token_id] if 0 <= token_id < len(self._tokens) else None

    def tokens(self, token_ids: Iterable[int]) -> list[str]:
        """Return the vocabulary entries of ids; an unknown id gives an empty string."""
        return [self.token(token_id) or "" for token_id in token_ids]

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one token adds in the middle of a text; none for an unknown id."""
        token = self.token(token_id)
        return b"" if token is None else self._text.token_bytes(token)

    def first_token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one token adds at the beginning of a text; none for an unknown id."""
        token = self.token(token_id)
        return b"" if token is None else self._text.first_bytes(token)

    def all_token_bytes(self, count: int) -> tuple[list[bytes], list[bytes]]:
        """Return `token_bytes` and `first_token_bytes` of all ids below `count`; one list twice if they are equal."""
        if self._all_bytes is None:
            ids = range(count)
            return list(map(self.token_bytes, ids)), list(map(self.first_token_bytes, ids))
        found = self._all_bytes[:count] + [b""] * (count - len(self._all_bytes))
        return found, found

    def decoded_token(self, token_id: int) -> str:
        """Return `token_bytes` as text for display; part of a character becomes U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_id(self, token: str) -> int | None:
        """Return the id of a vocabulary entry; None if there is no such entry."""
        return self._raw.token_to_id(token)

    @property
    def decodes_independently(self) -> bool:
        """Whether a text is exactly its first token's bytes followed by the bytes of the others."""
        return self._text.decodes_independently

    @property
    def text(self) -> TokenText:
        """The rule by which tokens become text."""
        return self._text

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids of tokens that control the model and are not text."""
        return self._special_token_ids

    @property
    def vocab_size(self) -> int:
        """Number of vocabulary entries, added tokens included."""
        return self._raw.get_vocab_size(with_added_tokens=True)

    @property
    def max_token_id(self) -> int:
        """The highest id; vocab_size - 1 unless ids have gaps."""
        return len(self._tokens) - 1

    @property
    def named_tokens(self) -> Mapping[str, str]:
        """Role to token text: bos_token, eos_token, …"""
        return self._named_tokens

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """Name to Jinja source; empty for a model without chat templates."""
        return self._chat_templates

    @property
    def bos_token_id(self) -> int | None:
        """Id of the token that begins every text, if the model has one."""
        return self._named_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """Id of the token that ends a text; models may have more (`settings.read_eos_token_ids`)."""
        return self._named_id("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        """Id of the padding token; unused here, but embeddings may treat it specially."""
        return self._named_id("pad_token")

    def check_vocab(self, model_vocab_size: int) -> None:
        """Raise if the model has no embedding row for some token; more rows than tokens are normal padding.

        Raises:
            CorruptCheckpoint: tokenizer and model do not belong together.
        """
        if self.max_token_id >= model_vocab_size:
            raise CorruptCheckpoint(
                f"the tokenizer's highest token id is {self.max_token_id}, but the model has embeddings for ids up to "
                f"{model_vocab_size - 1} only (vocab_size {model_vocab_size}). Use the tokenizer of this model."
            )

    def _named_id(self, role: str) -> int | None:
        token = self._named_tokens.get(role)
        return None if token is None else self._raw.token_to_id(token)

    def _check_framing(self, add_bos_token: bool | None) -> None:
        """Encode an empty text to detect invalid begin and end tokens; log if tokenizer_config.json disagrees."""
        try:
            frame = self.encode("")
        except InvalidPrompt as error:
            raise CorruptCheckpoint(f"tokenizer.json: its post_processor cannot be used: {error}") from error
        adds_bos_token = self.bos_token_id is not None and self.bos_token_id in frame
        if add_bos_token is not None and add_bos_token != adds_bos_token and self.bos_token_id is not None:
            # transformers follows tokenizer.json, too
            log.info(
                "add_bos_token: %s in tokenizer_config.json -> %s by tokenizer.json", add_bos_token, adds_bos_token
            )


def _add_tokens(raw: RawTokenizer, settings: TokenizerSettings) -> None:
    """Add the tokens of tokenizer_config.json that tokenizer.json lacks; existing tokens keep their ids."""
    known = {token.content for token in raw.get_added_tokens_decoder().values()}
    raw.add_tokens([token for token in settings.added_tokens if token.content not in known])
    known_special = {token.content for token in raw.get_added_tokens_decoder().values() if token.special}
    missing: list[AddedToken | str] = [t for t in settings.special_tokens if t.content not in known_special]
    raw.add_special_tokens(missing)


def _tokens_by_id(raw: RawTokenizer) -> list[str | None]:
    """Return the vocabulary entries by id, None for gaps; a look-up in the library takes ten times as long."""
    ids = raw.get_vocab(with_added_tokens=True)
    tokens: list[str | None] = [None] * (max(ids.values(), default=-1) + 1)
    for token, token_id in ids.items():
        tokens[token_id] = token
    for token_id in raw.get_added_tokens_decoder():  # decoders get added tokens in this spelling
        tokens[token_id] = raw.id_to_token(token_id)
    return tokens


class _SettledTexts(dict[int, str | None]):
    """Cache of the text that each token adds to a settled stream, by id."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> str | None:
        token = None if token_id in self._tokenizer.special_token_ids else self._tokenizer.token(token_id)
        text = self[token_id] = None if token is None else self._tokenizer.text.settled_text(token)
        return text


class IncrementalDetokenizer:
    """The text of one generation, in pieces that never have to be taken back.

    >>> detokenizer = IncrementalDetokenizer(tokenizer)                              # doctest: +SKIP
    >>> [detokenizer.push([i]) for i in tokenizer.encode("a \\N{GRINNING FACE}")]    # doctest: +SKIP
    ['a', ' ', '', '\\N{GRINNING FACE}']

    However the ids are chunked, the pieces and `finish()` add up to `tokenizer.decode(all_ids)`, and no piece ends
    inside a character.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, shown_token_ids: frozenset[int] = frozenset()
    ) -> None:
        self._token = tokenizer.token
        self._whole_texts = tokenizer.settled_texts
        self._skipped = tokenizer.special_token_ids - shown_token_ids if skip_special_tokens else frozenset[int]()
        text = tokenizer.text
        self._start = text.start
        self._stream: TextStream | None = None if isinstance(text, ByteLevelText) else text.start()
        """Stream that holds back uncertain text; None until a token needs it, possibly never if tokens are bytes."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Add the next ids; return the text that is certain now, which may be empty."""
        stream = self._stream
        if len(token_ids) == 1 and (stream is None or stream.is_settled):
            text = self._whole_texts[token_ids[0]]
            if text is not None:
                return text
        find, skipped = self._token, self._skipped
        known = [token for i in token_ids if i not in skipped and (token := find(i)) is not None]
        stream = self._stream = stream or self._start()
        return stream.push(known)

    def finish(self) -> str:
        """End the generation; return the text held back, with an incomplete character as U+FFFD."""
        return "" if self._stream is None else self._stream.finish()


class TokenTexts:
    """The text that each token of one generation adds; arguments as for IncrementalDetokenizer."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, shown_token_ids: frozenset[int]) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens, shown_token_ids)

    def of(self, token_ids: Sequence[int]) -> Iterator[str]:
        """Add the next ids; yield a text for each, "" if a token adds nothing or only part of a character."""
        for token_id in token_ids:
            yield self._detokenizer.push((token_id,))
