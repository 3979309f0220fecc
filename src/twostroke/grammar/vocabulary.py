"""Vocabulary of a model as llguidance needs it: the bytes of each token, in one list of ids."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from llguidance import LLTokenizer, TokenizerWrapper

_WORD_BITS = 32


class TokenReader(Protocol):
    """Part of a tokenizer that grammars need; implemented by tokenizer.Tokenizer."""

    @property
    def decodes_independently(self) -> bool:
        """Whether a text is exactly its first token's bytes followed by the bytes of the other tokens."""
        ...

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids of tokens that are not text."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds in the middle of a text; empty for an id without a token."""
        ...

    def all_token_bytes(self, count: int) -> tuple[list[bytes], list[bytes]]:
        """Return the bytes that tokens 0 to `count` add in the middle of a text, and those at its beginning."""
        ...


class GuidanceVocabulary:
    """Token list for llguidance, and llguidance's trie of it.

    ```
    ids of the list    0 … vocab_size    [ num_words * 32 …                            ]
    stand for          tokens            [ the same tokens at the beginning of a text   ]
    ```

    The second part exists only for tokenizers that strip a space off the beginning of a text (SentencePiece). There
    the token " yes" writes "yes" at the beginning. Without this part such models could begin only with unusual tokens.

    Args:
        tokens: reader of the tokens.
        vocab_size: columns of the model's logits; columns without a token are never allowed.
        eos_token_ids: tokens allowed only where a text may end.
        draws: whether many masks will be made; if so, llguidance groups tokens that many grammars allow ("slices").
    """

    def __init__(
        self, tokens: TokenReader, vocab_size: int, eos_token_ids: Collection[int], *, draws: bool = True
    ) -> None:
        self.num_words = -(-vocab_size // _WORD_BITS)
        texts, first = tokens.all_token_bytes(vocab_size)
        self.first_id = 0 if first == texts else self.num_words * _WORD_BITS
        """Offset added to an id at the beginning of a text."""
        offsets = (0, self.first_id) if self.first_id else (0,)
        if self.first_id:
            texts += [b""] * (self.first_id - vocab_size) + first
        special = [i + offset for i in {*tokens.special_token_ids, *eos_token_ids} for offset in offsets]
        ends = [i + offset for i in sorted(eos_token_ids) for offset in offsets]
        if not ends:  # llguidance needs an end token: without one, use an id that the model cannot sample
            ends = [max(len(texts), self.num_words * _WORD_BITS)]
            texts += [b""] * (ends[0] - len(texts)) + [b"<end>"]
            special.append(ends[0])
        self.tokenizer = LLTokenizer(_TokenList(texts, special, ends[0]), eos_token=ends, slices=None if draws else [])
        self.num_list_words = -(-len(texts) // _WORD_BITS)


class _TokenList(TokenizerWrapper):
    """Adapter with the attributes that LLTokenizer requires."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], special_token_ids: Sequence[int], eos_token_id: int) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special_token_ids, eos_token_id

    def __call__(self, text: str) -> list[int]:
        """Raise: never called, because the grammar forces no text (`no_forcing`)."""
        raise NotImplementedError(text)
