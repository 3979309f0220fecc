"""Log-probabilities of a prompt's tokens, stored as the engine sends them and decoded when they are read.

A prompt of 8,000 tokens with 20 log-probabilities each is 168,000 objects. Creating them takes a large part of a
second, which must not delay the tokens of other requests. So the reader creates them, in its own thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from twostroke.batch import TokenLogprobs
from twostroke.outputs import Logprob, LogprobsAtPosition
from twostroke.tokenizer.tokenizer import Tokenizer


class PromptScores(Sequence[LogprobsAtPosition | None]):
    """A sequence with one entry per prompt position; the first is None, and others are until the engine sends them.

    Args:
        tokenizer: of the model.
        num_tokens: of the prompt.
    """

    def __init__(self, tokenizer: Tokenizer, num_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._entries: list[TokenLogprobs | None] = [None] * num_tokens
        self.num_missing = max(0, num_tokens - 1)
        """Number of positions that the engine has not sent yet; the first has no prediction."""
        self.num_decoded = 0
        """Number of entries decoded for readers."""

    def put(self, start: int, entries: Sequence[TokenLogprobs]) -> None:
        """Store the entries of positions from `start` on; none of them was stored before."""
        self._entries[start : start + len(entries)] = entries
        self.num_missing -= len(entries)

    def __len__(self) -> int:
        return len(self._entries)

    @overload
    def __getitem__(self, index: int) -> LogprobsAtPosition | None: ...

    @overload
    def __getitem__(self, index: slice) -> list[LogprobsAtPosition | None]: ...

    def __getitem__(self, index: int | slice) -> LogprobsAtPosition | list[LogprobsAtPosition | None] | None:
        """Return the entry at a position, or a list for a slice."""
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


def decode_logprobs(entry: TokenLogprobs, tokenizer: Tokenizer) -> LogprobsAtPosition:
    """Return log-probabilities by token id, the chosen token first, each with its rank and text.

    The chosen token may or may not be among the most likely ones; it is listed once.
    """
    chosen, *likely = entry.token_ids
    ranks = dict(zip(likely, _ranks(entry), strict=True)) | {chosen: entry.rank}
    return {
        token_id: Logprob(logprob, ranks[token_id], tokenizer.decoded_token(token_id))
        for token_id, logprob in dict(zip(entry.token_ids, entry.logprobs, strict=True)).items()
    }


def _ranks(entry: TokenLogprobs) -> list[int]:
    """Return the ranks of the most likely tokens; the chosen token's rank is skipped if it is not among them."""
    chosen, *likely = entry.token_ids
    left_out = chosen not in likely
    return [place + (left_out and place >= entry.rank) for place in range(1, len(likely) + 1)]
