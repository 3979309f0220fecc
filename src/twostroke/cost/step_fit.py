"""Fit of a step-time model to measured steps: least squares of the relative error, with all times non-negative.

    p_i = predicted seconds, linear in the unknowns:   sum_j  a_ij x_j
    min  sum_i  ((p_i - t_i) / t_i)^2 ,   x_j >= 0

The unknowns of a curve are its rises from knot to knot, so it never falls. Between two knots the next rise counts in
proportion, so every a_ij is known. The active-set method of Lawson and Hanson (Solving Least Squares Problems, 1974,
chapter 23) solves the problem. Other processes on the machine only ever make a step longer. Steps with the same
counts are therefore represented by a low quantile, and steps still far above the fit are left out of a second fit.

A step whose counts occur once cannot be compared with others of its kind, and a knot of its own would follow its
time. But every part of a step's time grows at most in proportion to its count, so smaller steps bound larger ones:

    t_i <= k t_j ,   k = max(1, largest ratio of a count of i to the same count of j)

Such a step far above the bound was slowed by another process; the fit uses the bound as its time.
"""

from __future__ import annotations

import bisect
import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from twostroke.cost.step_cost import StepWork
from twostroke.cost.step_model import Curve, FitQuality, StepTimeModel, knots
from twostroke.errors import InvalidParameter

QUANTILE = 0.4
"""Quantile of the times of like steps: near the median, which a run will see, and a little below slow outliers."""
MIN_DIFFERENT_STEPS = 8
"""Fewest different steps that a fit needs."""
_OUTLIER_FACTOR = 1.6
"""Measured / predicted time above which a step was slowed from outside."""
_MEAN_ROUNDS = 6
"""Rounds of `fit_mean_step_model`; the predictions of real logs change by less than 1 % after four."""
_HEAD_BEND_ROWS = 8
"""Number of logits rows at about which arithmetic begins to bind the head."""
_MAX_TIME_RATIO = 10.0
"""Largest measured / predicted time that counts. Beyond it the process may have been stopped."""
_MIN_GROUP_SIZE = 3
"""Number of like steps from which on their quantile is trusted."""
_MAX_OVER_BOUND = 1.25
"""Time relative to the bound set by other steps, above which a step was slowed."""
_MAX_BOUNDING_STEPS = 256
"""Maximum number of steps that set bounds; of more, every n-th by number of tokens."""
_COUNT_TOLERANCE = 0.02
"""Relative difference below which attention counts are alike: a context grows by a token a step."""

_Floats = npt.NDArray[np.float64]


class TimedStep(NamedTuple):
    """Work and measured time of one step."""

    work: StepWork
    seconds: float


def fit_step_model(steps: Iterable[TimedStep]) -> StepTimeModel:
    """Return the model that is nearest to these steps.

    Raises:
        InvalidParameter: there are too few different steps.
    """
    given = [step for step in steps if step.work.num_tokens and step.seconds > 0]
    usual = _representative_steps(given)
    if len(usual) < MIN_DIFFERENT_STEPS:
        limit = f"must be {MIN_DIFFERENT_STEPS} or more different steps, to fit a model of their times"
        raise InvalidParameter("steps", len(usual), limit)
    shape = _Shape.of([step.work for step in usual])
    found = shape.model(_solve(shape, usual))
    calm = [step for step in usual if step.seconds <= _OUTLIER_FACTOR * found.seconds(step.work)]
    if MIN_DIFFERENT_STEPS <= len(calm) < len(usual):
        shape = _Shape.of([step.work for step in calm])
        found = shape.model(_solve(shape, calm))
    return replace(found, quality=quality_of(found, usual))


def fit_log(steps: Iterable[TimedStep], log: str) -> StepTimeModel:
    """Return the mean step model of a log's steps.

    Args:
        steps: steps in the log.
        log: name of the log, for the error.

    Raises:
        InvalidParameter: there are too few different steps in the log.
    """
    try:
        return fit_mean_step_model(steps)
    except InvalidParameter as error:
        limit = f"holds {error.value} different steps; a model of their times needs {MIN_DIFFERENT_STEPS} or more"
        raise InvalidParameter("event_log", log, limit, "Record a longer run.") from error


