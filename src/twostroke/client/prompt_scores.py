"""Log-probabilities of a prompt's tokens, kept as the engine tells them and decoded where they are read.

A prompt of 8,000 tokens with 20 log-probabilities each is 168,000 objects. Making them takes a good part of a second,
which must not pass between the tokens of other requests: whoever wants them makes them, in a thread of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from twostroke.batch import TokenLogprobs
from twostroke.outputs import Logprob, LogprobsAtPosition
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


def decode_logprobs(entry: TokenLogprobs, tokenizer: Tokenizer) -> LogprobsAtPosition:
    """Log-probabilities by token id, the chosen token first, each with its rank and its own text.

    The chosen token may stand again among the most likely ones or be left out there; it is listed once.
    """
    chosen, *likely = entry.token_ids
    ranks = dict(zip(likely, _ranks(entry), strict=True)) | {chosen: entry.rank}
    return {
        token_id: Logprob(logprob, ranks[token_id], tokenizer.decoded_token(token_id))
        for token_id, logprob in dict(zip(entry.token_ids, entry.logprobs, strict=True)).items()
    }


def _ranks(entry: TokenLogprobs) -> list[int]:
    """Ranks of the most likely tokens; a place is left free for the chosen one when it is left out of them."""
    chosen, *likely = entry.token_ids
    left_out = chosen not in likely
    return [place + (left_out and place >= entry.rank) for place in range(1, len(likely) + 1)]
