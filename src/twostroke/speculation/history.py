"""What the target made of the tokens that it read lately, kept for whoever may want to draft from it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from twostroke.speculation.proposer import TargetStep


class _Step:
    """Features of a step [num_tokens, size]; None when they had to go."""

    __slots__ = ("features",)

    def __init__(self, features: Tensor) -> None:
        self.features: Tensor | None = features


class _Piece(NamedTuple):
    """Consecutive positions of a sequence, computed in one step."""

    step: _Step
    first: int
    """Place of the first of them in the step."""
    begin: int
    """Its position."""
    num_tokens: int

    @property
    def end(self) -> int:
        """Position behind the last."""
        return self.begin + self.num_tokens


class FeatureHistory:
    """Features by sequence and position, of so many tokens of the latest steps.

    Keeping them costs a step next to nothing, so that a drafter need not read along where nobody drafts: it catches up
    when it is asked, with one pass over everything that is still here.

    ```
    steps          | s1: a a a | s2: a b b | s3: a b | s4: a b |     the oldest one goes when there are too many tokens
    of sequence b                    5 6       7         8           consecutive positions, the last ones
    ```

    Args:
        layers: of the target, whose inputs are the features.
        max_tokens: kept at most, beside the latest step.
    """

    def __init__(self, layers: tuple[int, ...], max_tokens: int) -> None:
        self.layers = layers
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._steps: deque[_Step] = deque()
        self._pieces: dict[int, deque[_Piece]] = {}

    def add(self, step: TargetStep) -> None:
        """A step was computed."""
        kept = _Step(step.features)
        self._steps.append(kept)
        self._num_tokens += len(step.features)
        while self._num_tokens > self._max_tokens and len(self._steps) > 1:
            oldest = self._steps.popleft()
            assert oldest.features is not None, "only here features go"
            self._num_tokens -= len(oldest.features)
            oldest.features = None
        for row, first, begin, num_tokens, _ in step.reads:
            pieces = self._pieces.get(row)
            if pieces is None:
                pieces = self._pieces[row] = deque()
            while pieces and (pieces[0].step.features is None or pieces[-1].end != begin):
                pieces.popleft()
            if num_tokens:
                pieces.append(_Piece(kept, first, begin, num_tokens))

    def forget(self, row: int) -> None:
        """The sequence has ended, or will be computed again."""
        self._pieces.pop(row, None)

    def span(self, row: int) -> range:
        """Positions of the sequence whose features are here, without a gap."""
        pieces = self._pieces.get(row, ())
        end = pieces[-1].end if pieces else 0
        return range(next((piece.begin for piece in pieces if piece.step.features is not None), end), end)

    def features(self, wanted: Sequence[tuple[int, range]]) -> Tensor:
        """[num_tokens, size]: of rows and positions that lie within their spans, one after the other."""
        places: dict[_Step, list[int]] = {}  # of the steps, what is wanted of each
        ranks: dict[_Step, list[int]] = {}  # and where it goes in the answer
        num_found = 0
        for row, positions in wanted:
            for piece in self._pieces[row]:
                if piece.end <= positions.start:
                    continue
                begin, end = max(piece.begin, positions.start), min(piece.end, positions.stop)
                if begin >= end:
                    break
                offset = piece.first - piece.begin
                places.setdefault(piece.step, []).extend(range(begin + offset, end + offset))
                ranks.setdefault(piece.step, []).extend(range(num_found, num_found + end - begin))
                num_found += end - begin
        assert num_found == sum(len(positions) for _, positions in wanted), "asked for what is not here"
        parts: list[Tensor] = []
        for step, chosen in places.items():
            assert step.features is not None, "asked for what is no longer here"
            parts.append(step.features[torch.tensor(chosen, device=step.features.device)])
        if len(parts) == 1:
            return parts[0]
        order = np.argsort(np.concatenate([np.array(rank) for rank in ranks.values()]))
        return torch.cat(parts)[torch.from_numpy(order).to(parts[0].device)]