def fit_mean_step_model(steps: Iterable[TimedStep]) -> StepTimeModel:
    """Return the model whose predictions add up to the measured time, outliers included.

    `fit_step_model` describes the usual step. On a shared machine, steps take longer on average, and a queue
    grows with the average. This fit divides each error by the predicted time instead of the measured one and
    repeats until the two agree, so that no slow step counts less because it was slow.

    Raises:
        InvalidParameter: there are too few different steps.
    """
    given = [step for step in steps if step.work.num_tokens and step.seconds > 0]
    found = fit_step_model(given)
    shape = _Shape.of([step.work for step in given]).with_few_rows()
    rows = np.array([shape.row(step.work) for step in given], dtype=np.float64)
    bounded = _bounded(given)
    seconds = np.array([step.seconds for step in bounded])
    for _ in range(_MEAN_ROUNDS):
        predicted = np.array([max(found.seconds(step.work), step.seconds / _MAX_TIME_RATIO) for step in bounded])
        found = shape.model(_solve_scaled(rows / predicted[:, None], seconds / predicted))
    return replace(found, quality=quality_of(found, _representative_steps(given)))


def quality_of(model: StepTimeModel, steps: Sequence[TimedStep]) -> FitQuality:
    """Return the error of a model against steps, those it was fitted to or others."""
    errors = [abs(model.seconds(step.work) / step.seconds - 1) for step in steps]
    median, p95 = (float(np.quantile(errors, q)) for q in (0.5, 0.95))
    return FitQuality(num_steps=len(errors), median_error=median, p95_error=p95)


class _Shape(NamedTuple):
    """Unknowns of a fit: rises to the knots of both curves, then seconds of a pair and of a seen token."""

    token_knots: tuple[int, ...]
    row_knots: tuple[int, ...]

    @classmethod
    def of(cls, works: Sequence[StepWork]) -> _Shape:
        """Return the knots that the steps' counts can determine."""
        return cls(
            _knots_near_counts([work.num_tokens for work in works]),
            _knots_near_counts([max(1, work.num_logits_rows) for work in works]),
        )

    def with_few_rows(self) -> _Shape:
        """Return a model with one or two lines for the head.

        In a log the largest count of logits rows often occurs in one step alone. A knot there would take that step's
        time, and what-ifs would follow its slope.
        """
        first, *_, last = (self.row_knots[0], *self.row_knots)
        bend = {_HEAD_BEND_ROWS} if first < _HEAD_BEND_ROWS and last >= 4 * _HEAD_BEND_ROWS else set[int]()
        return self._replace(row_knots=tuple(sorted({first, last} | bend)))

    def row(self, work: StepWork) -> list[float]:
        """Return the coefficient of each unknown in the time of a step."""
        tokens = _rise_fractions(self.token_knots, work.num_tokens)
        rows = _rise_fractions(self.row_knots, work.num_logits_rows)
        return [*tokens, *rows, work.num_pairs, work.num_seen]

    def model(self, figures: Sequence[float]) -> StepTimeModel:
        """Return the step-time model with these solved values."""
        split = len(self.token_knots)
        *head, pair_s, seen_s = figures[split:]
        return StepTimeModel(
            layers=Curve(self.token_knots, tuple(accumulate(figures[:split]))),
            head=Curve(self.row_knots, tuple(accumulate(head))),
            pair_s=pair_s,
            seen_s=seen_s,
        )


def _representative_steps(steps: Sequence[TimedStep]) -> list[TimedStep]:
    """Return one representative step for each group of like steps."""
    return _one_of_each(_bounded(steps))


