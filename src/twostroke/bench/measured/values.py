"""One figure of a saved result: its place in the JSON and its format. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from twostroke.bench.report import BenchResult
from twostroke.errors import InvalidParameter

Figure = Callable[[BenchResult], str]
"""Function that reads a result and returns one of its figures as text."""


def claim(what: str, form: str = "{:.2f}", part: str = "measured") -> Figure:
    """Return a figure of a reproduction's claim.

    Args:
        what: the words of the claim.
        form: format of the number.
        part: "measured" or "predicted".
    """
    return partial(_claim, what, form, part)


def predicted(what: str, form: str = "{:.2f}") -> Figure:
    """Return what was predicted for a claim."""
    return claim(what, form, "predicted")


def at(*path: str, form: str = "{:.2f}") -> Figure:
    """Return the figure under a path of names in `results`."""
    return partial(_at, path, form)


def tokens_per_s() -> Figure:
    """Return the number of concurrent requests divided by their median TPOT, for `bench offline`."""
    return _tokens_per_s


def _claim(what: str, form: str, part: str, result: BenchResult) -> str:
    for found in result.results["claims"]:
        if found["what"] == what:
            return form.format(found[part])
    known = ", ".join(repr(found["what"]) for found in result.results["claims"])
    raise InvalidParameter("result", result.bench, f"has no claim {what!r}; it has {known}")


def _at(path: Sequence[str], form: str, result: BenchResult) -> str:
    found: Any = result.results
    for name in path:
        if not isinstance(found, Mapping) or name not in found:
            raise InvalidParameter("result", result.bench, f"has no {' / '.join(path)}")
        found = found[name]
    return form.format(found)


def _tokens_per_s(result: BenchResult) -> str:
    batch: int = result.config["scheduler"]["max_num_seqs"]
    return f"{batch / result.results['latency']['tpot_s']['p50']:.0f}"


@dataclass(frozen=True, slots=True)
class Row:
    """A line of a table: what was measured, in which result, and which of its figures."""

    what: str
    result: str
    """Name of the JSON, without suffix."""
    measured: tuple[Figure, ...]
    predicted: tuple[Figure, ...] = ()
    is_counted: bool = False
    """Whether the figures are counts, which no kernel and no machine changes."""


def operators_of(result: BenchResult) -> str:
    """Return the operators that a result was measured with.

    Loads have the setting `kernels` since native kernels exist: a load without it used torch's operators. Reproductions
    record it since `bench table` exists.
    """
    config = result.config
    if "kernels" in config:
        return str(config["kernels"])
    load = config.get("load")
    if not isinstance(load, Mapping):
        return "not recorded"
    if "kernels" not in load:
        return "torch"
    kernels = str(load["kernels"])
    return {"auto": "native", "reference": "torch"}.get(kernels, kernels)
