"""The frontier as a picture: what a token takes, beside how many come a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from twostroke.measure.figure import MEASURED, PREDICTED, save_figure
from twostroke.planner.plan import Plan


def draw_plan(plan: Plan, path: Path) -> Path:
    """Writes a PNG.

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
        axes.set_xlabel("output tokens/s of all requests (numbers: requests at once)")
        axes.set_ylabel("TPOT, ms")
        axes.set_title(f"{plan.memory.model} on {plan.machine.name}, {plan.context} tokens of context", fontsize=9)
        axes.legend(fontsize=8, frameon=False, loc="upper left")
        axes.spines[["top", "right"]].set_visible(False)

    return save_figure(draw, path, instead="go without the picture (leave --png out)")
