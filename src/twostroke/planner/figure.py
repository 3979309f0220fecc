"""Figures: the frontier of a plan, and the token gaps and TTFTs of a replay."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from twostroke.measure.figure import MEASURED, PREDICTED, save_figure, style_axes
from twostroke.planner.plan import Plan
from twostroke.planner.replay import ReplayResult
from twostroke.served_run import Run


def draw_plan(plan: Plan, path: Path) -> Path:
    """Draw the frontier of a plan as a PNG, and return its path.

    Raises:
        SetupError: matplotlib is not installed.
    """
    floors = [(point.tokens_per_s_ceiling, point.tpot_floor_s, point.batch) for point in plan.frontier]
    predicted = [
        (point.tokens_per_s_predicted, point.tpot_predicted_s, point.batch)
        for point in plan.frontier
        if point.tokens_per_s_predicted is not None and point.tpot_predicted_s is not None
    ]

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for name, points, colour in (("floor", floors, PREDICTED), ("predicted", predicted, MEASURED)):
            if not points:
                continue
            axes.plot([p[0] for p in points], [p[1] * 1e3 for p in points], "o-", color=colour, label=name, ms=4)
            for rate, seconds, batch in points:
                place = {"xytext": (3, 4), "textcoords": "offset points"}
                axes.annotate(str(batch), (rate, seconds * 1e3), fontsize=7, color=colour, **place)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.set_title(f"{plan.memory.model} on {plan.machine.name}, {plan.context} tokens of context", fontsize=9)
        axes.legend(fontsize=8, frameon=False, loc="upper left")
        xlabel = "output tokens/s of all requests (numbers: requests at once)"
        style_axes(axes, legend=False, xlabel=xlabel, ylabel="TPOT, ms")

    return save_figure(draw, path, instead="go without the picture (leave --png out)")


_WHAT_IF_COLOURS = ("#0f766e", "#6d28d9", "#b45309", "#be185d")


def draw_replayed(found: ReplayResult, path: Path) -> Path:
    """Draw the token gaps and TTFTs of a replay as a PNG, and return its path.

    Raises:
        SetupError: matplotlib is not installed.
    """
    runs: list[tuple[str, Run, str]] = [
        ("measured", found.measured, MEASURED),
        ("predicted as recorded", found.back_test.run, PREDICTED),
        *(
            (f"what if {what_if.what_if.words}", what_if.run, _WHAT_IF_COLOURS[i % len(_WHAT_IF_COLOURS)])
            for i, what_if in enumerate(found.what_ifs)
        ),
    ]

    def draw(figure: Any) -> None:
        gaps, waits = figure.subplots(1, 2, width_ratios=(3, 1))
        for name, run, colour in runs:
            points = list(_gaps(run))
            begin_s = min((request.times.arrival_s for request in run.requests), default=0.0)
            times = [at - begin_s for at, _ in points]
            gaps.plot(times, [gap * 1e3 for _, gap in points], ".", color=colour, ms=3, label=name, alpha=0.7)
            ttfts = sorted(r.times.ttft_s * 1e3 for r in run.requests if r.times.token_times_s)
            shares = [(i + 1) / len(ttfts) for i in range(len(ttfts))]
            waits.step(ttfts, shares, color=colour, where="post")
        gaps.set_yscale("log")
        gaps.legend(fontsize=7, frameon=False, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2)
        ylabel = "ms from one token of a request to its next"
        style_axes(gaps, legend=False, xlabel="s after the first request", ylabel=ylabel)
        style_axes(waits, legend=False, xlabel="TTFT, ms", ylabel="share of the requests")

    return save_figure(draw, path, size=(9.0, 4.0), instead="go without the picture (leave --png out)")


def _gaps(run: Run) -> Iterator[tuple[float, float]]:
    """Yield the time of each token but the first of its request, and the gap before it."""
    for request in run.requests:
        times = request.times.token_times_s
        yield from ((later, later - earlier) for earlier, later in itertools.pairwise(times))
