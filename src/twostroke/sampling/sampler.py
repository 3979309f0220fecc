"""Logits to token ids for all rows at once; each row is independent of the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from twostroke.kernels.interface import Argmax, FilteredArgmax, GumbelArgmax
from twostroke.kernels.memory import send
from twostroke.sampling.filters import FilterColumns, apply_filters, effective_top_k
from twostroke.sampling.logprobs import PositionLogprobs, token_logprobs
from twostroke.sampling.noise import GumbelNoise
from twostroke.sampling.processors import process_logits
from twostroke.sampling.rowwise import (
    SLICE_ELEMENTS,
    finite_indices,
    lowest_argmax,
    put_rows_,
    ragged_argmax,
    row_maxima,
    take_rows,
)
from twostroke.sampling.state import SamplingRules, SamplingState
from twostroke.sampling_params import SamplingParams

NOT_FINITE = "the model's logits are not finite"
NOTHING_ALLOWED = (
    "no token is allowed next: structured_outputs, allowed_token_ids, bad_words and min_tokens exclude all. "
    "Allow more tokens, or lower min_tokens."
)

_Choose = Callable[[Tensor, Sequence[SamplingState]], Tensor]
"""Function from logits, float32 [r, V], to token ids, int64 [r]."""

_SMALLEST_TEMPERATURE = torch.finfo(torch.float32).tiny
"""Smallest temperature that float32 does not round to 0. With it every unequal logit already has no chance."""


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Tokens of all rows."""

    token_ids: Tensor
    """int64 [R]; undefined where the row has an error."""
    errors: dict[int, str]
    """Reasons why no token could be drawn, by row; the other rows are unaffected."""
    logprobs: list[PositionLogprobs | None]
    """Log-probabilities of each row; None where not requested, or after an error."""


