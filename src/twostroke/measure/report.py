"""`BenchResult`: a measurement with its hardware, configuration and commit, saved as JSON.

The command that reproduces a result is generated from the options, so that no flag is forgotten.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from rich.console import Console

from twostroke.errors import InvalidParameter
from twostroke.hardware import Hardware
from twostroke.tables import plain_table, print_table

DEFAULT_FOLDER = Path("benchmarks/results")
"""Folder of results, relative to the repository's root."""


@dataclass(frozen=True, slots=True)
class CodeState:
    """Commit of the measured code."""

    hash: str
    dirty: bool
    """Whether the checkout differed from the commit, apart from result files."""

    @classmethod
    def of_this_checkout(cls) -> CodeState:
        """Return the git commit of the source tree that contains this file; ("unknown", True) outside a checkout."""
        folder = Path(__file__).parent
        commit = _git(folder, "rev-parse", "HEAD")
        if commit is None:
            return cls("unknown", True)
        # a run writes its own results, which do not change the measured code
        changes = _git(folder, "status", "--porcelain", "--", ":/", ":(top,exclude)benchmarks/results")
        return cls(commit, changes != "")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """One measurement with everything needed to judge and repeat it."""

    bench: str
    """File name of the result, without suffix."""
    command: str
    """Command line that reproduces this result."""
    config: Mapping[str, Any]
    workload: Mapping[str, Any]
    results: Mapping[str, Any]
    warmup: int = 0
    """Number of runs before the first one that counts."""
    repeats: int = 1
    """Number of runs that count; medians are over these."""
    commit: str = ""
    dirty: bool = True
    date: str = ""
    """Date in UTC, ISO 8601."""
    hardware: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def now(
        cls,
        bench: str,
        command: str,
        *,
        config: Mapping[str, Any],
        workload: Mapping[str, Any],
        results: Mapping[str, Any],
        warmup: int = 0,
        repeats: int = 1,
    ) -> BenchResult:
        """Return a result measured just now, by this code, on this machine."""
        commit = CodeState.of_this_checkout()
        return cls(
            bench=bench,
            command=command,
            config=config,
            workload=workload,
            results=results,
            warmup=warmup,
            repeats=repeats,
            commit=commit.hash,
            dirty=commit.dirty,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            hardware=Hardware.of_this_machine().as_json(),
        )

    def to_json(self) -> str:
        """Return readable JSON, with keys in the order of the fields."""
        return json.dumps(asdict(self), indent=1, default=_jsonable) + "\n"


def check_folder(folder: Path) -> None:
    """Create the results folder if needed, and raise if it is not writable, before anything is measured.

    Raises:
        InvalidParameter: the folder cannot be created or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        limit = f"results cannot be written there ({reason})"
        raise InvalidParameter("results", str(folder), limit, "Give a folder that you may write to.") from error


def save(result: BenchResult, folder: Path = DEFAULT_FOLDER) -> Path:
    """Write `folder/BENCH.json` atomically and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{result.bench}.json"
    handle, name = tempfile.mkstemp(dir=folder, prefix=f".{result.bench}.", suffix=".json")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(result.to_json())
        Path(name).chmod(0o644)  # mkstemp's files are private
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return target


def record(words: str, options: Any, *others: Any, name: str = "", **measured: Any) -> BenchResult:
    """Save a measurement made just now, and return it.

    Args:
        words: the command, such as "twostroke bench offline".
        options: its options, including the results folder.
        others: more options of the command line.
        name: name of the file; default: the name in the options.
        measured: arguments of `BenchResult.now`; `config` defaults to the options.
    """
    measured.setdefault("config", settings(options))
    result = BenchResult.now(name or options.name, command_line(words, options, *others), **measured)
    save(result, options.results)
    return result


def load(path: Path) -> BenchResult:
    """Read a saved result.

    Raises:
        InvalidParameter: the file is not a result of ours.
    """
    try:
        fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return BenchResult(**fields)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise InvalidParameter("result", str(path), f"must be a file written by a benchmark ({error})") from error


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return median, p90, p95 and p99 by linear interpolation, with mean and count; empty without values.

    >>> percentiles([1.0, 2.0, 3.0])
    {'p50': 2.0, 'p90': 2.8, 'p95': 2.9, 'p99': 2.98, 'mean': 2.0, 'count': 3}
    """
    if not values:
        return {}
    ordered = sorted(values)
    return {
        "p50": _quantile(ordered, 0.50),
        "p90": _quantile(ordered, 0.90),
        "p95": _quantile(ordered, 0.95),
        "p99": _quantile(ordered, 0.99),
        "mean": sum(ordered) / len(ordered),
        "count": len(ordered),
    }


def median(values: Sequence[float]) -> float:
    """Return the median of the values, which must not be empty."""
    return _quantile(sorted(values), 0.5)


@dataclass(frozen=True, slots=True)
class FigureDifference:
    """One figure in two results."""

    name: str
    before: float
    after: float

    @property
    def ratio(self) -> float:
        """Value after divided by value before."""
        return self.after / self.before if self.before else math.inf if self.after else 1.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two results side by side."""

    differences: tuple[FigureDifference, ...]
    remarks: tuple[str, ...]
    """Reasons why the two may not be comparable: other hardware, other settings, a dirty checkout."""


