"""The event log of a pool's gateway: dead workers, routes, pool sizes, and the ends of sequences."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

from twostroke.engine.clock import monotonic_clock
from twostroke.engine.event_sinks import JsonlEventLog
from twostroke.engine.token_update import TokenUpdate
from twostroke.events import EngineLost, Event, PoolScaled, RequestFinishedByCaller, RequestRouted
from twostroke.explain.names import GATEWAY
from twostroke.pools.member import Role
from twostroke.request import FinishReason


def log_of(path: Path | None, process: str) -> Path | None:
    """Return the path of one process's log, because two processes cannot write to one file.

    >>> log_of(Path("run.jsonl"), "prefill-0.1")
    PosixPath('run.prefill-0.1.jsonl')
    """
    return None if path is None else path.with_name(f"{path.stem}.{process}{path.suffix}")


class GatewayLog:
    """A writer of the gateway's events.

    Args:
        tell: called with each event.
    """

    def __init__(self, tell: Callable[[Event], object]) -> None:
        self._tell = tell
        self._file: JsonlEventLog | None = None

    def open(self, path: Path | None) -> None:
        """Write events to the gateway's file too.

        Raises:
            InvalidParameter: it cannot be written.
        """
        path = log_of(path, GATEWAY)
        self._file = None if path is None else JsonlEventLog(path)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def lost(self, process: str, cause: str) -> None:
        """Record that a worker has died."""
        self._emit(EngineLost(monotonic_clock(), process, cause))

    def routed(self, event: RequestRouted) -> None:
        """Record the workers of a sequence."""
        self._emit(event)

    def scaled(self, pool: Role, num_workers: int, num_wanted: int, reason: str) -> None:
        """Record that a pool changes its size."""
        self._emit(PoolScaled(monotonic_clock(), GATEWAY, str(pool), num_workers, num_wanted, reason))

    def ended(self, sequence_id: str, reason: FinishReason, num_output_tokens: int | None = None) -> None:
        """Record that a sequence was ended from outside; the worker that ran it may be gone."""
        self._emit(RequestFinishedByCaller(monotonic_clock(), GATEWAY, sequence_id, reason, num_output_tokens))

    def delivered(self, updates: Sequence[TokenUpdate]) -> None:
        """Record the ends of sequences at a prefill worker; most continue on a decode worker."""
        for update in updates:
            if update.finish_reason is FinishReason.LENGTH:
                self.ended(update.request_id, FinishReason.LENGTH)

    def _emit(self, event: Event) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # serving continues without the log
                self._file.append(event)
        self._tell(event)
