"""Effect of a request on a server: how long other clients wait for an answer, and how much memory it takes."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from benchmarks.serving.local_server import LocalServer
from twostroke.measure.serve.load import Origin
from twostroke.process_memory import peak_resident_bytes, reset_peak, resident_bytes

_EVERY_S = 0.002
_TIMEOUT_S = 120.0
_WAIT_S = 0.005
"""Pause before and after a request, so that a probe is running when it begins and when it ends."""


@dataclass(frozen=True, slots=True)
class Effect:
    """Effect of one request, or of several."""

    status: int
    """HTTP status of the answer."""
    held_s: float
    """Longest time that another client waited for an answer of /health meanwhile."""
    parse_s: float
    """Seconds that this process takes to parse the body as JSON, or to find it invalid."""
    grown_bytes: int
    """Growth of the server process's memory to its peak, in bytes."""
    body_bytes: int

    @property
    def beyond_parsing_s(self) -> float:
        """Wait beyond the time for parsing the body's JSON."""
        return max(0.0, self.held_s - self.parse_s)

    @property
    def times_body(self) -> float:
        """Memory taken, as a multiple of the body."""
        return self.grown_bytes / max(1, self.body_bytes)


class Probe:
    """Thread that requests a server's /health continuously.

    Args:
        server: on this machine.
    """

    def __init__(self, server: LocalServer) -> None:
        self._server = server
        self._origin = Origin.parse(server.url)
        self._longest_s = 0.0
        self._asked_s: float | None = None
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._parse_s: dict[str, float] = {}
        """Seconds to parse a body, by kind of body."""

    @contextlib.contextmanager
    def running(self) -> Generator[Probe]:
        """Run the probe during the block."""
        self._thread.start()
        try:
            yield self
        finally:
            self._ends.set()
            self._thread.join(_TIMEOUT_S)

    def effect_of(self, route: str, body: bytes, kind: str) -> Effect:
        """Send a body to a route and return the effect; bodies of one kind take equally long to parse."""
        if kind not in self._parse_s:
            self._parse_s[kind] = _parse_s(body)
        reset_peak(self._server.pid)
        before = resident_bytes(self._server.pid)
        self._longest_s = 0.0
        time.sleep(_WAIT_S)
        status = self._post(route, body)
        time.sleep(_WAIT_S)
        return Effect(
            status, self._held_s(), self._parse_s[kind], peak_resident_bytes(self._server.pid) - before, len(body)
        )

    def _held_s(self) -> float:
        """Return the longest wait, including the current one."""
        asked_s = self._asked_s
        return max(self._longest_s, 0.0 if asked_s is None else time.perf_counter() - asked_s)

    def _post(self, route: str, body: bytes) -> int:
        connection = http.client.HTTPConnection(self._origin.host, self._origin.port, timeout=_TIMEOUT_S)
        try:
            connection.request("POST", route, body, {"content-type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            return answer.status
        finally:
            connection.close()

    def _run(self) -> None:
        connection = http.client.HTTPConnection(self._origin.host, self._origin.port, timeout=_TIMEOUT_S)
        while not self._ends.wait(_EVERY_S):
            self._asked_s = time.perf_counter()
            connection.request("GET", "/health")
            connection.getresponse().read()
            self._longest_s = max(self._longest_s, time.perf_counter() - self._asked_s)
            self._asked_s = None
        connection.close()


def as_json(effect: Effect) -> dict[str, Any]:
    """Return the figures for a result."""
    return {
        "status": effect.status,
        "held_ms": round(1000 * effect.held_s, 2),
        "parse_ms": round(1000 * effect.parse_s, 2),
        "times_body": round(effect.times_body, 2),
        "body_bytes": effect.body_bytes,
    }


def _parse_s(body: bytes) -> float:
    begin_s = time.perf_counter()
    with contextlib.suppress(ValueError, RecursionError):
        json.loads(body)
    return time.perf_counter() - begin_s
