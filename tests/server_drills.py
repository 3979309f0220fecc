"""What a server that rests is like, to be compared with itself after it had something to bear."""

from __future__ import annotations

from dataclasses import dataclass

from server_process import ServerProcess
from twostroke.events import StepScheduled, from_json


@dataclass(frozen=True, slots=True)
class Baseline:
    """A server at rest."""

    num_requests: int
    num_starts: float
    """Of its engine."""
    num_free_blocks: int
    """While one request of one block runs: the gauge of the KV cache's use would not do, which is 0 where nobody is
    whatever nobody gave back."""

    @classmethod
    def of(cls, server: ServerProcess) -> Baseline:
        """Waits until nothing runs, and lets one request look."""
        idle = server.wait_for("nothing runs", "/health", lambda answer: answer.json()["num_requests"] == 0).json()
        server.post("/v1/completions", {"prompt": [5], "max_tokens": 1}).raise_for_status()
        events = [from_json(line) for line in server.http.get("/flight_recorder").text.splitlines()]
        steps = [event for event in events if isinstance(event, StepScheduled)]
        return cls(idle["num_requests"], server.metric("engine_starts_total"), steps[-1].batch.num_free_blocks)
