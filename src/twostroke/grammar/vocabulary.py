"""A model's tokens as llguidance wants them: bytes, in one list of ids."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from llguidance import LLTokenizer, TokenizerWrapper

_WORD_BITS = 32


class TokenReader(Protocol):
    """What a tokenizer has to tell; tokenizer.Tokenizer does."""

    @property
    def reads_alone(self) -> bool:
        """Whether a text is exactly its first token's bytes and then the bytes of the others."""
        ...

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Tokens that are no text."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds in the middle of a text; nothing for an id without a token."""
        ...

    def all_token_bytes(self, count: int) -> tuple[list[bytes], list[bytes]]:
        """What tokens 0 to `count` add in the middle of a text, and what they add at its beginning."""
        ...


class GuidanceVocabulary:
    """The list, and llguidance's trie of it.

    ```
    ids of the list    0 … vocab_size    [ num_words * 32 …                            ]
    stand for          tokens            [ the same tokens at the beginning of a text   ]
    ```

    The second part is there only for tokenizers that strip a space off the beginning of a text (SentencePiece): there
    " yes" is the token that says "yes" first. Without it such models could begin with their unusual tokens only.

    Args:
        tokens: reads the tokens.
        vocab_size: columns of the model's logits; those without a token are never allowed.
        eos_token_ids: allowed where a text may end, and nowhere else.
        draws: many masks are to be made, so llguidance puts tokens together that many grammars allow (its "slices").
    """

    def __init__(
        self, tokens: TokenReader, vocab_size: int, eos_token_ids: Collection[int], *, draws: bool = True
    ) -> None:
        self.num_words = -(-vocab_size // _WORD_BITS)
        texts, first = tokens.all_token_bytes(vocab_size)
        self.first_id = 0 if first == texts else self.num_words * _WORD_BITS
        """What is added to an id at the beginning of a text."""
        offsets = (0, self.first_id) if self.first_id else (0,)
        if self.first_id:
            texts += [b""] * (self.first_id - vocab_size) + first
        special = [i + offset for i in {*tokens.special_token_ids, *eos_token_ids} for offset in offsets]
        ends = [i + offset for i in sorted(eos_token_ids) for offset in offsets]
        if not ends:  # a model without one still has to be told that nothing may follow: by an id that it cannot draw
            ends = [max(len(texts), self.num_words * _WORD_BITS)]
            texts += [b""] * (ends[0] - len(texts)) + [b"<end>"]
            special.append(ends[0])
        self.tokenizer = LLTokenizer(_TokenList(texts, special, ends[0]), eos_token=ends, slices=None if draws else [])
        self.num_list_words = -(-len(texts) // _WORD_BITS)


class _TokenList(TokenizerWrapper):
    """The attributes that LLTokenizer asks for."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], special_token_ids: Sequence[int], eos_token_id: int) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special_token_ids, eos_token_id

    def __call__(self, text: str) -> list[int]:
        """Never asked: what is certain is not taken at once (see notation)."""
        raise NotImplementedError(text)