def _one_of_each(steps: Sequence[TimedStep]) -> list[TimedStep]:
    found: list[TimedStep] = []
    for alike in _by_counts(steps).values():
        group = sorted(alike, key=lambda step: step.seconds)
        middle = group[int(QUANTILE * (len(group) - 1))]
        pairs, seen = (sum(getattr(s.work, n) for s in group) // len(group) for n in ("num_pairs", "num_seen"))
        work = StepWork(middle.work.num_tokens, middle.work.num_logits_rows, pairs, seen)
        found.append(TimedStep(work, middle.seconds))
    return found


def _by_counts(steps: Sequence[TimedStep]) -> Mapping[tuple[int, ...], list[TimedStep]]:
    alike: Mapping[tuple[int, ...], list[TimedStep]] = defaultdict(list)
    for step in steps:
        alike[_counts(step)].append(step)
    return alike


def _counts(step: TimedStep) -> tuple[int, ...]:
    """Return the group key of a step: its counts, those of attention rounded."""
    work = step.work
    return work.num_tokens, work.num_logits_rows, _level(work.num_pairs), _level(work.num_seen)


def _bounded(steps: Sequence[TimedStep]) -> list[TimedStep]:
    """Return the steps; a rare step far above the bound set by other steps gets the time of the bound."""
    alike = _by_counts(steps)
    rare = [index for index, step in enumerate(steps) if len(alike[_counts(step)]) < _MIN_GROUP_SIZE]
    others = sorted(_one_of_each(steps), key=lambda step: step.work.num_tokens)
    counts = np.array([_bounding_counts(steps[index]) for index in rare], dtype=np.float64).reshape(-1, 4)
    bounds_s = np.full(len(rare), np.inf)
    with np.errstate(divide="ignore", invalid="ignore"):
        for other in others[:: 1 + len(others) // _MAX_BOUNDING_STEPS]:
            ratios = np.nan_to_num(counts / np.array(_bounding_counts(other), dtype=np.float64), nan=0.0, posinf=np.inf)
            bounds_s = np.minimum(bounds_s, np.maximum(1.0, ratios.max(axis=1)) * other.seconds)
    found = list(steps)
    for index, bound_s in zip(rare, bounds_s, strict=True):
        if found[index].seconds > _MAX_OVER_BOUND * bound_s:
            found[index] = found[index]._replace(seconds=float(bound_s))
    return found


def _bounding_counts(step: TimedStep) -> tuple[int, int, int, int]:
    work = step.work
    return work.num_tokens, max(1, work.num_logits_rows), work.num_pairs, work.num_seen


def _level(count: int) -> int:
    return round(np.log1p(count) / _COUNT_TOLERANCE) if count else 0


def _knots_near_counts(counts: Sequence[int]) -> tuple[int, ...]:
    """Return the knots that have a count near them, and both ends.

    Possible knots are the doublings; a count is near within a factor of 1.3.
    """
    largest = max(counts)
    known = sorted(set(counts))
    found: list[int] = []
    for knot in knots(largest):
        place = bisect.bisect_left(known, knot / 1.3)
        if place < len(known) and known[place] <= knot * 1.3:
            found.append(knot)
    if known[0] not in found:
        found.append(known[0])
    return tuple(sorted({*found, largest}))


def _rise_fractions(places: tuple[int, ...], count: int) -> list[float]:
    """Return the fraction of the rise to each knot that lies below `count`, as in Curve.at.

    >>> _rise_fractions((1, 2, 4), 3), _rise_fractions((1, 2, 4), 1)
    ([1.0, 1.0, 0.5], [1.0, 0.0, 0.0])
    """
    if count <= 0:
        return [0.0] * len(places)
    behind = [1.0]
    for low, high in itertools.pairwise(places):
        behind.append(min(1.0, max(0.0, (count - low) / (high - low))))
    return behind


def _solve(shape: _Shape, steps: Sequence[TimedStep]) -> list[float]:
    seconds = np.array([step.seconds for step in steps])
    rows = np.array([shape.row(step.work) for step in steps], dtype=np.float64) / seconds[:, None]
    return _solve_scaled(rows, np.ones(len(steps)))


def _solve_scaled(rows: _Floats, goals: _Floats) -> list[float]:
    """Solve with columns scaled to similar size: pairs count millions, rises at most one."""
    scale = np.maximum(np.abs(rows).max(axis=0), 1e-30)
    q, r = np.linalg.qr(rows / scale)  # as many rows as unknowns: a long log costs no more than a short one
    found = _least_squares(r, q.T @ goals)
    return [float(value) for value in found / scale]


def _least_squares(a: _Floats, b: _Floats) -> _Floats:
    """Minimize |a x - b| subject to x >= 0 (Lawson and Hanson, algorithm NNLS)."""
    num = a.shape[1]
    x, free = np.zeros(num), np.zeros(num, dtype=bool)
    tolerance = 1e-10 * max(1.0, float(np.abs(a.T @ b).max()))
    for _ in range(10 * num):
        gradient = a.T @ (b - a @ x)
        gradient[free] = -np.inf
        best = int(np.argmax(gradient))
        if gradient[best] <= tolerance:
            break
        free[best] = True
        while True:
            trial = np.zeros(num)
            trial[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
            if (trial[free] > 0).all():
                x = trial
                break
            below = free & (trial <= 0)
            step = float(np.min(x[below] / np.maximum(x[below] - trial[below], 1e-300)))
            x = x + step * (trial - x)
            free &= x > 1e-14
            x[~free] = 0.0
    return x
