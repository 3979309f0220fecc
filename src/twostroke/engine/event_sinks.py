"""Event logs in files: write, read and merge them."""

from __future__ import annotations

import contextlib
import heapq
import json
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import cast

from twostroke.errors import InvalidParameter, TwostrokeError, UnreadableEvent
from twostroke.event_codec import WHOLE_LOG, from_json, to_json
from twostroke.events import Event

MAX_LINE_CHARS = 2**26
"""Longest line that is read. The arrival event of a prompt of a million tokens takes ten million characters."""


class JsonlEventLog:
    """A file to which events are appended, one per line.

    Lines are written unbuffered, so the log of a process that died ends with its last event.

    Raises:
        InvalidParameter: the file cannot be opened for writing.
    """

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)
        except (OSError, ValueError) as error:  # ValueError: a path that no system call takes
            raise InvalidParameter(
                "event_log",
                str(path),
                f"cannot be written ({_reason(error)})",
                "Name a file in a folder that you may write to, or leave it out.",
            ) from error

    def append(self, event: Event) -> None:
        """Write one line."""
        self._file.write(f"{to_json(event)}\n".encode())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> JsonlEventLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_events(path: Path) -> Iterator[Event]:
    """Yield the events of a file in order; skip a last line that was cut off.

    Raises:
        InvalidParameter: the file cannot be read.
        UnreadableEvent: a line is no event of this version.
    """
    try:
        with path.open(encoding="utf-8") as lines:
            number = 0
            while line := lines.readline(MAX_LINE_CHARS + 1):
                number += 1
                if len(line) > MAX_LINE_CHARS:
                    told = f"{path}, line {number}: a line of more than {MAX_LINE_CHARS} characters is no event."
                    raise UnreadableEvent(f"{told} {WHOLE_LOG}")
                if line.endswith("\n"):
                    yield _event_of(line, f"{path}, line {number}")
    except UnicodeDecodeError as error:
        raise UnreadableEvent(f"{path} is no event log: it is not UTF-8 ({error}). {WHOLE_LOG}") from error
    except OSError as error:
        raise InvalidParameter(
            "event_log", str(path), f"cannot be read ({_reason(error)})", "Give a file that --event-log wrote."
        ) from error


def _event_of(line: str, where: str) -> Event:
    try:
        return from_json(line)
    except UnreadableEvent as error:
        raise UnreadableEvent(f"{where}: {error}") from error


def is_event_log(path: Path) -> bool:
    """Return whether a file begins with an event of any version. False where it cannot be read."""
    try:
        with path.open(encoding="utf-8") as lines:
            record: object = json.loads(next((line for line in lines if line.strip()), ""))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(record, dict) and {"v", "event"} <= cast(dict[str, object], record).keys()


def merged_events(paths: Sequence[Path]) -> Iterator[Event]:
    """Return the events of several files, ordered by time; each file is from one process of the same machine.

    Raises:
        InvalidParameter: see read_events.
        UnreadableEvent: see read_events.
    """
    return heapq.merge(*map(read_events, paths), key=lambda event: event.time_s)


@contextlib.contextmanager
def consistent_events(paths: Sequence[Path | str], name: str = "event_log") -> Generator[None]:
    """Refuse files whose events are valid one by one but contradict each other, such as a line repeated or missing.

    A refusal of the events that a program holds gets the names of the files and of the parameter.

    Args:
        paths: files whose events the block uses; or the address of the server that sent the events.
        name: the parameter, as the caller spells it.

    Raises:
        InvalidParameter: the block failed.
    """
    try:
        yield
    except InvalidParameter as error:
        if error.name != "event_log":
            raise
        raise InvalidParameter(name, ", ".join(map(str, paths)), error.limit, error.remedy) from error
    except TwostrokeError:
        raise
    except (AssertionError, LookupError, ArithmeticError, ValueError, TypeError, AttributeError) as error:
        files = ", ".join(map(str, paths))
        limit = f"holds events that contradict each other ({str(error)[:200] or 'an event is missing'})"
        raise InvalidParameter(name, files, limit, "Give a file as --event-log wrote it.") from error


def _reason(error: Exception) -> str:
    """Return the reason without the path, which the message has already."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
