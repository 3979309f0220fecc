"""Functions, files and lines of code that a plain chat request and a plain `LLM.generate` run through, by tracing.

Each is warm: the same request was answered before. Code that an idle server runs anyway is not counted.

Lines of code of functions: docstrings, comments and blank lines are not counted, nor functions within functions.
"""

from __future__ import annotations

import ast
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.serving.local_server import LocalServer, local_server
from twostroke.tables import print_table

_TRIVIA = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class PathSize:
    """Number of functions, and lines of code by file, that ran for one request."""

    num_functions: int
    lines_by_file: Mapping[str, int]
    """Lines of code of the functions that ran, by file."""

    @property
    def num_files(self) -> int:
        """Files with such functions."""
        return len(self.lines_by_file)

    @property
    def num_lines(self) -> int:
        """Lines of code of all functions that ran."""
        return sum(self.lines_by_file.values())


def size_of(seen: Iterable[str]) -> PathSize:
    """Return the size of the traced functions.

    Args:
        seen: FILE:LINE:NAME of each, as sitecustomize.py writes them. Lambdas and comprehensions belong to the function
            around them; the body of a module is not counted.
    """
    lines: dict[str, int] = {}
    functions: set[tuple[str, int]] = set()
    for entry in set(seen):
        path, first, name = entry.rsplit(":", 2)
        found = _functions(Path(path)).get(int(first))
        if name.endswith(">") or found is None:
            continue
        functions.add((path, int(first)))
        file = path.rpartition("/twostroke/")[2]
        lines[file] = lines.get(file, 0) + found
    return PathSize(len(functions), dict(sorted(lines.items())))


@cache
def _functions(path: Path) -> Mapping[int, int]:
    """Return the lines of code of a file's functions, by the line where each begins, decorators included."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    code = _code_lines(text) - set(_docstring_lines(tree))
    spans = {node: _span(node) for node in ast.walk(tree) if isinstance(node, _Function)}
    found: dict[int, int] = {}
    for node, span in spans.items():
        within = {line for other, inner in spans.items() if other is not node and inner[0] > span[0] for line in inner}
        found[span[0]] = len(code & (set(span) - (within & set(span))))
    return found


def _span(node: _Function) -> range:
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    assert node.end_lineno is not None
    return range(first, node.end_lineno + 1)


def _code_lines(text: str) -> set[int]:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    kept = [token for token in tokens if token.type not in _TRIVIA]
    return {line for token in kept for line in range(token.start[0], token.end[0] + 1)}


def _docstring_lines(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            assert node.end_lineno is not None
            yield from range(node.lineno, node.end_lineno + 1)


_TRACER = Path(__file__).parent
_TIMEOUT_S = 120.0
_GENERATE = """
import os, signal
from twostroke import LLM, SamplingParams
with LLM("embedded", threads=1) as llm:
    params = SamplingParams(temperature=0.0, max_tokens=12)
    llm.generate("def f(x):", params)
    os.kill(os.getpid(), signal.SIGUSR2)
    llm.generate("def f(x):", params)
    os.kill(os.getpid(), signal.SIGUSR2)
"""


def measure_generate() -> PathSize:
    """Return the size of an offline call."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "seen"
        subprocess.run([sys.executable, "-c", _GENERATE], env=_environment(out), check=True, stdout=subprocess.DEVNULL)
        return size_of(_read(out))


def measure_chat() -> PathSize:
    """Return the size of a streamed chat request, in the HTTP process and the engine's."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "seen"
        with local_server("embedded", {"threads": 1}, _environment(out)) as server:
            _chat(server)
            processes = [pid for pid in server.family() if _catches_signal(pid)]
            _collect(out, processes)
            time.sleep(2)
            idle = _collect(out, processes)
            runs: list[set[str]] = []
            for _ in range(2):  # code that only one of two equal requests ran is an accident of timing
                _chat(server)
                runs.append(_collect(out, processes))
            return size_of(set.intersection(*runs) - idle)


def _environment(out: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(_TRACER), "REQUEST_PATH": str(out)}  # noqa: TID251 (a child's)


def _chat(server: LocalServer) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "def f(x):"}], "stream": True}
    if "[DONE]" not in server.ask("/v1/chat/completions", body | {"max_tokens": 12, "temperature": 0.0}):
        raise AssertionError("the answer did not end")


def _collect(out: Path, processes: list[int]) -> set[str]:
    """Return the functions that the processes have run since the last time."""
    time.sleep(1)  # work after an answer belongs to the request
    for pid in processes:
        os.kill(pid, signal.SIGUSR2)
    until_s = time.monotonic() + _TIMEOUT_S
    files = [out.with_name(f"{out.name}.{pid}") for pid in processes]
    while not all(file.exists() for file in files):
        if time.monotonic() > until_s:
            raise AssertionError("a process did not write what it has run")
        time.sleep(0.1)
    time.sleep(0.5)  # time for the files to be written completely
    return set(_read(out))


def _read(out: Path) -> list[str]:
    """Return the entries of all processes, and remove their files."""
    found: list[str] = []
    for file in sorted(out.parent.glob(f"{out.name}.*")):
        found += file.read_text(encoding="utf-8").split("\n")
        file.unlink()
    return [entry for entry in found if entry]


def _catches_signal(pid: int) -> bool:
    """Return whether the process has a handler of SIGUSR2; without one the signal would end it."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGUSR2 - 1) & 1)


COMMITTED = Path(__file__).parent / "committed.json"
"""Committed figures; a change that exceeds them has to change this file, too."""


@dataclass(frozen=True, slots=True)
class PathOptions:
    """Flags of `python -m benchmarks path`."""

    write: bool = False
    """Write the figures to benchmarks/path/committed.json, to commit them."""
    files: bool = False
    """Print each file, too, with the lines that run."""


def run_path(options: PathOptions) -> bool:
    """Measure both paths and print them with the committed figures.

    Returns:
        Whether neither is longer than committed.
    """
    found = {"chat over HTTP": measure_chat(), "LLM.generate": measure_generate()}
    figures = {
        name: {"functions": size.num_functions, "files": size.num_files, "lines": size.num_lines}
        for name, size in found.items()
    }
    if options.write:
        COMMITTED.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    committed = json.loads(COMMITTED.read_text(encoding="utf-8"))
    table = Table("request", "functions", "files", "lines of code", "committed: files", "lines")
    for name, row in figures.items():
        kept = committed[name]
        table.add_row(name, *map(str, (row["functions"], row["files"], row["lines"], kept["files"], kept["lines"])))
    console = Console()
    print_table(table, console)
    for name, size in found.items() if options.files else ():
        of_files = Table(f"file of {name}", "lines of code")
        for file, num_lines in sorted(size.lines_by_file.items(), key=lambda item: -item[1]):
            of_files.add_row(file, str(num_lines))
        print_table(of_files, console)
    return all(figures[name][key] <= committed[name][key] for name in figures for key in ("files", "lines"))
