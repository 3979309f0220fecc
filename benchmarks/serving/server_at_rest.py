"""What a server of ours is like when nobody asks anything, to be compared with itself after it had much to bear."""

from __future__ import annotations

import json
import time
import urllib.request
from dataclasses import dataclass

from benchmarks.serving.local_server import LocalServer
from twostroke.engine.clock import monotonic_clock
from twostroke.events import EngineStarted, StepScheduled, from_json
from twostroke.measure.serve.server_metrics import MetricsReading

_REST_S = 30.0
"""Time in which everything has to be given back."""
_LOOK_EVERY_S = 0.05
_CLOSING_S = 2.0
"""Time in which a busy server closes its end of connections whose other end is closed."""
_PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class Rest:
    """A server at rest."""

    num_requests: int
    num_held_blocks: int
    """While one request of one block runs. The gauge would not do: where nobody runs it says 0 whatever is held."""
    num_open_files: int
    """Of the HTTP process, connections among them."""
    num_restarts: int
    """Of the engine."""


def at_rest(server: LocalServer) -> Rest:
    """Waits a while until nothing runs, and lets one request look. Needs no key to be set."""
    deadline_s = monotonic_clock() + _REST_S
    while _num_requests(server) and monotonic_clock() < deadline_s:
        time.sleep(_LOOK_EVERY_S)
    num_requests = _num_requests(server)
    _ask(server, "/v1/completions", {"prompt": [5], "max_tokens": 1})
    events = [from_json(line) for line in _ask(server, "/flight_recorder").splitlines()]
    num_blocks = [event.num_blocks for event in events if isinstance(event, EngineStarted)][-1]
    batch = [event.batch for event in events if isinstance(event, StepScheduled)][-1]
    num_restarts = json.loads(_ask(server, "/server_info"))["health"]["num_restarts"]
    return Rest(num_requests, num_blocks - batch.num_free_blocks, _num_open_files(server), num_restarts)


def metrics_of(server: LocalServer) -> MetricsReading:
    """Its counters now."""
    return MetricsReading.parse(_ask(server, "/metrics"))


def _num_requests(server: LocalServer) -> int:
    return int(json.loads(_ask(server, "/health"))["num_requests"])


def _num_open_files(server: LocalServer) -> int:
    """The fewest within a while: those that were just used are open a moment longer."""
    fewest, deadline_s = server.num_open_files(), monotonic_clock() + _CLOSING_S
    while monotonic_clock() < deadline_s:
        time.sleep(_LOOK_EVERY_S)
        fewest = min(fewest, server.num_open_files())
    return fewest


def _ask(server: LocalServer, path: str, body: object = None) -> str:
    """One request on a connection of its own, which urllib closes."""
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(server.url + path, data, {"content-type": "application/json"})
    with urllib.request.urlopen(asked, timeout=_PATIENCE_S) as answer:
        return answer.read().decode()
