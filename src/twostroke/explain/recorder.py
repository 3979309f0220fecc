"""Flight recorder: the events of the last minutes, compressed, and complete enough to explain requests."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from twostroke.event_codec import PackedEvent, join, kind_of, split, to_json, unpack
from twostroke.events import EngineStarted, Event, EventsDropped
from twostroke.explain.names import place_of

CHUNK_EVENTS = 32
"""Number of events that are compressed together.

Neighbouring events repeat ids: a step of 64 decodes, including its 64 commits, takes about 1 kB compressed and 15 kB
uncompressed. Compression costs 0.9 µs of CPU per token.
"""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Neighbouring events, compressed."""

    compressed: bytes
    num_events: int
    last_time_s: float
    started: tuple[EngineStarted, ...]
    """Start events of the processes that ran when the chunk began."""


class FlightRecorder:
    """Buffer of the latest events: at most `minutes` of them and at most `max_bytes`, whichever is less.

    Implements `PackedEventLog`. A full history can be replayed. A history that had to drop its beginning contains
    `EventsDropped`, and explains the requests that it has in full.

    Args:
        minutes: age of the oldest event, counted from the newest.
        max_bytes: bytes of compressed events.
    """

    def __init__(self, *, minutes: float = 5.0, max_bytes: int = 64 << 20) -> None:
        assert minutes > 0, f"minutes={minutes}"
        assert max_bytes > 0, f"max_bytes={max_bytes}"
        self._max_age_s = minutes * 60
        self._max_bytes = max_bytes
        self._chunks: deque[_Chunk] = deque()
        self._num_bytes = 0
        self._num_dropped = 0
        self._open: list[PackedEvent] = []
        """Events that are not compressed yet."""
        self._started: dict[str, EngineStarted] = {}
        """Latest start event of each place."""
        self._started_before_open: tuple[EngineStarted, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of compressed events; fewer than CHUNK_EVENTS events more are not compressed yet."""
        return self._num_bytes

    @property
    def num_dropped(self) -> int:
        """Number of events that were dropped."""
        return self._num_dropped

    def append(self, packed: PackedEvent) -> None:
        """Keep one event, and drop the oldest chunks that are too old or too many."""
        self._open.append(packed)
        if len(self._open) >= CHUNK_EVENTS:
            now_s = unpack(packed).time_s
            self._compress(now_s)
            self._drop(now_s)

    def events(self) -> Iterator[Event]:
        """Iterate over the kept events, oldest first; safe in any thread while events are appended."""
        return self._unpacked(list(self._chunks), list(map(unpack, self._open)), self._num_dropped)

    def dump(self, path: Path) -> int:
        """Write the kept events as an event log, one per line, and return their number.

        Raises:
            OSError: the file cannot be written.
        """
        num_events = 0
        with path.open("w", encoding="utf-8") as lines:
            for event in self.events():
                lines.write(f"{to_json(event)}\n")
                num_events += 1
        return num_events

    def _compress(self, last_time_s: float) -> None:
        compressed = zlib.compress(join(self._open), 1)
        self._chunks.append(_Chunk(compressed, len(self._open), last_time_s, self._started_before_open))
        self._num_bytes += len(compressed)
        for packed in self._open:
            if kind_of(packed) == EngineStarted.__name__:
                started = unpack(packed)
                assert isinstance(started, EngineStarted), started
                self._started[place_of(started.process)] = started
        self._open = []
        self._started_before_open = tuple(self._started.values())

    def _drop(self, now_s: float) -> None:
        while self._chunks and (
            self._num_bytes > self._max_bytes or self._chunks[0].last_time_s < now_s - self._max_age_s
        ):
            chunk = self._chunks.popleft()
            self._num_bytes -= len(chunk.compressed)
            self._num_dropped += chunk.num_events

    def _unpacked(self, chunks: list[_Chunk], last: list[Event], num_dropped: int) -> Iterator[Event]:
        kept = (event for chunk in chunks for event in _events_of(chunk))
        first = next(kept, last[0] if last else None)
        if num_dropped and first is not None:
            started = chunks[0].started if chunks else self._started_before_open
            yield from started
            yield EventsDropped(first.time_s, first.process, num_dropped)
        if chunks and first is not None:
            yield first
        yield from kept
        yield from last


def _events_of(chunk: _Chunk) -> Iterator[Event]:
    return split(zlib.decompress(chunk.compressed))
