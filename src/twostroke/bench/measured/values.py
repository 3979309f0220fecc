"""One figure of a saved result: where it stands, and how it is written. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from twostroke.bench.report import BenchResult
from twostroke.errors import InvalidParameter

Figure = Callable[[BenchResult], str]
"""Reads a result and writes one of its figures."""


def claim(what: str, form: str = "{:.2f}", part: str = "measured") -> Figure:
    """Return a figure of a reproduction's claim.

    Args:
        what: the claim's words.
        form: how the number is written.
        part: "measured" or "predicted".
    """
    return partial(_claim, what, form, part)


def predicted(what: str, form: str = "{:.2f}") -> Figure:
    """Return what was predicted for a claim."""
    return claim(what, form, "predicted")


def at(*path: str, form: str = "{:.2f}") -> Figure:
    """Return a figure by the names that lead to it in `results`."""
    return partial(_at, path, form)


def tokens_per_s() -> Figure:
    """Return requests at once over their median TPOT, of `bench offline`."""
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
    """A line of the table: what was measured, in which result, and which figures of it."""

    what: str
    result: str
    """Name of the JSON, without suffix."""
    measured: tuple[Figure, ...]
    predicted: tuple[Figure, ...] = ()
    is_counted: bool = False
    """Whether the figures are counts, which no kernel and no machine changes."""


def operators_of(result: BenchResult) -> str:
    """Return which operators a result says it was measured on.

    The setting `kernels` came with the native kernels: a load without it was of torch's operators. A reproduction
    says it since `bench table` is there.
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