def compare(before: BenchResult, after: BenchResult) -> Comparison:
    """Compare all figures that both results contain, and list their other differences."""
    remarks = [
        f"{name} differs: {old!r} -> {new!r}"
        for part in ("hardware", "config", "workload")
        for name, old, new in _changed(part, getattr(before, part), getattr(after, part))
    ]
    if before.bench != after.bench:
        remarks.insert(0, f"these are different benchmarks: {before.bench} and {after.bench}")
    remarks += [f"{r.bench} of {r.date} was measured on a dirty checkout" for r in (before, after) if r.dirty]
    old_figures, new_figures = dict(_figures("", before.results)), dict(_figures("", after.results))
    differences = (FigureDifference(n, old, new_figures[n]) for n, old in old_figures.items() if n in new_figures)
    return Comparison(tuple(differences), tuple(remarks))


def print_comparison(comparison: Comparison, console: Console | None = None) -> None:
    """Print a comparison as a table."""
    console = console or Console()
    rows = plain_table(("figure",), ("before", "after", "after / before"))
    for difference in comparison.differences:
        cells = (f"{difference.before:.6g}", f"{difference.after:.6g}", f"{difference.ratio:.3f}")
        rows.add_row(difference.name, *cells)
    print_table(rows, console)
    for remark in comparison.remarks:
        console.print(f"[yellow]note[/] {remark}", highlight=False)


def _quantile(ordered: Sequence[float], q: float) -> float:
    at = q * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    # rounded to remove the floating-point noise of the interpolation, so that 2.8 prints as 2.8
    return round(ordered[low] + (ordered[high] - ordered[low]) * (at - low), 12)


def _changed(part: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            yield f"{part}.{name}", old.get(name), new.get(name)


def _figures(prefix: str, value: object) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for key, inner in cast(Mapping[str, object], value).items():
            yield from _figures(f"{prefix}.{key}" if prefix else str(key), inner)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield prefix, float(value)


def _jsonable(value: object) -> object:
    """Convert a value that json cannot write: numpy scalars, paths, mappings other than dict."""
    if hasattr(value, "item"):
        return cast(Any, value).item()
    if isinstance(value, Mapping):
        return dict(cast(Mapping[str, object], value))
    return str(value)


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


_PRIVATE_OPTIONS = frozenset({"results", "gguf_folder", "api_key"})
"""Options left out of commands: output folders and secrets are specific to the user."""
_INTERPRETER_PLACEHOLDER = "PYTHON"
"""Placeholder in a command for an environment's interpreter: the engine matters, not its path."""


def command_line(words: str, *options: Any) -> str:
    """Return `words` with a flag for each field of these dataclasses that is not at its default.

    Args:
        words: the command, such as "twostroke bench offline".
        options: dataclasses that the command line takes as flags; each can be constructed without arguments.
    """
    flags = [flag for given in options for flag in _flags(given)]
    return shlex.join([*words.split(), *flags])


def settings(options: Any) -> dict[str, Any]:
    """Return the fields of an options dataclass for a result, with paths shortened to their last part."""
    return {field.name: _shortened(field.name, getattr(options, field.name)) for field in fields(options)}


def model_name(model: str) -> str:
    """Return a hub id or "embedded" unchanged, and a folder or GGUF file by its name.

    >>> model_name("Qwen/Qwen3-0.6B"), model_name("/usr/")
    ('Qwen/Qwen3-0.6B', 'usr')
    """
    path = Path(model).expanduser()
    return last_part(path) if os.path.exists(path) else model


def last_part(path: Path) -> str:
    """Return a path's name, also for "."; links are not resolved, so a link keeps its own name."""
    return os.path.basename(os.path.abspath(path))


def _flags(options: Any) -> list[str]:
    given, defaults = settings(options), settings(type(options)())
    flags: list[str] = []
    for name, value in given.items():
        flag = name.replace("_", "-")
        if value == defaults[name] or value is None or name in _PRIVATE_OPTIONS:
            continue
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif name == "env":
            pairs = cast(tuple[str, ...], value)
            flags += [part for pair in pairs for part in (f"--{flag}", _without_path(pair))]
        elif isinstance(value, tuple):
            flags += [part for item in cast(tuple[object, ...], value) for part in (f"--{flag}", str(item))]
        else:
            flags += [f"--{flag}", str(value)]
    return flags


def _without_path(pair: str) -> str:
    """Return NAME=INTERPRETER without the path.

    >>> _without_path("llama.cpp=/home/me/llama/bin/python")
    'llama.cpp=PYTHON'
    """
    return f"{pair.partition('=')[0]}={_INTERPRETER_PLACEHOLDER}"


def _shortened(name: str, value: Any) -> Any:
    if isinstance(value, Path):
        return last_part(value)
    return model_name(value) if name in ("model", "tokenizer") and isinstance(value, str) else value
