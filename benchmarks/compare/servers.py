"""`python -m benchmarks servers`: our server and others under the same load, alternating, A B A B.

Each server is started once, by its own command line, which also sets its threads and its memory. While one server is
measured, the processes of the others are stopped. All requests of a round are sent at once: different prompts in each
round, as token ids, greedy, each answer to exactly its length.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from tqdm.auto import tqdm

from twostroke.config.checks import check_int, check_number, check_text
from twostroke.config.load import MAX_THREADS
from twostroke.errors import InvalidParameter, SetupError
from twostroke.hardware import Hardware
from twostroke.measure.report import DEFAULT_FOLDER, check_folder, median, model_name, record, settings
from twostroke.measure.serve.figures import latencies
from twostroke.measure.serve.load import HttpClient, LoadRun, Origin, run_loop
from twostroke.measure.serve.target import ServerQueries, ServerTarget, TargetLoad, run_loads
from twostroke.measure.workload import Lengths, SyntheticSpec, Workload, synthetic
from twostroke.model.model_files import find_model
from twostroke.tables import plain_table, print_table

OURS = "twostroke"
_POLL_INTERVAL_S = 0.2
_ANSWER_LIMIT_S = 600.0
_LAST_WORDS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class ServersOptions:
    """Servers to compare with ours, and their load."""

    model: str = "embedded"
    """Model that our server serves: a model folder, a GGUF file, a hub id, or 'embedded'."""
    server: tuple[str, ...] = ()
    """NAME=COMMAND: the command line of another server of the same model, where {port} is replaced by the port to
    listen on. Can be repeated."""
    threads: int | None = None
    """Threads of our engine; default: the processors that this process may use. The other servers' are in their
    commands."""
    streams: int = 32
    """Simultaneous requests."""
    prompt_lengths: str = "uniform:32:256"
    """Prompt tokens of the requests, in the syntax of `bench serve`."""
    output_lengths: str = "uniform:32:96"
    """Output tokens of the requests."""
    rounds: int = 3
    """Rounds in which each server is measured, alternating."""
    start_limit: float = 600.0
    """Seconds in which a server must become ready."""
    seed: int = 0
    """Seed of the prompts."""
    results: Path = DEFAULT_FOLDER
    """Folder for the JSON."""

    def __post_init__(self) -> None:
        """Check what needs no model."""
        check_text("model", self.model)
        check_int("threads", 1 if self.threads is None else self.threads, 1, MAX_THREADS)
        for name in ("streams", "rounds"):
            check_int(name, getattr(self, name), 1)
        check_number("start_limit", self.start_limit, 1.0, 3600.0, "1 to 3600 seconds")
        assert self.commands
        for name in ("prompt_lengths", "output_lengths"):
            Lengths.parse(getattr(self, name), name)

    @property
    def name(self) -> str:
        """Name of the written file."""
        return f"servers-{Path(model_name(self.model)).name}"

    @property
    def commands(self) -> Mapping[str, list[str]]:
        """Words of each server's command line, ours first.

        Raises:
            InvalidParameter: an entry is no NAME=COMMAND with a {port}, or its name is used twice.
        """
        threads = self.threads or Hardware.of_this_machine().cores
        words = f"serve {shlex.quote(self.model)} --port {{port}} --threads {threads} --no-enable-prefix-caching"
        found = {OURS: [sys.executable, "-m", "twostroke", *shlex.split(words)]}
        for given in self.server:
            name, _, command = given.partition("=")
            if not name or "{port}" not in command or name in found:
                limit = "must be NAME=COMMAND with a {port}, once for each name"
                remedy = "As in: --server 'llama-server=llama-server -m FILE.gguf --port {port}'."
                raise InvalidParameter("server", given, limit, remedy)
            found[name] = shlex.split(command)
        return found


def run_servers(options: ServersOptions) -> dict[str, Any]:
    """Start all servers, measure them alternately, and save JSON.

    Raises:
        SetupError: a server does not start, or fails a request, which makes the comparison invalid.
    """
    check_folder(options.results)
    vocab_size = find_model(options.model).config().vocab_size
    workloads = [_drawn(options, vocab_size, number) for number in range(options.rounds + 1)]
    rates: dict[str, list[float]] = {name: [] for name in options.commands}
    ttft_s: dict[str, list[float]] = {name: [] for name in options.commands}
    with contextlib.ExitStack() as stack:
        servers = {
            name: stack.enter_context(_running(name, words, options)) for name, words in options.commands.items()
        }
        rounds = tqdm(enumerate(workloads), "rounds", len(workloads), disable=None)
        for round_number, workload in rounds:
            for name, server in servers.items():
                run = server.ask(workload)
                if round_number:  # the first round warms up
                    rates[name].append(workload.num_output_tokens / run.duration_s)
                    ttft_s[name].append(latencies(run.exchanges)["ttft_s"]["p50"])
    results = {
        "output_tok_s": rates,
        "ttft_p50_s": ttft_s,
        "ratios": {
            name: median([ours / theirs for ours, theirs in zip(rates[OURS], of, strict=True)])
            for name, of in rates.items()
            if name != OURS
        },
    }
    told = replace(options, model=model_name(options.model), server=tuple(map(_without_folders, options.server)))
    record(
        "python -m benchmarks servers",
        told,
        config=settings(told),
        workload=workloads[-1].description,
        results=results,
        warmup=1,
        repeats=options.rounds,
    )
    return results


def print_servers(results: Mapping[str, Any], console: Console | None = None) -> None:
    """Print each server's medians."""
    rows = plain_table(("server",), ("output tok/s", "TTFT p50 ms", "ours over it"))
    for name, rates in results["output_tok_s"].items():
        ratio = results["ratios"].get(name)
        ttft_ms = 1e3 * median(results["ttft_p50_s"][name])
        rows.add_row(name, f"{median(rates):,.0f}", f"{ttft_ms:,.0f}", "" if ratio is None else f"{ratio:.2f}")
    print_table(rows, console or Console())


