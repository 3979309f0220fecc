"""The tables in Markdown, between two marks of a page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.measured.rows import (
    COMPARED,
    GGUF_SINCE,
    OPERATORS_SINCE,
    PEERS,
    QUALITY,
    QUALITY_FIGURES,
    QUALITY_ROWS,
    ROWS,
    TableRow,
    is_old,
    operators_of,
)
from twostroke.errors import InvalidParameter
from twostroke.measure.report import BenchResult, load

BEGIN = "<!-- made by `python -m benchmarks table --write`; do not edit below -->"
END = "<!-- end of what `python -m benchmarks table` made -->"

_MISSING = "not measured"
_SOURCE = "commit, processor"

_BESIDE_OTHERS = """Beside other engines on the same weights (`python -m benchmarks compare`): tokens per second, and in
brackets how many times faster ours is. A **bold** one is a loss."""

_OF_FLOAT32 = """Distance from float32 arithmetic on the same weights (`twostroke bench quality`): Kullback-Leibler
divergence in nats, positions with the same first choice, perplexity. A comparison of speed is fair where the distance
is not larger than the peer's."""


_OLD = "†"


class Sources:
    """Results of a folder, and the commits and machines of those that were shown."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._machines: dict[str, dict[str, None]] = {}
        self._has_old = False

    def find(self, name: str) -> BenchResult | None:
        """Return a result; None if there is none."""
        path = self._folder / f"{name}.json"
        return load(path) if path.is_file() else None

    def cell(self, result: BenchResult, *, is_counted: bool = False) -> str:
        """Return a result's commit and processor, and a mark if today's operators are newer.

        Args:
            result: result of the row.
            is_counted: whether its figures are counts, which no operator changes.
        """
        commit = f"`{result.commit[:7]}`{' (changed)' if result.dirty else ''}"
        machine = f"{result.hardware['cpu']}, {result.hardware['cores']} cores"
        self._machines.setdefault(machine, {})[f"{commit} of {result.date[:10]}"] = None
        old = not is_counted and is_old(result)
        self._has_old |= old
        return f"{commit}, {result.hardware['cpu']}{_OLD if old else ''}"

    @property
    def lines(self) -> list[str]:
        """Lines for each machine with its commits, and one that explains the mark."""
        lines = [f"- {machine}: {', '.join(commits)}" for machine, commits in self._machines.items()]
        if self._has_old:
            dates = f"{OPERATORS_SINCE[:10]}; for GGUF files, {GGUF_SINCE[:10]}"
            lines += ["", f"{_OLD} Measured before the default operators last changed ({dates})."]
        return lines


@dataclass(frozen=True, slots=True)
class Tables:
    """Rows of the three tables."""

    rows: Sequence[TableRow] = ROWS
    compared: Sequence[tuple[str, str]] = COMPARED
    quality: Sequence[tuple[str, Sequence[str]]] = QUALITY


def render(folder: Path, tables: Tables | None = None) -> str:
    """Return the tables of a folder of results.

    Raises:
        InvalidParameter: a result lacks a figure that a row names.
    """
    tables, sources = tables or Tables(), Sources(folder)
    parts = [
        _rows(tables.rows, sources),
        _BESIDE_OTHERS,
        _compared(tables.compared, sources),
        _OF_FLOAT32,
        _quality(tables.quality, sources),
        "\n".join(
            ["Rows are of different machines and commits; compare within a row. The machines:", "", *sources.lines]
        ),
    ]
    return "\n\n".join(parts) + "\n"


IN_SHORT = ("decode, batch 1", "prefill 512", "end to end, batch 32")
"""Workloads in the short table."""

_IN_SHORT = """Each cell has three figures: {works}. Ours are tokens per
second; the others say how many times faster ours is. A **bold** one is a loss. A dash or empty cell: not measured."""


def render_short(folder: Path, compared: Sequence[tuple[str, str]] = COMPARED) -> str:
    """Return the README's table, with a line for each comparison.

    Args:
        folder: of results.
        compared: models, and the names of their comparisons' results.
    """
    sources = Sources(folder)
    lines = [_line("model", "ours", *PEERS, _SOURCE), f"|---|---|{'---|' * (len(PEERS) + 1)}"]
    for model, name in compared:
        result = sources.find(name)
        if result is None:
            lines.append(_line(model, _MISSING, *("" for _ in PEERS), ""))
            continue
        engines: Mapping[str, Any] = result.results["engines"]
        ours = _in_short(engines["twostroke"], lambda figure: _rate(figure["median_tok_s"]))
        theirs = (_in_short(engines.get(peer), _factor) for peer in PEERS)
        lines.append(_line(model, ours, *theirs, sources.cell(result)))
    works = " / ".join(work.replace(", ", " at ") for work in IN_SHORT)
    marks = [line for line in sources.lines if line.startswith(_OLD)]
    return "\n\n".join([_IN_SHORT.format(works=works), "\n".join(lines), *marks]) + "\n"


def read_page(path: Path) -> str:
    """Return the text of a page.

    Raises:
        InvalidParameter: it cannot be read, or is no text.
    """
    remedy = "Give the page that holds the tables (--page)."
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidParameter("page", str(path), f"cannot be read ({error.strerror})", remedy) from error
    except UnicodeDecodeError as error:
        raise InvalidParameter("page", str(path), f"is no text in UTF-8 (byte {error.start})", remedy) from error


def put_into(page: str, rendered: str, path: Path) -> str:
    """Return a page with the tables between its marks.

    Args:
        page: its text.
        rendered: the tables.
        path: of the page, for the message.

    Raises:
        InvalidParameter: the page has no such marks.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise InvalidParameter("page", str(path), f"has no lines {BEGIN!r} and {END!r}")
    return f"{before}{begin}\n\n{rendered}\n{end}{after}"


