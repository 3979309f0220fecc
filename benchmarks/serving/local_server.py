"""`twostroke serve` in its own processes, for measurements.

A server at rest, without requests, can be compared with itself after a heavy load; and samples of its memory show
how fast that grows.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from benchmarks.claim import Claim
from twostroke.engine.clock import monotonic_clock
from twostroke.errors import SetupError
from twostroke.event_codec import from_json
from twostroke.events import EngineStarted, Event, StepScheduled
from twostroke.measure.serve.load import LoadRun, Origin
from twostroke.measure.serve.target import MetricsReading, ServerTarget, TargetLoad, run_loads
from twostroke.measure.workload import Workload

_START_LIMIT_S = 600.0
_STOP_LIMIT_S = 60.0
_LAST_LINES = 10
_TEMPLATES = b"twostroke.tokenizer.template_worker"
_URL = re.compile(r"https?://\S+")


@dataclass(frozen=True, slots=True)
class LocalServer:
    """A running server."""

    url: str
    pid: int
    """Id of the HTTP process; the engine has its own."""

    def http_cpu_s(self) -> float:
        """Processor time of the HTTP process so far, in the kernel's ticks of 10 ms."""
        # proc(5): fields 14 and 15 are utime and stime; the second, a name in parentheses, may hold spaces
        after_name = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")

    def engine_pid(self) -> int:
        """Return the id of the engine's process: the HTTP process's only child besides the one for chat templates.

        Raises:
            SetupError: there is none now.
        """
        for child in _children(self.pid):
            if _TEMPLATES not in Path(f"/proc/{child}/cmdline").read_bytes():
                return child
        raise SetupError(f"the server (process {self.pid}) has no engine process now.")

    def family(self) -> Iterator[int]:
        """Yield the server's processes and their children; those that end meanwhile are left out."""
        left = [self.pid]
        while left:
            pid = left.pop()
            left += _children(pid)
            yield pid

    def ask(self, path: str, body: object = None) -> str:
        """Return the answer to one request, on a connection of its own, which urllib closes."""
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(self.url + path, data, {"content-type": "application/json"})
        with urllib.request.urlopen(asked, timeout=_TIMEOUT_S) as answer:
            return answer.read().decode()

    def events(self) -> list[Event]:
        """Return the flight recorder's events; this costs the engine nothing."""
        return [from_json(line) for line in self.ask("/flight_recorder").splitlines()]

    def run(self, model: str, workload: Workload, request_ids: Sequence[str] = ()) -> LoadRun:
        """Send a workload, each request when it is due, and return when all are answered.

        Args:
            model: its name at the server.
            workload: requests and their arrivals.
            request_ids: one each, for a run whose tokens are looked up in the event log.

        Raises:
            SetupError: a request failed, which makes a comparison invalid.
        """
        # ids show tokens without text yet; for throughput they would be extra work that the offline API does not do
        counts = "token-ids" if request_ids else "chunks"
        target = ServerTarget(origin=Origin.parse(self.url), model=model, token_counts=counts)
        (found,) = run_loads([TargetLoad(target, workload, request_ids)])
        failed = [exchange for exchange in found.exchanges if exchange.failure is not None]
        if failed:
            raise SetupError(f"{len(failed)} requests failed; the first with {failed[0].failure}: {failed[0].message}")
        return found

    def num_open_files(self) -> int:
        """Return the open files of the HTTP process, including connections."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))


def _children(pid: int) -> Iterator[int]:
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that has just ended
            yield from map(int, children.read_text(encoding="utf-8").split())


def as_flags(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as words of a command line; each item of a tuple becomes a flag.

    >>> as_flags({"max_num_seqs": 4, "enable_prefix_caching": False, "api_key": ("a", "b")})
    ['--max-num-seqs', '4', '--no-enable-prefix-caching', '--api-key', 'a', '--api-key', 'b']
    """
    flags: list[str] = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{'' if value else 'no-'}{flag}")
        else:
            items = cast(tuple[Any, ...], value) if isinstance(value, tuple) else (value,)
            flags += [word for item in items for word in (f"--{flag}", str(item))]
    return flags


