"""Plots. matplotlib is an extra and slow to import, so only the first plot loads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from twostroke.errors import InvalidParameter, SetupError

PREDICTED, MEASURED = "#9aa5b1", "#c2410c"
"""Colours of predicted and measured values in every plot."""

Draw = Callable[[Any], None]
"""Function that draws into a matplotlib figure; typed as `Any`, as the real type would import matplotlib."""


def save_figure(
    draw: Draw,
    path: Path,
    *,
    size: tuple[float, float] = (7.0, 4.0),
    instead: str = "go without plots (--no-plots)",
) -> Path:
    """Draw a figure and write it as PNG.

    Args:
        draw: draws into the figure.
        path: path of the file.
        size: width and height in inches.
        instead: advice for the error message if matplotlib is missing.

    Raises:
        SetupError: matplotlib is not installed.
        InvalidParameter: the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SetupError(
            "plots need matplotlib, which is not installed. Install it with the extra 'bench' "
            f"(pip install 'twostroke[bench]'), or {instead}."
        ) from error
    # a separate Figure instead of pyplot: it needs no display and has no global state, so it is safe in a server
    figure = Figure(figsize=size, layout="constrained")
    draw(figure)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130, format="png", metadata={"Software": None})
    except OSError as error:
        limit = f"cannot be written ({error.strerror or error})"
        raise InvalidParameter("png", str(path), limit, "Name a file in a folder that you may write to.") from error
    return path


def check_png(path: Path | None) -> None:
    """Raise if a picture's file name does not end in .png, before anything is computed.

    Raises:
        InvalidParameter: the suffix is not .png.
    """
    if path is not None and path.suffix.lower() != ".png":
        limit = "must end in .png: only PNG files can be written"
        raise InvalidParameter("png", str(path), limit, f"Name it {path.with_suffix('.png').name or 'plan.png'}.")


Groups = Mapping[str, Sequence[float]]
"""Values of bars by name, one per label; predicted values come before measured ones."""
_COLOURS = (PREDICTED, MEASURED, "#c5ccd3", "#f0a57f")
"""Colours of groups of bars, in order; a single group is drawn as measured."""


def bar_chart(
    labels: Sequence[str], groups: Groups, ylabel: str, xlabel: str = "", *, lines: Sequence[float] = ()
) -> Draw:
    """Return a drawing of bars side by side (see `bars`), with horizontal lines at some values."""

    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        bars(axes, labels, groups, ylabel)
        axes.set_xlabel(xlabel)
        for value in lines:
            axes.axhline(value, color="black", linewidth=0.8)

    return draw


def style_axes(*plots: Any, legend: bool = True, **labels: Any) -> None:
    """Remove the frames of plots, name their axes, and add a legend.

    Args:
        plots: the axes.
        legend: whether to add a legend.
        labels: arguments of matplotlib's `Axes.set`.
    """
    for axes in plots:
        axes.set(**labels)
        axes.spines[["top", "right"]].set_visible(False)
        if legend:
            axes.legend(fontsize=8, frameon=False)


def bars(axes: Any, labels: Sequence[str], groups: Groups, ylabel: str) -> None:
    """Draw bars side by side: for each name of `groups`, one value per label in one colour."""
    width = 0.8 / len(groups)
    colours = _COLOURS if len(groups) > 1 else (MEASURED,)
    for i, (name, values) in enumerate(groups.items()):
        places = [place - 0.4 + width * (i + 0.5) for place in range(len(labels))]
        drawn = axes.bar(places, values, width * 0.94, label=name, color=colours[i % len(colours)])
        axes.bar_label(drawn, fmt="%.3g", fontsize=6, padding=1)
    axes.set_xticks(range(len(labels)), labels, fontsize=8)
    style_axes(axes, legend=False, ylabel=ylabel)
    if len(groups) > 1:
        # above the bars, so that it does not cover them
        axes.legend(fontsize=8, frameon=False, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2)
