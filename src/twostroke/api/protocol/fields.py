"""What becomes of each field of a request: it acts, it is bookkeeping, it is refused, or nobody knows it.

    acts          changes the answer; the routes read it
    bookkeeping   the client's own notes; accepted, changes nothing
    refused       would change the answer and is not supported: 400 that names it, unless its value asks for nothing
    unknown       not in the schema at all: named in the header x-ignored-params; 400 with --strict

`standings` is the one source of docs/api-fields.md and of the tests that hold every field to what is said of it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

from twostroke.errors import InvalidParameter


class Standing(StrEnum):
    """What a field may be."""

    ACTS = "acts"
    BOOKKEEPING = "bookkeeping"
    REFUSED = "refused"


ServiceTier = Literal["auto", "default", "standard_only", "flex"]
FLEX = "flex"
"""OpenAI's word for work that may wait: it takes what the others leave."""


def tier_of(asked: ServiceTier | None) -> dict[str, str]:
    """What an answer says of how it was served, if it was asked for in a way."""
    return {} if asked is None else {"service_tier": FLEX if asked == FLEX else "default"}


MAX_UNKNOWN = 64
"""Unknown fields of a request that are named; one with more is not meant for this API."""
_STANDING = "x-standing"
_NEUTRAL = "x-neutral"


class WireObject(BaseModel):
    """An object that clients send: types are taken literally; unknown fields are kept, to be named."""

    model_config = ConfigDict(extra="allow", strict=True)

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
    """Those that may have fields: of a list of token ids, which may be long, none."""
    return [item for item in items if isinstance(item, (WireObject, list))]
