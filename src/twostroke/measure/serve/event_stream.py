"""Server-sent events, cut anywhere: https://html.spec.whatwg.org/multipage/server-sent-events.html"""

from __future__ import annotations

from collections.abc import Iterator

MAX_EVENT_BYTES = 1 << 24
"""Longer than any event of a completion: a stream without line ends must not fill the memory."""


class EventStream:
    """Puts parts of a stream together again and hands out the data of each whole event.

    Only `data` fields are looked at, and lines end in LF or CR LF: a CR alone, which the standard allows as well, is
    sent by no server of this API and would make every chunk that ends in CR wait for the next.

    >>> stream = EventStream()
    >>> [list(stream.feed(part)) for part in (b'data: {"a"', b': 1}\\n\\nda', b'ta:[DONE]\\r\\n\\r\\n')]
    [[], [b'{"a": 1}'], [b'[DONE]']]
    """

    def __init__(self) -> None:
        self._rest = b""
        """A line that has not ended."""
        self._data: list[bytes] = []
        """Of the event that has not ended."""

    def feed(self, part: bytes) -> Iterator[bytes]:
        """Takes the next bytes; yields the data of the events that they end.

        Raises:
            ValueError: a line longer than MAX_EVENT_BYTES.
        """
        *lines, self._rest = (self._rest + part if self._rest else part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:].strip(b" \r"))
            elif line in (b"", b"\r") and self._data:
                yield self._data[0] if len(self._data) == 1 else b"\n".join(self._data)
                self._data.clear()
        if len(self._rest) > MAX_EVENT_BYTES:
            raise ValueError(f"an event of more than {MAX_EVENT_BYTES:,} bytes")
