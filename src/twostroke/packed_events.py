"""Events in msgpack, ["StepScheduled", {…}]: how they travel between processes, and how the flight recorder keeps them.

Packed once, where they happen. Whoever only keeps them never has to look inside.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol, get_args

import msgspec

from twostroke.events import Event

PackedEvent = msgspec.Raw

_DECODERS: dict[str, msgspec.msgpack.Decoder[Any]] = {
    kind.__name__: msgspec.msgpack.Decoder(kind) for kind in get_args(Event)
}
_ENCODER = msgspec.msgpack.Encoder()
_NAMED_DECODER = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])
_MANY_DECODER = msgspec.msgpack.Decoder(list[msgspec.Raw])


class PackedEventLog(Protocol):
    """Takes events that came packed, in their order."""

    def append(self, event: Event, packed: PackedEvent) -> None:
        """Keeps one event; both say the same."""
        ...


def pack(event: Event) -> PackedEvent:
    """The event as it travels."""
    return PackedEvent(_ENCODER.encode((type(event).__name__, event)))


def unpack(packed: PackedEvent) -> Event:
    """The event; equal to the one that was packed."""
    name, fields = _NAMED_DECODER.decode(packed)
    return _DECODERS[name].decode(fields)


def join(events: Iterable[PackedEvent]) -> bytes:
    """Several as one text of bytes."""
    return _ENCODER.encode(events)


def split(joined: bytes) -> Iterator[Event]:
    """The events that were joined."""
    return map(unpack, _MANY_DECODER.decode(joined))