def _without_folders(given: str) -> str:
    """Return NAME=COMMAND with files by their names alone: a result contains no places."""
    name, _, command = given.partition("=")
    return f"{name}={shlex.join(Path(word).name if '/' in word else word for word in shlex.split(command))}"


def _drawn(options: ServersOptions, vocab_size: int, number: int) -> Workload:
    spec = SyntheticSpec(
        num_requests=options.streams,
        prompt_lengths=Lengths.parse(options.prompt_lengths),
        output_lengths=Lengths.parse(options.output_lengths),
        vocab_size=vocab_size,
        seed=options.seed + number,
    )
    return synthetic(spec)


class _Server:
    """A running server, stopped (SIGSTOP) with its children while another one is measured."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], port: int) -> None:
        self._name = name
        self._process = process
        self._origin = Origin.parse(f"http://127.0.0.1:{port}")
        self._model = ""

    def await_ready(self, log: IO[bytes], limit_s: float) -> None:
        """Return when the server names its model; raise SetupError with its last output if it does not in time."""
        url = f"http://127.0.0.1:{self._origin.port}/v1/models"
        deadline_s = time.monotonic() + limit_s
        while time.monotonic() < deadline_s and self._process.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=_POLL_INTERVAL_S * 10):
                self._model = run_loop(self._first_model())
                return self.signal(signal.SIGSTOP)
            time.sleep(_POLL_INTERVAL_S)
        log.seek(0)
        words = log.read().decode(errors="replace").strip()[-_LAST_WORDS:]
        raise SetupError(f"the server {self._name} was not ready within {limit_s:g} s, or ended; it said: {words}")

    async def _first_model(self) -> str:
        client = HttpClient(self._origin)
        try:
            return await ServerQueries(client, None).first_model()
        finally:
            await client.close()

    def ask(self, workload: Workload) -> LoadRun:
        """Send all requests at once; return when all are answered."""
        target = ServerTarget(origin=self._origin, model=self._model)
        self.signal(signal.SIGCONT)
        (run,) = run_loads([TargetLoad(target, workload)], _ANSWER_LIMIT_S)
        self.signal(signal.SIGSTOP)
        for exchange, request in zip(run.exchanges, workload.requests, strict=True):
            if exchange.failure is not None or exchange.num_output_tokens != request.max_tokens:
                told = exchange.failure or f"{exchange.num_output_tokens} of {request.max_tokens} tokens"
                raise SetupError(f"the server {self._name} failed a request: {told} {exchange.message[:_LAST_WORDS]}")
        return run

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the server and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


@contextlib.contextmanager
def _running(name: str, words: list[str], options: ServersOptions) -> Generator[_Server]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [word.replace("{port}", str(port)) for word in words]
    with tempfile.TemporaryFile() as log:
        try:
            process = subprocess.Popen(command, stdout=log, stderr=log, process_group=0)
        except OSError as error:
            raise SetupError(f"the server {name} cannot be started: {command[0]}: {error.strerror}") from error
        server = _Server(name, process, port)
        try:
            server.await_ready(log, options.start_limit)
            yield server
        finally:
            server.signal(signal.SIGKILL)
            process.wait()
