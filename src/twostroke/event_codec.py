"""Events in msgpack, ["StepScheduled", {…}]: how they travel between processes, and how the flight recorder keeps them.

Packed once, where they happen. Whoever only keeps them never has to look inside: `Unread` keeps them for views that
are folded when somebody asks for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, Protocol, TypeVar, get_args

import msgspec

from twostroke.events import Event

PackedEvent = msgspec.Raw
MAX_UNREAD_BYTES = 256 << 10
"""Of packed events that are kept for a view that nobody looks at. Folding so many takes about 10 ms, which whoever asks
next waits for: about 20 steps of 64 decodes, or 700 of one."""

_Note = TypeVar("_Note")

_DECODERS: dict[str, msgspec.msgpack.Decoder[Any]] = {
    kind.__name__: msgspec.msgpack.Decoder(kind) for kind in get_args(Event)
}
_ENCODER = msgspec.msgpack.Encoder()
_NAMED_DECODER = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])
_MANY_DECODER = msgspec.msgpack.Decoder(list[msgspec.Raw])


class PackedEventLog(Protocol):
    """Takes events that came packed, in their order."""

    def append(self, packed: PackedEvent) -> None:
        """Keep one event."""
        ...


class Unread(Generic[_Note]):
    """Events, and notes of their reader's own between them, that are read in their order when somebody asks.

    Above MAX_UNREAD_BYTES each new event has the oldest ones read, so memory stays bounded when nobody ever asks.

    Args:
        read: takes each event or note, in the order in which they came.
    """

    def __init__(self, read: Callable[[Event | _Note], object]) -> None:
        self._read = read
        self._kept: deque[PackedEvent | _Note] = deque()
        self._num_bytes = 0

    def append(self, packed: PackedEvent) -> None:
        """Keep one event."""
        self._kept.append(packed)
        self._num_bytes += len(packed)
        while self._num_bytes > MAX_UNREAD_BYTES:
            self._read_one()

    def note(self, note: _Note) -> None:
        """Keep a note behind the events so far."""
        self._kept.append(note)

    def catch_up(self) -> None:
        """Read everything."""
        while self._kept:
            self._read_one()

    def _read_one(self) -> None:
        kept = self._kept.popleft()
        if isinstance(kept, PackedEvent):
            self._num_bytes -= len(kept)
            self._read(unpack(kept))
        else:
            self._read(kept)


def pack(event: Event) -> PackedEvent:
    """The event as it travels."""
    return PackedEvent(_ENCODER.encode((type(event).__name__, event)))


def unpack(packed: PackedEvent) -> Event:
    """The event; equal to the one that was packed."""
    name, fields = _NAMED_DECODER.decode(packed)
    return _DECODERS[name].decode(fields)


def kind_of(packed: PackedEvent) -> str:
    """Return the name of an event's type, without unpacking its fields.

    >>> from twostroke.events import PrefixCacheReset
    >>> kind_of(pack(PrefixCacheReset(0.0, "engine-1")))
    'PrefixCacheReset'
    """
    return _NAMED_DECODER.decode(packed)[0]


def join(events: Iterable[PackedEvent]) -> bytes:
    """Several as one text of bytes."""
    return _ENCODER.encode(events)


def split(joined: bytes) -> Iterator[Event]:
    """The events that were joined."""
    return map(unpack, _MANY_DECODER.decode(joined))
