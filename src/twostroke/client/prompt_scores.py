"""Log-probabilities of a prompt's tokens, kept as the engine tells them and decoded where they are read.

A prompt of 8,000 tokens with 20 log-probabilities each is 168,000 objects. Making them takes a good part of a second,
which must not pass between the tokens of other requests: whoever wants them makes them, in a thread of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from twostroke.batch import TokenLogprobs
from twostroke.client.completion_stream import decode_logprobs
from twostroke.outputs import LogprobsAtPosition
from twostroke.tokenizer.tokenizer import Tokenizer


class PromptScores(Sequence[LogprobsAtPosition | None]):
    """One entry for each position of a prompt; the first has none, and others are None until the engine tells them.

    Args:
        tokenizer: of the model.
        num_tokens: of the prompt.
    """

    def __init__(self, tokenizer: Tokenizer, num_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._entries: list[TokenLogprobs | None] = [None] * num_tokens
        self.num_missing = max(0, num_tokens - 1)
        """Positions that the engine has not told yet; nothing predicts the first."""
        self.num_decoded = 0
        """Entries that were made for readers."""

    def put(self, start: int, entries: Sequence[TokenLogprobs]) -> None:
        """Take those of the positions from `start` on, none of which came before."""
        self._entries[start : start + len(entries)] = entries
        self.num_missing -= len(entries)

    def __len__(self) -> int:
        return len(self._entries)

    @overload
    def __getitem__(self, index: int) -> LogprobsAtPosition | None: ...

    @overload
    def __getitem__(self, index: slice) -> list[LogprobsAtPosition | None]: ...

    def __getitem__(self, index: int | slice) -> LogprobsAtPosition | list[LogprobsAtPosition | None] | None:
        """Return what is at a position, or a list of what is at several."""
        if isinstance(index, slice):
            return [self._decoded(entry) for entry in self._entries[index]]
        return self._decoded(self._entries[index])

    __hash__ = None  # pyright: ignore[reportAssignmentType] (it grows)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def __repr__(self) -> str:
        return repr(list(self))

    def _decoded(self, entry: TokenLogprobs | None) -> LogprobsAtPosition | None:
        if entry is None:
            return None
        self.num_decoded += 1
        return decode_logprobs(entry, self._tokenizer)
