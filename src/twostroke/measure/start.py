"""`twostroke bench start`: time from process start to the first token, and peak memory.

Each row is measured in a process of its own, as a user starts it. "Own memory" is anonymous memory, since mapped
files can be dropped and read again. The memory of importing torch alone is measured in the same way and subtracted.

KV memory that was never written is not resident, and one token writes one block. So memory is compared with two sums:
packed weights plus all of the KV memory, which a busy engine fills; and the weights alone, which shows other memory
that the unwritten KV would hide. The default KV memory is small.
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

from twostroke.config.checks import check_int
from twostroke.config.load import LoadConfig
from twostroke.errors import SetupError
from twostroke.kernels.dispatch import operators_for
from twostroke.measure.report import DEFAULT_FOLDER, check_folder, record, settings
from twostroke.model.model_files import ModelFiles, find_model
from twostroke.model.weight_size import weight_bytes
from twostroke.process_memory import anonymous_bytes
from twostroke.tables import plain_table, print_table

QUANTIZATIONS = ("none", "int8", "int4")

_SAMPLE_S = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOptions:
    """Options: the model to start, and the result file."""

    model: str = "embedded"
    """A model folder, a GGUF file, a hub id, or 'embedded'."""
    quantization: tuple[str, ...] = ()
    """Quantization of the weights on load, one row each; 'none' keeps them; can be repeated. Default: none, int8 and
    int4; only none if the model is already quantized."""
    kv_cache_memory: int = 1 << 26
    """Bytes for KV blocks; hardly any of them are written."""
    repeats: int = 3
    """Starts per row; the first also warms the page cache. Times are medians, memory is the maximum."""
    name: str = "start"
    """Name of the result file."""
    results: Path = DEFAULT_FOLDER
    """Folder of the result file."""

    def __post_init__(self) -> None:
        """Check what needs no model."""
        check_int("kv_cache_memory", self.kv_cache_memory, 1)
        check_int("repeats", self.repeats, 1)
        for quantization in self.quantization:
            LoadConfig(quantization=_on_load(quantization))


@dataclass(frozen=True, slots=True)
class StartRow:
    """Measurements for one quantization."""

    quantization: str
    first_token_s: float
    cpu_s: float
    """Seconds of processor time of all threads, user and system; a busy machine changes it less."""
    anonymous_bytes: int
    """Peak anonymous bytes, minus those of importing torch."""
    weight_bytes: int
    kv_bytes: int

    @property
    def memory_ratio(self) -> float:
        """Memory over packed weights and all of the KV memory."""
        return self.anonymous_bytes / (self.weight_bytes + self.kv_bytes)

    @property
    def ratio_to_weights(self) -> float:
        """Memory over packed weights alone."""
        return self.anonymous_bytes / self.weight_bytes


@dataclass(frozen=True, slots=True)
class _Process:
    first_line_s: float
    cpu_s: float
    anonymous_bytes: int


def run_start(options: StartOptions) -> list[StartRow]:
    """Measure every row and save the result as JSON.

    Raises:
        SetupError: the model cannot be loaded with a row's quantization, or a start failed; the message quotes its
        error.
    """
    check_folder(options.results)
    sizes = _weight_bytes(options, find_model(options.model))
    torch_alone = _run("importing torch", ["-c", "import torch; print(flush=True)"]).anonymous_bytes
    rows: list[StartRow] = []
    for quantization, num_weight_bytes in sizes.items():
        what = f"the start with quantization {quantization}"
        runs = [_run(what, _command(options, quantization)) for _ in range(options.repeats)]
        rows.append(
            StartRow(
                quantization,
                statistics.median(run.first_line_s for run in runs),
                statistics.median(run.cpu_s for run in runs),
                max(run.anonymous_bytes for run in runs) - torch_alone,
                num_weight_bytes,
                options.kv_cache_memory,
            )
        )
    record(
        "twostroke bench start",
        options,
        config={**settings(options), "quantization": list(sizes)},
        workload={"prompt": "one word", "output_tokens": 1},
        results={row.quantization: _figures(row) for row in rows} | {"torch_alone_bytes": torch_alone},
        repeats=options.repeats,
    )
    return rows


def _figures(row: StartRow) -> dict[str, Any]:
    return {**asdict(row), "memory_ratio": row.memory_ratio, "ratio_to_weights": row.ratio_to_weights}


def print_starts(rows: Sequence[StartRow], console: Console | None = None) -> None:
    """Print the rows as a table."""
    figures = ("first token s", "CPU s", "own memory MiB", "weights MiB", "ratio", "weights + KV MiB", "ratio")
    table = plain_table(("quantization",), figures)
    for row in rows:
        with_kv = row.weight_bytes + row.kv_bytes
        own, weights, both = (f"{size / (1 << 20):,.0f}" for size in (row.anonymous_bytes, row.weight_bytes, with_kv))
        times = (f"{row.first_token_s:.2f}", f"{row.cpu_s:.2f}")
        ratios = (f"{row.ratio_to_weights:.2f}", f"{row.memory_ratio:.2f}")
        table.add_row(row.quantization, *times, own, weights, ratios[0], both, ratios[1])
    print_table(table, console or Console())


def _error_text(errors: str) -> str:
    """Return the text of our error message without its prefix, or all of the output if it is another error."""
    return f"\n{errors}".rpartition("\ntwostroke: ")[2].strip()


def _on_load(quantization: str) -> Any:
    return None if quantization == "none" else quantization


def _command(options: StartOptions, quantization: str) -> list[str]:
    flags = ["--json", "--quiet", "--max-tokens", "1", "--kv-cache-memory", str(options.kv_cache_memory)]
    chosen = [] if quantization == "none" else ["--quantization", quantization]
    return ["-m", "twostroke", "generate", options.model, "Hello", *flags, *chosen]


def _weight_bytes(options: StartOptions, files: ModelFiles) -> dict[str, int]:
    """Return the bytes of weights for each row; raise before any start if a row cannot be loaded."""
    config = files.config()
    dtype = cast(torch.dtype, getattr(torch, config.dtype))
    operators = operators_for(torch.device("cpu"), dtype)
    stored = files.weights(config, None).quantization
    found: dict[str, int] = {}
    for row in options.quantization or (QUANTIZATIONS if stored is None else QUANTIZATIONS[:1]):
        source, on_load = files.weights(config, _on_load(row)), _on_load(row)
        found[row] = weight_bytes(source, config, dtype, operators, on_load)
    return found


def _run(what: str, arguments: list[str]) -> _Process:
    """Run this Python with arguments to its end; its first line on stdout is the first token. `what` names it in
    errors."""
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
        raise SetupError(f"{what} failed: {_error_text(errors.decode(errors='replace'))}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return _Process(first_line_s, cpu_s, most)
