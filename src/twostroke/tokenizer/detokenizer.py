"""Token ids to text while they come."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from twostroke.tokenizer.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """The text of one generation in pieces that never have to be taken back.

    >>> detokenizer = IncrementalDetokenizer(tokenizer)                              # doctest: +SKIP
    >>> [detokenizer.push([i]) for i in tokenizer.encode("a \\N{GRINNING FACE}")]    # doctest: +SKIP
    ['a', ' ', '', '\\N{GRINNING FACE}']

    Whatever the ids and however they are chunked, the pieces and `finish()` add up to `tokenizer.decode(all_ids)`,
    and no piece ends inside a character.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, shown_token_ids: frozenset[int] = frozenset()
    ) -> None:
        self._token = tokenizer.token
        self._whole_texts = tokenizer.whole_texts
        self._skipped = tokenizer.special_token_ids - shown_token_ids if skip_special_tokens else frozenset[int]()
        self._stream = tokenizer.text.start()

    def push(self, token_ids: Sequence[int]) -> str:
        """Takes the next ids; returns the text that is certain now, which may be empty."""
        stream = self._stream
        if len(token_ids) == 1 and stream.is_settled:
            text = self._whole_texts[token_ids[0]]
            if text is not None:
                return text
        find, skipped = self._token, self._skipped
        known = [token for i in token_ids if i not in skipped and (token := find(i)) is not None]
        return stream.push(known)

    def finish(self) -> str:
        """The generation has ended: returns what was held back, an incomplete character as U+FFFD."""
        return self._stream.finish()


class TokenTexts:
    """What each token of one generation adds to its text; the arguments are those of IncrementalDetokenizer."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, shown_token_ids: frozenset[int]) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens, shown_token_ids)

    def of(self, token_ids: Sequence[int]) -> Iterator[str]:
        """Take the next ids; yield a text for each, "" where a token adds nothing or only a part of a character."""
        for token_id in token_ids:
            yield self._detokenizer.push((token_id,))