def room_for(slots: int, longest: int, times: int = 1) -> dict[str, int]:
    """Return server settings with KV blocks for `times` x `slots` requests of the greatest length."""
    return {"max_num_seqs": slots, "max_model_len": longest, "num_kv_blocks": times * slots * -(-longest // 16)}


@contextlib.contextmanager
def local_server(
    model: str, settings: Mapping[str, Any], environment: Mapping[str, str] | None = None
) -> Generator[LocalServer]:
    """Start a server on a free port of this machine, and end it.

    Args:
        model: as `twostroke serve` takes it.
        settings: of the engine and the server, by their names.
        environment: of its processes; default: ours.

    Raises:
        SetupError: it did not start; the message has its last output.
    """
    command = [sys.executable, "-m", "twostroke", "serve", model, "--port", "0", *as_flags(settings)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, process_group=0, env=environment) as process:
        try:
            yield LocalServer(_url(process), process.pid)
        finally:
            process.terminate()
            try:
                process.wait(_STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _url(process: subprocess.Popen[str]) -> str:
    """Return the server's address from its output; a thread drains later output, so that it never blocks."""
    assert process.stderr is not None
    watch = threading.Timer(_START_LIMIT_S, os.killpg, (process.pid, signal.SIGKILL))
    watch.start()
    said: deque[str] = deque(maxlen=_LAST_LINES)
    try:
        for line in process.stderr:
            said.append(line)
            if found := _URL.search(line):
                threading.Thread(target=deque[str], args=(process.stderr, 0), daemon=True).start()
                return found[0]
    finally:
        watch.cancel()
    last = "".join(said).strip()
    raise SetupError(f"twostroke serve did not start within {_START_LIMIT_S:g} s, or ended; it said: {last}")


_REST_S = 30.0
"""Seconds in which everything has to be released."""
_POLL_INTERVAL_S = 0.05
_CLOSING_S = 2.0
"""Seconds in which a busy server closes its end of connections whose other end is closed."""
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class IdleState:
    """State of a server at rest."""

    num_requests: int
    num_held_blocks: int
    """Blocks that are held while one request of one block runs. The gauge would not do: without requests it is always
    0."""
    num_open_files: int
    """Open files of the HTTP process, including connections."""
    num_restarts: int
    """Restarts of the engine."""


def leftover_claims(before: IdleState, after: IdleState) -> Iterator[Claim]:
    """Yield claims that a server is in the same state as before a load."""
    yield Claim.equal("requests left in the engine", 0, after.num_requests)
    yield Claim.equal("KV blocks left behind", 0, after.num_held_blocks - before.num_held_blocks)
    yield Claim.at_most("connections and files left open", 0, after.num_open_files - before.num_open_files)
    yield Claim.equal("restarts of the engine", 0, after.num_restarts - before.num_restarts)


def at_rest(server: LocalServer) -> IdleState:
    """Wait until nothing runs, send one request to observe the state, and return it. Needs a server without API
    keys."""
    deadline_s = monotonic_clock() + _REST_S
    while _num_requests(server) and monotonic_clock() < deadline_s:
        time.sleep(_POLL_INTERVAL_S)
    num_requests = _num_requests(server)
    server.ask("/v1/completions", {"prompt": [5], "max_tokens": 1})
    events = server.events()
    num_blocks = [event.num_blocks for event in events if isinstance(event, EngineStarted)][-1]
    batch = [event.batch for event in events if isinstance(event, StepScheduled)][-1]
    num_restarts = json.loads(server.ask("/server_info"))["health"]["num_restarts"]
    return IdleState(num_requests, num_blocks - batch.num_free_blocks, _num_open_files(server), num_restarts)


def metrics_of(server: LocalServer) -> MetricsReading:
    """Return the server's current counters."""
    return MetricsReading.parse(server.ask("/metrics"))


def _num_requests(server: LocalServer) -> int:
    return int(json.loads(server.ask("/health"))["num_requests"])


def _num_open_files(server: LocalServer) -> int:
    """Return the fewest open files within a while: recently used ones stay open a moment longer."""
    fewest, deadline_s = server.num_open_files(), monotonic_clock() + _CLOSING_S
    while monotonic_clock() < deadline_s:
        time.sleep(_POLL_INTERVAL_S)
        fewest = min(fewest, server.num_open_files())
    return fewest


MB = 2**20


def growth_mb_per_minute(times_s: Sequence[float], sizes: Sequence[int], *, warm_up: float) -> float:
    """Return the median of the slopes between any two samples after the warm-up (Theil-Sen); 0 for fewer than two.

    A leak shows in all slopes. A burst whose memory stays allocated, or passes, shows in few, while a least-squares
    line would follow it.

    Args:
        times_s: rising.
        sizes: in bytes, one for each time.
        warm_up: share of the samples to ignore: caches fill, pages are touched for the first time.

    >>> growth_mb_per_minute([0, 30, 60, 90, 120], [0, 0, 0, 2**20, 2 * 2**20], warm_up=0.3)
    2.0
    """
    begin = int(warm_up * len(sizes)) + 1
    minutes, megabytes = np.array(times_s[begin:]) / 60, np.array(sizes[begin:]) / MB
    earlier, later = np.triu_indices(len(minutes), 1)
    if not len(earlier):
        return 0.0
    slopes = (megabytes[later] - megabytes[earlier]) / (minutes[later] - minutes[earlier])
    return round(float(np.median(slopes)), 6)
