"""One figure of a saved result: its place in the JSON and its format. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from twostroke.errors import InvalidParameter
from twostroke.measure.report import BenchResult

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


OPERATORS_SINCE = "2026-11-27T19:55:06+00:00"
"""When a processor's default operators last became faster or slower (commit 908b61da). Such a change moves it."""
GGUF_SINCE = "2026-11-28T11:20:00+00:00"
"""When the operators of GGUF files last became faster or slower: their activations became float32 (commit f1d01024)."""


def operators_of(result: BenchResult) -> str:
    """Return the operators that a result was measured with, and the level of the native ones where it says so.

    Reproductions record them since `benchmarks table` exists. Loads have the setting `kernels` since native kernels
    exist: a load without it used torch's operators. What started an engine often saved what the engine said.
    """
    config = result.config
    if "kernels" in config:
        return str(config["kernels"])
    said = re.search(r"(native \w+|torch) kernels", _said_at_start(result))
    if said:
        return said[1]
    load = config.get("load")
    if not isinstance(load, Mapping):
        return "not recorded"
    if "kernels" not in load:
        return "torch"
    kernels = str(load["kernels"])
    return {"auto": "native", "reference": "torch"}.get(kernels, kernels)


def is_old(result: BenchResult) -> bool:
    """Return whether a result is older than the default operators of today for its model."""
    since = GGUF_SINCE if _model_of(result).endswith(".gguf") else OPERATORS_SINCE
    return result.date < since or operators_of(result) == "torch"


def _model_of(result: BenchResult) -> str:
    """Return the model that a result was measured with, or nothing where it does not say."""
    load: Any = result.config.get("load", {})
    return str(result.config.get("model") or load.get("model") or "")


def _said_at_start(result: BenchResult) -> str:
    """Return the lines that our engine logged when it started."""
    lines: Any = result.results.get("startup", ())
    engines: Mapping[str, Any] = result.results.get("engines", {})
    about = engines.get("twostroke", {}).get("about", {})
    return "\n".join([*lines, about.get("startup", "")])
