"""Where an event log goes when it outlives the process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from twostroke.events import Event, from_json, to_json


class JsonlEventLog:
    """Appends events to a file, a line each.

    Lines are handed to the operating system as they come, so the log of a process that died ends with its last event.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)

    def append(self, event: Event) -> None:
        """Writes one line."""
        self._file.write(f"{to_json(event)}\n".encode())

    def close(self) -> None:
        """No more events."""
        self._file.close()

    def __enter__(self) -> JsonlEventLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_events(path: Path) -> Iterator[Event]:
    """The events of a file, in their order; a last line that was cut off is left out.

    Raises:
        UnreadableEvent: a line is no event of this version.
    """
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("\n"):
                yield from_json(line)
