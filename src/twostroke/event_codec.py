"""Encoding of events: msgpack between processes and in memory, lines of JSON in files.

    ["StepScheduled", {…}]                            packed, once, where it happens
    {"v": 6, "event": "StepScheduled", …}             a line of an event log

Code that only keeps packed events need not decode them: the flight recorder does so, and `LazyEvents`, for views that
are computed on demand.
"""

from __future__ import annotations

import dataclasses
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from functools import cache
from itertools import chain
from types import NoneType, UnionType
from typing import Any, Generic, Protocol, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from twostroke.config.speculation import MAX_DRAFTS
from twostroke.errors import UnreadableEvent, shown
from twostroke.events import Event, ExpertsMeasured, StepCommitted

EVENT_LOG_VERSION = 6
MAX_TIME_S = 1e12
"""Largest time on a process's clock."""

PackedEvent = msgspec.Raw
MAX_UNREAD_BYTES = 256 << 10
"""Most bytes of packed events that are kept for a view that is not read. Folding so many takes about 10 ms, which the
next reader waits for: about 20 steps of 64 decodes, or 700 of one."""

_Note = TypeVar("_Note")

_DECODERS: dict[str, msgspec.msgpack.Decoder[Any]] = {
    kind.__name__: msgspec.msgpack.Decoder(kind) for kind in get_args(Event)
}
_ENCODER = msgspec.msgpack.Encoder()
_NAMED_DECODER = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])
_MANY_DECODER = msgspec.msgpack.Decoder(list[msgspec.Raw])


class PackedEventLog(Protocol):
    """Log that takes packed events, in their order."""

    def append(self, packed: PackedEvent) -> None:
        """Keep one event."""
        ...


class LazyEvents(Generic[_Note]):
    """Queue of events, and of notes between them, that are read in their order on demand.

    Above MAX_UNREAD_BYTES each new event has the oldest ones read, so memory stays bounded if the view is never read.

    Args:
        read: called with each event or note, in their order.
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
        """Keep a note after the events so far."""
        self._kept.append(note)

    def catch_up(self) -> None:
        """Read all events and notes."""
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
    """Return the event as msgpack."""
    return PackedEvent(_ENCODER.encode((type(event).__name__, event)))


def unpack(packed: PackedEvent) -> Event:
    """Return the event; equal to the one that was packed."""
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
    """Return several packed events as one byte string."""
    return _ENCODER.encode(events)


def split(joined: bytes) -> Iterator[Event]:
    """Return the events that were joined."""
    return map(unpack, _MANY_DECODER.decode(joined))


# ---------------------------------------------------------------------- lines of JSON

_KINDS: dict[str, type[Event]] = {kind.__name__: kind for kind in get_args(Event)}


def plain(settings: Any) -> dict[str, Any]:
    """Return the fields of a dataclass as JSON would return them: lists for tuples.

    >>> from twostroke.request import Arrival
    >>> plain(Arrival("a", 0.5, 3, 4))["num_prompt_tokens"]
    3
    """
    return json.loads(json.dumps(_fields(settings), default=_fields))


def to_json(event: Event) -> str:
    """Return the event as one line, without the line break."""
    head = {"v": EVENT_LOG_VERSION, "event": type(event).__name__}
    return json.dumps(head | _fields(event), default=_fields, separators=(",", ":"), allow_nan=False)


def from_json(line: str) -> Event:
    """Return the event of one line; equal to the one that was written.

    Raises:
        UnreadableEvent: not JSON, another version, an unknown event, or fields that do not fit it.
    """
    try:
        record: Any = json.loads(line)
        if not isinstance(record, dict):
            raise TypeError("it is no object")
        version = record.pop("v")
        event = _event_of(record) if version == EVENT_LOG_VERSION else None
    except _MISFITS as error:
        why = f"no {error} in it that is known" if isinstance(error, KeyError) else str(error)
        raise UnreadableEvent(f"no event: {line[:80]!r} ({why}). {WHOLE_LOG}") from error
    if event is None:
        remedy = "Read it with the release that wrote it."
        raise UnreadableEvent(
            f"event log version {shown(version)}; this release reads version {EVENT_LOG_VERSION}. {remedy}"
        )
    return event


WHOLE_LOG = "Give the whole file as --event-log wrote it; fetch a truncated dump again."
"""Advice for a log that cannot be read."""
_MISFITS = (
    *(ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError),
    msgspec.MsgspecError,
)
"""Errors that a line without an event causes."""
_NAMES: dict[type, tuple[str, ...]] = {}


def _event_of(record: dict[str, Any]) -> Event:
    kind = _KINDS[record.pop("event")]
    build = _builder(kind)
    assert build is not None, "events are dataclasses"
    # a round trip through msgpack refuses values of a wrong type at any depth
    event = _checker(kind).decode(_ENCODER.encode(build(record)))
    _check_sizes(event)
    return event


def _check_sizes(event: Event) -> None:
    """Raise ValueError for numbers that no engine writes, since readers of the log compute or count with them."""
    if not abs(event.time_s) <= MAX_TIME_S:
        raise ValueError(f"time_s is {event.time_s}; at most {MAX_TIME_S:g} s are possible")
    if isinstance(event, StepCommitted) and any(commit.num_draft_tokens > MAX_DRAFTS for commit in event.commits):
        raise ValueError(f"more than {MAX_DRAFTS} drafts in a row")
    if isinstance(event, ExpertsMeasured):
        for num_experts, share in chain.from_iterable(event.shares):
            if num_experts < 1 or not 0 < share <= 1:
                raise ValueError(f"{num_experts} experts with a share of {share}")


def _fields(value: Any) -> Any:
    """Return objects for dataclasses and structs, and hexadecimal text for bytes, which JSON cannot encode."""
    if isinstance(value, bytes):
        return value.hex()
    kind = type(value)
    if kind not in _NAMES:
        if issubclass(kind, msgspec.Struct):
            _NAMES[kind] = kind.__struct_fields__
        elif dataclasses.is_dataclass(kind):
            _NAMES[kind] = tuple(field.name for field in dataclasses.fields(kind))
        else:
            raise TypeError(f"{kind.__name__} has no place in an event")
    return {name: getattr(value, name) for name in _NAMES[kind]}


@cache
def _checker(kind: type[Event]) -> msgspec.msgpack.Decoder[Event]:
    return msgspec.msgpack.Decoder(kind)


_Build = Callable[[Any], Any]


@cache
def _builder(kind: Any) -> _Build | None:
    """Return a function from a JSON value to a value of the annotated type `kind`; None: the JSON value fits as it
    is."""
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        inner = _builder(next(part for part in get_args(kind) if part is not NoneType))
        return inner and (lambda value: None if value is None else inner(value))
    if origin is tuple:
        item = _builder(get_args(kind)[0])
        return tuple if item is None else lambda value: tuple(map(item, value))
    if kind is bytes:
        return bytes.fromhex
    if not isinstance(kind, type):
        return None
    if issubclass(kind, Enum):
        return kind
    if issubclass(kind, msgspec.Struct) or dataclasses.is_dataclass(kind):
        return _field_builder(kind)
    return None


def _field_builder(kind: type[Any]) -> _Build:
    builders = {name: _builder(hint) for name, hint in get_type_hints(kind).items()}
    converted = [(name, build) for name, build in builders.items() if build is not None]

    def build_fields(value: dict[str, Any]) -> Any:
        for name, build in converted:
            if name in value:
                value[name] = build(value[name])
        return kind(**value)

    return build_fields
