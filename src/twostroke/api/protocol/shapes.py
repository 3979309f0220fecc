"""Type check of a large request body before it is parsed, up to the first wrong value.

Python's JSON reader makes an object of every value, wanted or not: 24 MB from 1 MB of `[{},{},…]`. The reader here is
derived from the request schemas. It makes few objects from right values, none from fields of any type, and stops at
the first wrong value. It is for large bodies only; pydantic checks every body afterwards.

Texts and lists of numbers are the right values that take the most memory, 24 times their size. Their number in a list
is therefore counted first, without making any objects.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin

import msgspec

from twostroke.api.http_errors import HTTPError, nested_too_deeply
from twostroke.api.protocol.fields import MAX_CONTAINERS, MAX_FIELDS, MAX_OBJECTS, AllowsText, AtMost, WireObject

CHECKED_BYTES = 64 * 1024
"""Size above which bodies are checked before they are parsed."""
_WORDS = {
    "str": "a string",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "null": "null",
    "array": "a list",
    "object": "an object",
}
_PLACE = re.compile(r"(?P<told>.*?)(?: - at `(?P<place>.*)`)?", re.DOTALL)
_MAX_PLACE = 200
_TOO_LONG = re.compile(r"expected a list of length <= (\d+)")
_TEXT = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_COUNTED = rb"(?:\s*+(?:%b|\[[^\[\]{}\"]*+\])\s*+,)" % _TEXT
"""Text or list of numbers, and the comma after it; their contents are skipped."""


def _more_than(most: int, marks: bytes) -> re.Pattern[bytes]:
    """Return a pattern for the beginning of a body with more than `most` of these characters outside strings."""
    others = rb'[^"%b]*+' % re.escape(marks)
    return re.compile(rb"(?:%b(?:%b%b)*+[%b]){%d}+" % (others, _TEXT, others, re.escape(marks), most + 1), re.DOTALL)


_TOO_MANY = _more_than(MAX_CONTAINERS, b"[{")
"""Pattern of more lists and objects than a request may have."""
_TOO_MANY_FIELDS = _more_than(MAX_FIELDS, b":")


class AnyObject(msgspec.Struct, gc=False):
    """Object with any fields, which are not read."""


@dataclass(frozen=True, slots=True)
class HasShape:
    """Marker of an object that is kept as sent but must have a shape: `Annotated[dict[str, Any], HasShape(Shape)]`."""

    shape: type[msgspec.Struct]


def check_shape(kind: type[WireObject], body: bytes | bytearray) -> None:
    """Refuse a body that has a value of a wrong type, or too many values.

    Raises:
        HTTPError: 400, naming the first wrong value or a list that is too long, or why the body is not JSON; 413, too
            many lists, objects or fields.
    """
    for name, most, too_long in _long_lists(kind):
        if too_long.search(body) is not None and _has_long_list(kind, name, too_long, body):
            raise _wrong(f"must have at most {most} items", name)
    try:
        _decoder(kind).decode(body)
    except msgspec.ValidationError as error:
        _refuse(str(error))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        told = f"the body is not valid JSON ({error}). NaN and lone surrogates are not allowed."
        raise HTTPError(400, told, code="invalid_json") from error
    except RecursionError as error:
        raise nested_too_deeply() from error
    if body.count(b"{") + body.count(b"[") > MAX_CONTAINERS and _TOO_MANY.match(body) is not None:
        told = f"the request has more than {MAX_CONTAINERS} lists and objects. Send less in one request."
        raise HTTPError(413, told, code="request_too_large")
    if body.count(b":") > MAX_FIELDS and _TOO_MANY_FIELDS.match(body) is not None:
        told = f"the objects of the request have more than {MAX_FIELDS} fields together. Send less in one request."
        raise HTTPError(413, told, code="request_too_large")


def _refuse(told: str) -> NoReturn:
    found = _PLACE.fullmatch(told)
    assert found is not None
    message, place = found["told"], (found["place"] or "").removeprefix("$").removeprefix(".")[:_MAX_PLACE]
    words = re.sub(r"`([^`]*)`", _in_words, message)
    words = _TOO_LONG.sub(r"must have at most \1 items", words[:1].lower() + words[1:])
    raise _wrong(words, place)


def _wrong(words: str, place: str) -> HTTPError:
    param = re.split(r"[.\[]", place)[0] or None
    at = f" at {place}" if place else ""
    return HTTPError(400, f"the request is not valid{at}: {words}.", param=param)


def _in_words(quoted: re.Match[str]) -> str:
    """Return the types in words; names are left as they are."""
    names = quoted[1].split(" | ")
    return " or ".join(_WORDS[name] for name in names) if all(name in _WORDS for name in names) else quoted[0]


@dataclass(frozen=True, slots=True)
class _Shape:
    """Types that a value may have."""

    plain: frozenset[Any] = frozenset()
    """Accepted types of strings, numbers, booleans and null."""
    item: _Shape | None = None
    """Shape of a list's elements; None if it may not be a list."""
    members: Mapping[str, _Shape] | None = None
    """Shapes of an object's fields, by name; None if it may not be an object."""
    needs: frozenset[frozenset[str]] = frozenset()
    """Sets of required names; an object must have all names of one set."""
    objects: frozenset[Any] = frozenset()
    """Accepted object types that are given as msgspec structs."""
    is_any: bool = False
    most: int = 0
    """Maximum elements of a list; for a list of several types, that of the longest."""
    most_counted: int = 0
    """Maximum strings or lists in a list; 0 if it may contain neither, or any number."""

    def __or__(self, other: _Shape) -> _Shape:
        """Return a shape that accepts either; an object must have the required names of one of its types."""
        if self.is_any or other.is_any:
            return _Shape(is_any=True)
        item = self.item | other.item if self.item and other.item else self.item or other.item
        members = self.members if other.members is None else other.members
        if self.members is not None and other.members is not None:
            members = _merged(self.members, other.members)
        return _Shape(
            self.plain | other.plain,
            item,
            members,
            self.needs | other.needs,
            self.objects | other.objects,
            most=max(self.most, other.most),
            most_counted=max(self.most_counted, other.most_counted),
        )

    def with_limit(self, most: int) -> _Shape:
        """Return this shape as a list with a maximum number of elements."""
        counts = self.item is not None and (str in self.item.plain or self.item.item is not None)
        return replace(self, most=most, most_counted=most if counts else 0)

    def counted_lists(self) -> Iterator[tuple[str, int]]:
        """Yield name and limit of each field within this shape that is a list of strings or of lists."""
        for shape in self.item, *(self.members or {}).values():
            if shape is not None:
                yield from shape.counted_lists()
        for name, shape in (self.members or {}).items():
            if shape.most_counted:
                yield name, shape.most_counted
        for struct in self.objects:
            for field in msgspec.structs.fields(struct):
                if any(get_origin(part) is list for part in get_args(field.type)):
                    yield field.encode_name, MAX_OBJECTS

    def type(self, name: str, *, is_item: bool = False) -> Any:
        """Return this shape as a type for msgspec; `is_item` tells that it is a list's element."""
        if self.is_any:
            return msgspec.Raw
        found = [*self.plain, *self.objects]
        if self.item is not None:
            # an empty list within a list has no meaning, and takes 64 bytes of memory for 3 bytes of JSON
            limits = msgspec.Meta(min_length=int(is_item), max_length=self.most or None)
            found.append(Annotated[list[self.item.type(name, is_item=True)], limits])
        if self.members is not None:
            found.append(_struct(name, self.members, self.needs) if self.members else AnyObject)
        return Union[tuple(found)]  # noqa: UP007 (a variable number of types)


