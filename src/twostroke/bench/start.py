"""`twostroke bench start`: from the start of a process to its first token, and the memory that it takes at most.

Each row is a process of its own, as a user starts it. "Of its own" is anonymous memory: what maps a file can be dropped
and read again. What importing torch alone takes is measured in the same way and taken off.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
from rich.console import Console
from rich.table import Table

from twostroke.bench.command import command_line, model_name, settings
from twostroke.bench.memory import anonymous_bytes
from twostroke.bench.report import DEFAULT_FOLDER, BenchResult, check_folder, save
from twostroke.config.checks import whole_number
from twostroke.config.load import DEFAULT_GROUP_SIZE, LoadConfig
from twostroke.errors import SetupError
from twostroke.model.checkpoint import find_model_folder, read_model_config
from twostroke.model.loader import open_weights, weight_bytes

_SAMPLE_S = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOptions:
    """What is started, and where the result goes."""

    model: str = "embedded"
    """A model folder, a hub id, or 'embedded'."""
    quantization: tuple[str, ...] = ("none", "int8", "int4")
    """Of the weights while loading, a row each; 'none' keeps them; give it several times."""
    kv_cache_memory: int = 1 << 28
    """Bytes for KV blocks."""
    repeats: int = 3
    """Starts of each; the first also warms the page cache. Times are medians, memory is the most."""
    name: str = "start"
    """Of the file that is written."""
    results: Path = DEFAULT_FOLDER
    """Where it goes."""

    def __post_init__(self) -> None:
        """Checks what needs no model."""
        whole_number("kv_cache_memory", self.kv_cache_memory, 1)
        whole_number("repeats", self.repeats, 1)
        for quantization in self.quantization:
            LoadConfig(quantization=_on_load(quantization))


@dataclass(frozen=True, slots=True)
class Start:
    """One row."""

    quantization: str
    first_token_s: float
    cpu_s: float
    """Of all threads, user and system: what a busy machine changes less."""
    anonymous_bytes: int
    """At most, less what torch alone takes."""
    weight_bytes: int
    kv_bytes: int

    @property
    def memory_ratio(self) -> float:
        """Memory over packed weights and KV."""
        return self.anonymous_bytes / (self.weight_bytes + self.kv_bytes)


@dataclass(frozen=True, slots=True)
class _Process:
    first_line_s: float
    cpu_s: float
    anonymous_bytes: int


def run_start(options: StartOptions) -> list[Start]:
    """Starts every row, saves JSON.

    Raises:
        SetupError: a start failed; what it said is in the message.
    """
    check_folder(options.results)
    folder = find_model_folder(options.model)
    torch_alone = _run(["-c", "import torch; print(flush=True)"]).anonymous_bytes
    rows: list[Start] = []
    for quantization in options.quantization:
        runs = [_run(_command(options, quantization)) for _ in range(options.repeats)]
        rows.append(
            Start(
                quantization,
                statistics.median(run.first_line_s for run in runs),
                statistics.median(run.cpu_s for run in runs),
                max(run.anonymous_bytes for run in runs) - torch_alone,
                _weight_bytes(folder, quantization),
                options.kv_cache_memory,
            )
        )
    result = BenchResult.now(
        options.name,
        command_line("twostroke bench start", options),
        config={**settings(options), "model": model_name(options.model)},
        workload={"prompt": "one word", "output_tokens": 1},
        results={row.quantization: {**asdict(row), "memory_ratio": row.memory_ratio} for row in rows}
        | {"torch_alone_bytes": torch_alone},
        repeats=options.repeats,
    )
    save(result, options.results)
    return rows


def print_starts(rows: Sequence[Start], console: Console | None = None) -> None:
    """The table, for people."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("quantization")
    for name in ("first token s", "CPU s", "own memory MiB", "weights + KV MiB", "ratio"):
        table.add_column(name, justify="right")
    for row in rows:
        mib = (f"{size / (1 << 20):,.0f}" for size in (row.anonymous_bytes, row.weight_bytes + row.kv_bytes))
        cells = (f"{row.first_token_s:.2f}", f"{row.cpu_s:.2f}", *mib, f"{row.memory_ratio:.2f}")
        table.add_row(row.quantization, *cells)
    (console or Console()).print(table)


def _on_load(quantization: str) -> Any:
    return None if quantization == "none" else quantization


def _command(options: StartOptions, quantization: str) -> list[str]:
    flags = ["--json", "--quiet", "--max-tokens", "1", "--kv-cache-memory", str(options.kv_cache_memory)]
    chosen = [] if quantization == "none" else ["--quantization", quantization]
    return ["-m", "twostroke", "generate", options.model, "Hello", *flags, *chosen]


def _weight_bytes(folder: Path, quantization: str) -> int:
    config = read_model_config(folder)
    dtype = cast(torch.dtype, getattr(torch, config.dtype))
    return weight_bytes(open_weights(folder, config), config, dtype, _on_load(quantization), DEFAULT_GROUP_SIZE)


def _run(arguments: list[str]) -> _Process:
    """Runs this Python to its end; its first line on stdout is the first token."""
    before, begin_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    most = 0

    def watch() -> None:
        nonlocal most
        while process.poll() is None:
            most = max(most, anonymous_bytes(process.pid))
            time.sleep(_SAMPLE_S)

    watcher = threading.Thread(target=watch)
    watcher.start()
    cast(IO[bytes], process.stdout).readline()
    first_line_s = time.perf_counter() - begin_s
    errors = process.communicate()[1]
    watcher.join()
    if process.returncode:
        raise SetupError(f"twostroke {' '.join(arguments)} failed: {errors.decode(errors='replace').strip()}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return _Process(first_line_s, cpu_s, most)
