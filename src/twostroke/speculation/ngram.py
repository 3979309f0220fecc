"""Prompt lookup: drafts the tokens that followed an earlier occurrence of the last few tokens.

(Saxena 2023, prompt lookup decoding; Yang et al. 2023, inference with reference.) It needs no weights, and works well
where an answer repeats its prompt or itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from twostroke.speculation.proposer import DraftRequest, Drafts, TokenIds


class NgramProposer:
    """Proposer that looks for the longest ending of the text that occurred before, the latest occurrence first.

    Args:
        max_ngram: most tokens of an ending; a longer one would find the same place.
        min_ngram: fewest tokens of an ending; a shorter match is taken for chance and drafts nothing.
    """

    def __init__(self, *, max_ngram: int, min_ngram: int) -> None:
        assert 1 <= min_ngram <= max_ngram, f"endings of {min_ngram} to {max_ngram} tokens"
        self._most = max_ngram
        self._fewest = min_ngram

    def propose(self, requests: Sequence[DraftRequest]) -> list[Drafts]:
        return [Drafts(self._lookup(request.token_ids, request.num_drafts)) for request in requests]

    def forget(self, row: int, num_tokens: int) -> None:
        """Do nothing, because nothing is kept."""

    def _lookup(self, tokens: TokenIds, num_drafts: int) -> tuple[int, ...]:
        """Return the tokens after the match; if they reach the end of the text, the text is taken to repeat itself.

        ```
        text   a b c d e a b c|          ending: a b c, found at 0
        drafts                 d e a b   after it
        ```
        """
        last = len(tokens) - 1
        if num_drafts < 1 or last < 1:
            return ()
        ends = np.flatnonzero(tokens[:last] == tokens[last])
        length = min(1, len(ends))
        while 0 < length < self._most:
            longer = ends[ends >= length]
            longer = longer[tokens[longer - length] == tokens[last - length]]
            if not len(longer):
                break
            ends, length = longer, length + 1
        if length < self._fewest:
            return ()
        begin = int(ends[-1]) + 1
        period = last + 1 - begin
        return tuple(tokens[begin + np.arange(num_drafts) % period].tolist())
