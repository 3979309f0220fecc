"""What becomes of each field of a request: it acts, it is bookkeeping, it is refused, or nobody knows it.

    acts          changes the answer; the routes read it
    bookkeeping   the client's own notes; accepted, changes nothing
    refused       would change the answer and is not supported: 400 that names it, unless its value asks for nothing
    unknown       not in the schema at all: named in the header x-ignored-params; 400 with --strict

Tools and calls of a conversation that the model's chat template does not write are named in x-unseen-params.

`standings` is the one source of docs/api-fields.md and of the tests that hold every field to what is said of it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any, Literal, Protocol, cast

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from twostroke.errors import InvalidParameter


class Standing(StrEnum):
    """What a field may be."""

    ACTS = "acts"
    BOOKKEEPING = "bookkeeping"
    REFUSED = "refused"


ServiceTier = Literal["auto", "default", "standard_only", "flex", "scale", "priority"]
SERVICE_TIER = (
    "flex: background work, it takes what other requests leave; priority: ahead of others where the server runs "
    "--policy priority; the others, and priority elsewhere: as without. The answer names what it was."
)
"""Description of the field."""
FLEX = "flex"
"""OpenAI's word for work that may wait: it takes what the others leave."""
PRIORITY = "priority"
"""OpenAI's word for work that goes first."""
PRIORITY_OF_TIER = -1
"""Place in the queue of the tier priority, where the request names none: ahead of 0, by --ageing-s."""


def tier_of(asked: ServiceTier | None, *, uses_priority: bool) -> dict[str, str]:
    """Return what an answer says of how it was served, if it was asked for in a way.

    Args:
        asked: the field of the request.
        uses_priority: whether the engine looks at priorities.

    >>> tier_of("scale", uses_priority=True), tier_of("priority", uses_priority=False)
    ({'service_tier': 'default'}, {'service_tier': 'default'})
    """
    if asked is None:
        return {}
    is_served = asked == FLEX or (asked == PRIORITY and uses_priority)
    return {"service_tier": asked if is_served else "default"}


class Prioritised(Protocol):
    """A request that has a place in the queue."""

    priority: int | None
    service_tier: ServiceTier | None


def priority_of(request: Prioritised, *, uses_priority: bool) -> int:
    """Return the priority of a request: the one it names, or else that of its tier.

    Args:
        request: as it came.
        uses_priority: whether the engine looks at priorities.
    """
    if request.priority is None and request.service_tier == PRIORITY and uses_priority:
        return PRIORITY_OF_TIER
    return request.priority or 0


MAX_UNKNOWN = 64
"""Unknown fields of a request that are named; one with more is not meant for this API."""
_STANDING = "x-standing"
_NEUTRAL = "x-neutral"


class WireObject(BaseModel):
    """An object that clients send: types are taken literally; unknown fields are kept, to be named."""

    model_config = ConfigDict(extra="allow", strict=True)

    @model_validator(mode="before")
    @classmethod
    def check_number_of_fields(cls, value: Any) -> Any:
        """Return the value; refuse an object with more unknown fields than are named, before any of them is read."""
        if isinstance(value, dict) and len(cast(dict[Any, Any], value)) > len(cls.model_fields) + MAX_UNKNOWN:
            told = f"more than {MAX_UNKNOWN} of its fields are unknown"
            raise PydanticCustomError("unknown_field", "{told}", {"told": told})
        return value

    @property
    def unknown_fields(self) -> list[str]:
        """Fields of the request that nobody reads, those of objects within it by their path; of very many the first."""
        return sorted(itertools.islice(self._unknown(), MAX_UNKNOWN + 1))

    def _unknown(self) -> Iterator[str]:
        """Their paths, as they come."""
        return _unknown(self, "")

    def check_refused(self) -> None:
        """Refuses fields that would have to act and do not, those of objects within it too.

        Raises:
            InvalidParameter: names the first.
        """
        for name, value, why in _refusals(self, ""):
            raise InvalidParameter(name, value, f"is not supported: {why}", "Leave it out.")


def as_sent(value: WireObject) -> dict[str, Any]:
    """Return the fields that a client has sent and not as null; what is plain JSON in it is not copied.

    Those of the client's own are left out: what one API knows of them another does not.
    """
    own = _own_fields(type(value))
    return {
        name: as_sent(item) if isinstance(item, WireObject) else item
        for name, item in value
        if item is not None and name not in own
    }


def bookkeeping(description: str) -> Any:
    """A field of the client's own."""
    return Field(default=None, description=description, json_schema_extra={_STANDING: Standing.BOOKKEEPING})


def refused(why: str, *neutral: Any) -> Any:
    """A field that is not supported; None and the `neutral` values ask for nothing and pass."""
    extra: Any = {_STANDING: Standing.REFUSED, _NEUTRAL: [None, *neutral]}
    return Field(default=None, description=why, json_schema_extra=extra)


def standings(kind: type[WireObject]) -> Iterator[tuple[str, Standing, str]]:
    """Name, standing and description of each field."""
    for name, field in kind.model_fields.items():
        yield field.alias or name, _standing(field), field.description or ""


def _standing(field: FieldInfo) -> Standing:
    return Standing(_extra(field).get(_STANDING, Standing.ACTS))


def _extra(field: FieldInfo) -> dict[str, Any]:
    return field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}


@functools.cache
def _own_fields(kind: type[WireObject]) -> frozenset[str]:
    return frozenset(name for name, field in kind.model_fields.items() if _standing(field) is Standing.BOOKKEEPING)


@functools.cache
def _refused_fields(kind: type[WireObject]) -> Mapping[str, FieldInfo]:
    return {name: field for name, field in kind.model_fields.items() if _standing(field) is Standing.REFUSED}


def _given(request: WireObject) -> Iterator[tuple[str, Any]]:
    """Fields that the client has sent, with their values, in the schema's order; what was left out asks for nothing."""
    sent = request.model_fields_set
    return ((name, value) for name, value in vars(request).items() if name in sent)


def _refusals(value: Any, path: str) -> Iterator[tuple[str, Any, str]]:
    """Name, value and reason of each field that cannot be served."""
    if isinstance(value, WireObject):
        refused = _refused_fields(type(value))
        for name, given in _given(value):
            field = refused.get(name)
            if field is not None and given not in _extra(field)[_NEUTRAL]:
                yield path + name, given, field.description or "not supported"
            if isinstance(given, (WireObject, list)):
                yield from _refusals(given, f"{path}{name}.")
    elif isinstance(value, list):
        for item in _objects(value):  # pyright: ignore[reportUnknownArgumentType]
            yield from _refusals(item, path)


def _unknown(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, WireObject):
        yield from (path + name for name in value.model_extra or ())
        for name, given in _given(value):
            if isinstance(given, (WireObject, list)):
                yield from _unknown(given, f"{path}{name}.")
    elif isinstance(value, list):
        for item in _objects(value):  # pyright: ignore[reportUnknownArgumentType]
            yield from _unknown(item, path)


def _objects(items: list[Any]) -> list[Any]:
    """Those that may have fields: all of a list of objects, and none of one that holds anything else."""
    return items if items and isinstance(items[0], WireObject) else []
