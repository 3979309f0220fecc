"""Features of the tokens that the target computed lately, kept for drafters."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from twostroke.speculation.proposer import TargetStep


class _Step:
    """Features of a step [num_tokens, size]; None once they were dropped."""

    __slots__ = ("features",)

    def __init__(self, features: Tensor) -> None:
        self.features: Tensor | None = features


class _FeatureSpan(NamedTuple):
    """Consecutive positions of a sequence, computed in one step."""

    step: _Step
    first: int
    """Index of the first of them in the step."""
    begin: int
    """Position of the first of them."""
    num_tokens: int

    @property
    def end(self) -> int:
        """Position after the last."""
        return self.begin + self.num_tokens


class FeatureHistory:
    """Features by sequence and position, of a limited number of tokens of the latest steps.

    Keeping them costs a step almost nothing, so a drafter need not read along while no drafts are wanted. It catches up
    when it is asked, with one pass over everything still kept.

    ```
    steps          | s1: a a a | s2: a b b | s3: a b | s4: a b |     the oldest is dropped when there are too many
    tokens
    of sequence b                    5 6       7         8           consecutive positions, the last ones
    ```

    Args:
        layers: layers of the target whose inputs are the features.
        max_tokens: most tokens kept besides the latest step.
    """

    def __init__(self, layers: tuple[int, ...], max_tokens: int) -> None:
        self.layers = layers
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._steps: deque[_Step] = deque()
        self._pieces: dict[int, deque[_FeatureSpan]] = {}

    def add(self, step: TargetStep) -> None:
        """Add the features of a computed step."""
        kept = _Step(step.features)
        self._steps.append(kept)
        self._num_tokens += len(step.features)
        while self._num_tokens > self._max_tokens and len(self._steps) > 1:
            oldest = self._steps.popleft()
            assert oldest.features is not None, "only here features go"
            self._num_tokens -= len(oldest.features)
            oldest.features = None
        for row, first, begin, num_tokens, _ in step.spans:
            pieces = self._pieces.get(row)
            if pieces is None:
                pieces = self._pieces[row] = deque()
            while pieces and (pieces[0].step.features is None or pieces[-1].end != begin):
                pieces.popleft()
            if num_tokens:
                pieces.append(_FeatureSpan(kept, first, begin, num_tokens))

    def forget(self, row: int) -> None:
        """Drop a sequence that has ended, or will be computed again."""
        self._pieces.pop(row, None)

    def span(self, row: int) -> range:
        """Return the positions of the sequence whose features are kept, without a gap."""
        pieces = self._pieces.get(row, ())
        end = pieces[-1].end if pieces else 0
        return range(next((piece.begin for piece in pieces if piece.step.features is not None), end), end)

    def features(self, wanted: Sequence[tuple[int, range]]) -> Tensor:
        """Return the features of rows and positions within their spans, one after the other. [num_tokens, size]"""
        places: dict[_Step, list[int]] = {}  # by step, the rows wanted
        ranks: dict[_Step, list[int]] = {}  # by step, their positions in the result
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