def _rows(rows: Sequence[TableRow], sources: Sources) -> str:
    lines = [_line("what", "result", "operators", "predicted", "measured", _SOURCE), "|---|---|---|---|---|---|"]
    for row in rows:
        result = sources.find(row.result)
        if result is None:
            lines.append(_line(row.what, f"`{row.result}`", "", "", _MISSING, ""))
            continue
        expected, found = (" / ".join(figure(result) for figure in part) for part in (row.predicted, row.measured))
        operators = "(counted)" if row.is_counted else operators_of(result)
        source = sources.cell(result, is_counted=row.is_counted)
        lines.append(_line(row.what, f"`{row.result}`", operators, expected, found, source))
    return "\n".join(lines)


def _compared(compared: Sequence[tuple[str, str]], sources: Sources) -> str:
    lines = [_line("model", "work", "operators", "ours", *PEERS, _SOURCE), f"|---|---|---|{'---|' * (len(PEERS) + 2)}"]
    for model, name in compared:
        result = sources.find(name)
        if result is None:
            lines.append(_line(model, "", "", _MISSING, *("" for _ in PEERS), ""))
            continue
        engines: Mapping[str, Any] = result.results["engines"]
        for index, (work, ours) in enumerate(engines["twostroke"]["figures"].items()):
            theirs = (_beside(engines.get(peer), work) for peer in PEERS)
            first = ("" if index else model, work, operators_of(result), _rate(ours["median_tok_s"]))
            lines.append(_line(*first, *theirs, sources.cell(result)))
    return "\n".join(lines)


def _beside(peer: Mapping[str, Any] | None, work: str) -> str:
    """Return a peer's figure, and how many times faster ours is."""
    figure = None if peer is None else peer["figures"].get(work)
    if figure is None:
        return ""
    return f"{_rate(figure['median_tok_s'])} ({_factor(figure)})"


def _in_short(engine: Mapping[str, Any] | None, told: Callable[[Mapping[str, Any]], str]) -> str:
    """Return the figures of an engine's workloads in the short table; empty if it has none of them."""
    figures = {} if engine is None else engine["figures"]
    parts = [told(figures[work]) if work in figures else "-" for work in IN_SHORT]
    return " / ".join(parts) if any(work in figures for work in IN_SHORT) else ""


def _factor(figure: Mapping[str, Any]) -> str:
    """Return how many times faster ours is; a loss is bold."""
    ratio = figure["twostroke_to_this"]
    return f"**{ratio:.2f}x**" if ratio < 1 else f"{ratio:.2f}x"


def _rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:,.0f}" if tokens_per_s >= 100 else f"{tokens_per_s:.1f}"


def _quality(quality: Sequence[tuple[str, Sequence[str]]], sources: Sources) -> str:
    lines = [_line("model", "", "mean KL", "max KL", "same top-1", "perplexity", "of float32", _SOURCE)]
    lines.append("|---|---|---|---|---|---|---|---|")
    for model, names in quality:
        results = [result for result in map(sources.find, names) if result is not None]
        if not results:
            lines.append(_line(model, _MISSING, *("" for _ in QUALITY_FIGURES), ""))
            continue
        newest = {key: result for result in results for key in result.results}
        shown = [(key, words) for key, words in QUALITY_ROWS if key in newest]
        for index, (key, words) in enumerate(shown):
            result = newest[key]
            found = replace(result, results=result.results[key]["against_float32"] or {})
            figures = [figure(found) if found.results else "" for figure in QUALITY_FIGURES]
            lines.append(_line("" if index else model, words, *figures, sources.cell(result, is_counted=True)))
    return "\n".join(lines)


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