class Sampler:
    """Sampler for one model on one device.

    A row takes only the steps it needs: greedy rows without processors are one argmax, rows without filters need no
    candidates, and rows with filters need noise for the kept candidates alone.
    """

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: Iterable[int] = (),
        device: torch.device | str = "cpu",
        gumbel_argmax: GumbelArgmax | None = None,
        filtered_argmax: FilteredArgmax | None = None,
        argmax: Argmax | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._noise = GumbelNoise(vocab_size, device)
        self._gumbel_argmax, self._filtered_argmax = gumbel_argmax, filtered_argmax
        self._argmax = argmax or lowest_argmax
        self._slice_elements = SLICE_ELEMENTS if torch.device(device).type == "cpu" else 2**24

    def rules(self, params: SamplingParams, bad_words_token_ids: Sequence[Sequence[int]] = ()) -> SamplingRules:
        """Prepare a request's parameters; its n sequences may share them."""
        return SamplingRules.compile(params, self.vocab_size, self._eos_token_ids, bad_words_token_ids)

    def sample(self, logits: Tensor, states: Sequence[SamplingState]) -> SampledTokens:
        """Draw the next token of every row. The states do not change; `append` tokens to them once they are final.

        Args:
            logits: float32 [R, V], unchanged.
            states: R of them, each at the position to draw for. Several may belong to one request (drafts).
        """
        token_ids, errors = self.draw(logits, states)
        return SampledTokens(token_ids, errors, self._logprobs(logits, token_ids, states, errors))

    def score(self, logits: Tensor, token_ids: Tensor, states: Sequence[SamplingState]) -> SampledTokens:
        """Return the result of `sample` for tokens drawn by `draw_early`, none of them -1."""
        return SampledTokens(token_ids, {}, self._logprobs(logits, token_ids, states, {}))

    def draw_early(self, logits: Tensor, states: Sequence[SamplingState]) -> Tensor | None:
        """Enqueue the draws of `sample` without waiting for the device, and return the token ids.

        Args:
            logits: float32 [R, V], unchanged.
            states: R of them.

        Returns:
            int64 [R]; -1 where `sample` has to draw the token, after an error or where the decision is too close. None
            if that applies to a whole kind of rows.
        """
        is_filtered = any(state.rules.has_filter and not state.rules.params.is_greedy for state in states)
        if is_filtered and self._filtered_argmax is None:
            return None
        token_ids = torch.zeros(len(states), dtype=torch.int64, device=logits.device)
        for is_changed in (False, True):
            rows = [row for row, state in enumerate(states) if state.changes_logits == is_changed]
            if not rows:
                continue
            some_states = [states[row] for row in rows]
            some_logits = logits if len(rows) == len(states) and not is_changed else take_rows(logits, rows)
            if is_changed:
                process_logits(some_logits, some_states)
            is_sound = torch.isfinite(row_maxima(some_logits)[:, 0])
            found = torch.where(is_sound, self._choose(some_logits, some_states, self._early), -1)
            put_rows_(token_ids, rows, found)
        return token_ids

    def draw(self, logits: Tensor, states: Sequence[SamplingState]) -> tuple[Tensor, dict[int, str]]:
        """Return the token ids and errors of `sample`, without log-probabilities."""
        assert logits.shape == (len(states), self.vocab_size), f"{tuple(logits.shape)}, {len(states)} states"
        assert logits.dtype == torch.float32, logits.dtype
        if all(state.rules.params.is_greedy and not state.changes_logits for state in states):
            token_ids = self._argmax(logits)
            chosen = logits.gather(-1, token_ids[:, None])  # NaN and +inf count as the largest
            return token_ids, dict.fromkeys(_not_finite(chosen), NOT_FINITE)
        return self._sample_mixed(logits, states)

    def _sample_mixed(self, logits: Tensor, states: Sequence[SamplingState]) -> tuple[Tensor, dict[int, str]]:
        """Draw for rows with different needs: rows whose logits are changed are copied, the others are read in
        place."""
        token_ids = torch.zeros(len(states), dtype=torch.int64, device=logits.device)
        errors = dict.fromkeys(_not_finite(row_maxima(logits)), NOT_FINITE)
        for is_changed in (False, True):
            rows = [r for r, state in enumerate(states) if r not in errors and state.changes_logits == is_changed]
            if not rows:
                continue
            some_states = [states[row] for row in rows]
            some_logits = logits if len(rows) == len(states) and not is_changed else take_rows(logits, rows)
            if is_changed:
                process_logits(some_logits, some_states)
                emptied = _not_finite(row_maxima(some_logits))
                errors |= {rows[i]: _no_token_error(some_states[i]) for i in emptied}
                some_logits[emptied] = 0.0  # the draw of these rows is not used, but needs finite numbers
            put_rows_(token_ids, rows, self._choose(some_logits, some_states, self._exact))
        return token_ids, errors

    def _choose(
        self, logits: Tensor, states: Sequence[SamplingState], ways: Callable[[], tuple[_Choose, _Choose, _Choose]]
    ) -> Tensor:
        """Apply temperature and filters to processed logits, and draw. float32 [r, V]; int64 [r].

        Args:
            logits: their maxima are finite, or the result is not used.
            states: r of them.
            ways: functions that choose without noise, among all tokens, and among filtered tokens.
        """
        greedy: list[int] = []
        unfiltered: list[int] = []
        filtered: list[int] = []
        for row, state in enumerate(states):
            rules = state.rules
            (greedy if rules.params.is_greedy else filtered if rules.has_filter else unfiltered).append(row)
        token_ids = torch.zeros(len(states), dtype=torch.int64, device=logits.device)
        for rows, choose in zip((greedy, unfiltered, filtered), ways(), strict=True):
            if len(rows) == len(states):
                return choose(logits, states)
            if rows:
                put_rows_(token_ids, rows, choose(take_rows(logits, rows), [states[row] for row in rows]))
        return token_ids

    def _exact(self) -> tuple[_Choose, _Choose, _Choose]:
        return self._greedy, self._draw, self._draw_filtered

    def _early(self) -> tuple[_Choose, _Choose, _Choose]:
        return self._greedy, self._draw_early, self._draw_filtered_early

    def _greedy(self, logits: Tensor, states: Sequence[SamplingState]) -> Tensor:
        del states
        return self._argmax(logits)

    def _draw(self, logits: Tensor, states: Sequence[SamplingState]) -> Tensor:
        """Draw by Gumbel-max from the whole vocabulary."""
        if self._gumbel_argmax is None:
            return self._draw_by_tensors(logits, states)
        return _redraw_undecided(self._draw_early(logits, states), logits, states, self._draw_by_tensors)

    def _draw_early(self, logits: Tensor, states: Sequence[SamplingState]) -> Tensor:
        """Draw as `_draw` does; -1 where the kernel finds the decision too close."""
        if self._gumbel_argmax is None:
            return self._draw_by_tensors(logits, states)
        return self._gumbel_argmax(logits, _temperatures(states, logits), self._keys(states))

    def _draw_by_tensors(self, logits: Tensor, states: Sequence[SamplingState]) -> Tensor:
        return self._draw_in_slices(logits, self._keys(states), row_maxima(logits), _temperatures(states, logits))

    def _draw_in_slices(self, logits: Tensor, keys: Tensor, peaks: Tensor, temperatures: Tensor) -> Tensor:
        """Draw by tensor operators, a slice at a time."""
        num_columns = min(self.vocab_size, self._slice_elements)
        num_rows = max(1, self._slice_elements // num_columns)
        token_ids: list[Tensor] = []
        for row in range(0, len(logits), num_rows):
            some = slice(row, row + num_rows)
            best = best_ids = None
            for start in range(0, self.vocab_size, num_columns):
                stop = min(start + num_columns, self.vocab_size)
                scores = self._noise.of_range(keys[some], start, stop)
                scores += (logits[some, start:stop] - peaks[some]).div_(temperatures[some])
                ids = lowest_argmax(scores)
                found = scores.gather(-1, ids[:, None])[:, 0]
                ids += start
                if best is not None and best_ids is not None:
                    is_better = found > best  # of equal scores the earlier, lower id stays
                    found, ids = torch.where(is_better, found, best), torch.where(is_better, ids, best_ids)
                best, best_ids = found, ids
            assert best_ids is not None, "an empty vocabulary"
            token_ids.append(best_ids)
        return torch.cat(token_ids)

    def _draw_filtered(self, logits: Tensor, states: Sequence[SamplingState]) -> Tensor:
        """Draw by Gumbel-max from the tokens that the filters keep."""
        if self._filtered_argmax is None:
            return self._draw_filtered_in_slices(logits, states)
        return _redraw_undecided(
            self._draw_filtered_early(logits, states), logits, states, self._draw_filtered_in_slices
        )

    def _draw_filtered_early(self, logits: Tensor, states: Sequence[SamplingState]) -> Tensor:
        """Draw as `_draw_filtered` does; -1 where the kernel finds the decision too close."""
        assert self._filtered_argmax is not None, "no kernel to draw with"
        columns = FilterColumns.of([state.rules.params for state in states], self.vocab_size, logits.device)
        return self._filtered_argmax(
            logits,
            _temperatures(states, logits),
            self._keys(states),
            columns.floor.view(-1),
            columns.top_k.view(-1),
            columns.top_p.view(-1),
        )

    def _draw_filtered_in_slices(self, logits: Tensor, states: Sequence[SamplingState]) -> Tensor:
        """Draw by tensor operators, with noise only for the tokens that remain."""
        token_ids = torch.zeros(len(states), dtype=torch.int64, device=logits.device)
        order = sorted(range(len(states)), key=lambda row: effective_top_k(states[row].rules.params, self.vocab_size))
        num_rows = max(1, self._slice_elements // self.vocab_size)
        for start in range(0, len(order), num_rows):
            rows = order[start : start + num_rows]
            token_ids[rows] = self._draw_kept(take_rows(logits, rows), [states[row] for row in rows])
        return token_ids

    def _draw_kept(self, logits: Tensor, states: Sequence[SamplingState]) -> Tensor:
        """Draw for one slice of rows; overwrites the logits."""
        logits.sub_(row_maxima(logits)).div_(_temperatures(states, logits))
        apply_filters(logits, [state.rules.params for state in states])
        places = finite_indices(logits)
        rows = places.div(self.vocab_size, rounding_mode="floor")
        token_ids = places - rows * self.vocab_size
        keys = self._keys(states).index_select(0, rows)
        scores = logits.view(-1).index_select(0, places).to(torch.float64)
        for start in range(0, len(places), self._slice_elements):
            some = slice(start, start + self._slice_elements)
            scores[some] += self._noise.of_tokens(keys[some], token_ids[some])
        return ragged_argmax(scores, rows, token_ids, len(states))

    def _keys(self, states: Sequence[SamplingState]) -> Tensor:
        return self._noise.keys([state.stream for state in states], [state.position for state in states])

    def _logprobs(
        self, logits: Tensor, token_ids: Tensor, states: Sequence[SamplingState], errors: dict[int, str]
    ) -> list[PositionLogprobs | None]:
        """Return the log-probabilities of the rows that requested them."""
        wanted = {
            row: num_top
            for row, state in enumerate(states)
            if (num_top := state.rules.params.logprobs) is not None and row not in errors
        }
        return _logprobs_of(logits, token_ids, wanted) if wanted else [None] * len(states)


def _logprobs_of(logits: Tensor, token_ids: Tensor, wanted: Mapping[int, int]) -> list[PositionLogprobs | None]:
    """Compute the largest requested number for all rows, then cut each row to its own."""
    found: list[PositionLogprobs | None] = [None] * len(token_ids)
    rows = list(wanted)
    is_all = len(rows) == len(found)
    some = token_logprobs(
        logits if is_all else take_rows(logits, rows), token_ids if is_all else token_ids[rows], max(wanted.values())
    )
    for (row, num_top), position in zip(wanted.items(), some, strict=True):
        found[row] = position.first(num_top)
    return found


def _redraw_undecided(token_ids: Tensor, logits: Tensor, states: Sequence[SamplingState], draw: _Choose) -> Tensor:
    """Draw again for the rows that are -1."""
    undecided = (token_ids < 0).nonzero()[:, 0].tolist()
    if undecided:
        token_ids[undecided] = draw(take_rows(logits, undecided), [states[row] for row in undecided])
    return token_ids


def _no_token_error(state: SamplingState) -> str:
    """Return the error of a request that has no token left to draw."""
    failure = "" if state.constraint is None else state.constraint.failure
    # the first line of the report only, because the rest quotes the schema
    return f"structured_outputs cannot continue: {failure.splitlines()[0]}" if failure else NOTHING_ALLOWED


def _not_finite(values: Tensor) -> list[int]:
    """Return the rows whose value is NaN or infinite. [R, 1]."""
    return [row for row, value in enumerate(values[:, 0].tolist()) if not math.isfinite(value)]


def _temperatures(states: Sequence[SamplingState], logits: Tensor) -> Tensor:
    """Return the temperatures, float32 [R, 1], none of them 0."""
    values = [max(state.rules.params.temperature, _SMALLEST_TEMPERATURE) for state in states]
    return send(np.array(values, np.float32), logits.device)[:, None]
