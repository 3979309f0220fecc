"""`RecordedLog`: an event log on file, with the state at each of its steps."""

from __future__ import annotations

import os
import pickle
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from twostroke.errors import InvalidParameter
from twostroke.event_codec import PackedEvent, join, pack, split
from twostroke.events import EngineStarted, Event, EventsDropped, StepScheduled
from twostroke.live.state import LiveState
from twostroke.metrics.engine_metrics import FleetMetrics
from twostroke.plain_words import reason_of

CHUNK_EVENTS = 512
"""Events that are compressed together; reaching a step reads at most this many events more than needed."""
MAX_CHECKPOINTS = 64
_CONTRADICTIONS = (LookupError, ArithmeticError, ValueError, TypeError, AttributeError, AssertionError, MemoryError)
"""Errors that an event can cause if it contradicts the events before it."""


class _Position:
    """State after a number of events."""

    def __init__(self) -> None:
        self.metrics = FleetMetrics("", _ignore)
        self.state = LiveState(self.metrics)
        self.num_applied = 0

    def take(self, event: Event) -> None:
        """Apply the next event."""
        self.state.observe(event, self.metrics.observe(event))
        self.num_applied += 1


class RecordedLog:
    """Event log, kept compressed, with checkpoints from which any step is reached quickly.

    ```
    events        |--- chunk ---|--- chunk ---|--- chunk ---|--- …
    checkpoints   ^             ^             ^                    at most 64, thinned out as the log grows
    state(k)      the last checkpoint before step k + 1, and the events from there on
    ```

    Args:
        events: all events in order.
        name: name to show.

    Raises:
        InvalidParameter: there is no event, or one contradicts those before it.
    """

    def __init__(self, events: Iterable[Event], name: str) -> None:
        self._name = name
        self._chunks: list[bytes] = []
        self._ends = array("q")
        """For each step, the number of events before the next step is decided."""
        self._times_s = array("d")
        """Decision time of each step."""
        self._checkpoints: dict[int, bytes] = {}
        """Pickled positions by the number of events applied."""
        self._spacing = 1
        """Number of chunks between two checkpoints."""
        self._model = ""
        self._first_s = 0.0
        self._problems: list[str] = []
        self._started_processes: set[str] = set()
        self._last_step: dict[str, int] = {}
        self._out_of_order: set[str] = set()
        """Processes whose wrong step order has been reported."""
        self._num_events = 0
        self._cursor = _Position()
        self._read(events)
        if not self._num_events:
            remedy = "Give a file that --event-log wrote, or the dump of a flight recorder."
            raise InvalidParameter("event_log", name, "holds no event", remedy)

    def add_problem(self, sentence: str) -> None:
        """Add a sentence to the problems shown with the recording."""
        self._problems.append(sentence)

    @property
    def num_steps(self) -> int:
        """Number of steps with tokens."""
        return len(self._ends)

    def step_at(self, time_s: float) -> int:
        """Return the last step decided by this time; 0 before the first."""
        return max(0, bisect_right(self._times_s, time_s) - 1)

    def state(self, step: int) -> dict[str, Any]:
        """Return a "State" (docs/page.md) after all events before the next step was decided.

        Args:
            step: index from 0 on; ignored if the log has no step.
        """
        end = self._ends[step] if self._ends else self._num_events
        position = self._seek(end)
        whole = position.state.whole(self._model, position.state.time_s)
        recording = {
            "name": self._name,
            "num_steps": self.num_steps,
            "step": step if self._ends else -1,
            "first_s": self._first_s,
            "last_s": self._times_s[-1] if self._times_s else self._first_s,
            "problem": " ".join(self._problems),
        }
        return whole | {"recording": recording}

    def events(self) -> Iterator[Event]:
        """Yield all events."""
        for chunk in self._chunks:
            yield from split(zlib.decompress(chunk))

    # ------------------------------------------------------------------ reading

    def _read(self, events: Iterable[Event]) -> None:
        waiting: list[PackedEvent] = []
        for event in events:
            if not self._num_events:
                self._first_s = event.time_s
            try:
                self._check_start(event)
                self._check_step_order(event)
                self._note(event)
                self._cursor.take(event)
                packed = pack(event)
            except _CONTRADICTIONS as error:
                event_name = f"event {self._num_events + 1:,}, {type(event).__name__}"
                what = f"{event_name}, does not fit those before it ({reason_of(error)})"
                raise InvalidParameter("event_log", self._name, what, "Give a file as it was written.") from error
            self._num_events += 1
            waiting.append(packed)
            if len(waiting) >= CHUNK_EVENTS:
                self._chunks.append(zlib.compress(join(waiting), 1))
                waiting = []
                self._keep_checkpoint()
        if waiting:
            self._chunks.append(zlib.compress(join(waiting), 1))
        if self._ends:
            self._ends[-1] = self._num_events

    def _check_start(self, event: Event) -> None:
        """Report an engine whose start is missing: its state is unknown."""
        if isinstance(event, EngineStarted):
            self._started_processes.add(event.process)
        elif isinstance(event, StepScheduled) and event.process not in self._started_processes:
            self._started_processes.add(event.process)
            words = f"The start of {event.process} is missing: it is shown only from its next start on."
            self._problems.append(words)

    def _check_step_order(self, event: Event) -> None:
        """Report the first time that a process does not number its steps consecutively."""
        match event:
            case EngineStarted():
                self._last_step.pop(event.process, None)
            case EventsDropped():
                self._last_step.clear()  # this gap is reported by _note
            case StepScheduled():
                step, last = event.batch.step, self._last_step.get(event.process)
                self._last_step[event.process] = step
                if last is None or step == last + 1 or event.process in self._out_of_order:
                    return
                self._out_of_order.add(event.process)
                why = "the steps between are missing" if step > last else "steps are duplicated or out of order"
                self._problems.append(f"Step {step:,} of {event.process} follows step {last:,}: {why}.")
            case _:
                pass

    def _note(self, event: Event) -> None:
        match event:
            case StepScheduled() if not event.batch.is_empty:
                if self._ends:
                    self._ends[-1] = self._num_events
                self._ends.append(self._num_events + 1)
                self._times_s.append(event.time_s)
            case EngineStarted():
                self._model = event.model
            case EventsDropped():
                self._problems.append(f"{event.num_events:,} events before {event.time_s:.3f} s are missing.")
            case _:
                pass

    def _keep_checkpoint(self) -> None:
        if len(self._chunks) % self._spacing == 0:
            self._checkpoints[self._cursor.num_applied] = pickle.dumps(self._cursor)
        if len(self._checkpoints) > MAX_CHECKPOINTS:
            self._spacing *= 2
            apart = self._spacing * CHUNK_EVENTS
            self._checkpoints = {taken: kept for taken, kept in self._checkpoints.items() if taken % apart == 0}

    def _seek(self, end: int) -> _Position:
        """Return the state after `end` events, replayed from the nearest earlier position."""
        before = max((taken for taken in self._checkpoints if taken <= end), default=0)
        if not before <= self._cursor.num_applied <= end:
            kept = self._checkpoints.get(before)
            self._cursor = _Position() if kept is None else pickle.loads(kept)
        place = self._cursor.num_applied
        while place < end:
            number, skipped = divmod(place, CHUNK_EVENTS)
            for event in list(split(zlib.decompress(self._chunks[number])))[skipped : skipped + end - place]:
                self._cursor.take(event)
            place = self._cursor.num_applied
        return self._cursor


def is_truncated(path: Path) -> bool:
    """Return whether the last line of a file is cut off, as when the machine that wrote it stopped."""
    with path.open("rb") as file:
        if not file.seek(0, os.SEEK_END):
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _ignore(_: object) -> None:
    """Ignore a process that appears."""