_Members = Mapping[str, _Shape]


def _merged(one: _Members, other: _Members) -> _Members:
    return {**one, **other, **{name: one[name] | other[name] for name in one if name in other}}


def _struct(name: str, members: _Members, needs: frozenset[frozenset[str]]) -> type[msgspec.Struct]:
    """Return the type of an object; an object without its required names is refused before the next one is read."""
    always = frozenset.intersection(*needs)
    fields: list[Any] = []
    for member, shape in members.items():
        read = shape.type(f"{name}_{member}")
        fields.append((member, read) if member in always else (member, read, msgspec.UNSET))
    if len(needs) == 1:
        return msgspec.defstruct(name, fields, kw_only=True, gc=False)

    def check(self: msgspec.Struct) -> None:
        if not any(all(getattr(self, needed) is not msgspec.UNSET for needed in kind) for kind in needs):
            raise ValueError("The object lacks a required field")

    return msgspec.defstruct(name, fields, namespace={"__post_init__": check}, kw_only=True, gc=False)


@functools.cache
def _decoder(kind: type[WireObject]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(_shape_of(kind).type(kind.__name__))


@functools.cache
def _long_lists(kind: type[WireObject]) -> list[tuple[str, int, re.Pattern[bytes]]]:
    """Return the names of lists of strings or lists, their limits, and patterns that match longer ones."""
    limits: dict[str, int] = {}
    for name, most in _shape_of(kind).counted_lists():
        limits[name] = max(most, limits.get(name, 0))
    return [
        (name, most, re.compile(rb'"%b"\s*:\s*\[%b{%d}+' % (name.encode(), _COUNTED, most), re.DOTALL))
        for name, most in limits.items()
    ]


def _has_long_list(kind: type[WireObject], name: str, too_long: re.Pattern[bytes], body: bytes | bytearray) -> bool:
    """Return whether the long list found is the body's own field, not one of that name in a part that is not read."""
    if name not in (_shape_of(kind).members or {}):
        return True
    only = msgspec.defstruct("Only", [(name, msgspec.Raw, msgspec.Raw(b""))])
    try:
        value: msgspec.Raw = getattr(msgspec.json.decode(body, type=only), name)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return True
    return too_long.match(b'"%b":%b' % (name.encode(), bytes(value))) is not None


def _shape_of(hint: Any) -> _Shape:
    """Return the shape of a type annotation of a pydantic model."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        ready = [extra.shape for extra in parts[1:] if isinstance(extra, HasShape)]
        if ready:
            return _Shape(objects=frozenset(ready))
        if any(isinstance(extra, AllowsText) for extra in parts[1:]):
            return _shape_of(parts[0]) | _Shape(frozenset((str,)))
        limits = [extra.items for extra in parts[1:] if isinstance(extra, AtMost)]
        return _shape_of(parts[0]).with_limit(limits[0]) if limits else _shape_of(parts[0])
    if origin in (Union, UnionType):
        return functools.reduce(operator.or_, map(_shape_of, parts))
    if origin is Literal:
        return _Shape(frozenset(type(value) for value in parts))
    if origin is list:
        return _Shape(item=_shape_of(parts[0]))
    if origin is dict:
        return _Shape(members={}, needs=frozenset((frozenset(),)))
    if hint in (str, int, float, bool, NoneType):
        return _Shape(frozenset((hint,)))
    if isinstance(hint, type) and issubclass(hint, WireObject):
        return _shape_of_object(hint)
    assert hint is Any, f"no shape is known for {hint}"
    return _Shape(is_any=True)


def _shape_of_object(kind: type[WireObject]) -> _Shape:
    named = {info.alias or name: info for name, info in kind.model_fields.items()}
    needed = frozenset(name for name, info in named.items() if info.is_required())
    return _Shape(
        members={
            name: _shape_of(Annotated[(info.annotation, *info.metadata)] if info.metadata else info.annotation)
            for name, info in named.items()
        },
        needs=frozenset((needed,)),
    )
