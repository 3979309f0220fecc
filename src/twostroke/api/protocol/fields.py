"""Building blocks of request schemas, and the treatment of each field.

    acts          changes the answer; read by the routes
    bookkeeping   the client's own notes; accepted without effect
    refused       would change the answer and is not supported: 400 that names it, unless its value has no effect
    unknown       not in the schema: named in the header x-ignored-params; 400 with --strict

Tools and calls that the model's chat template does not render are named in x-unseen-params.

`field_treatments` is the source of docs/api-fields.md and of the tests that check every field against its description.

The length of a list or map is checked before its elements, and reading stops at the first wrong element. Otherwise
pydantic checks every element of a list of the wrong type and keeps an error for each: half a million numbers instead
of texts took seconds of the event loop and gigabytes of memory.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal, Protocol, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    Tag,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from twostroke.errors import InvalidParameter, shown


class FieldTreatment(StrEnum):
    """Treatment of a field."""

    ACTS = "acts"
    BOOKKEEPING = "bookkeeping"
    REFUSED = "refused"


ServiceTier = Literal["auto", "default", "standard_only", "flex", "scale", "priority"]
SERVICE_TIER = (
    "flex: background work, run when other requests leave room; priority: ahead of others with --policy priority; "
    "all other values, and priority without that policy, have no effect. The answer names the tier used."
)
"""Description of the field `service_tier`."""
FLEX = "flex"
"""OpenAI's service tier for background work, which runs when other requests leave room."""
PRIORITY = "priority"
"""OpenAI's service tier for requests that are served first."""
PRIORITY_OF_TIER = -1
"""Priority of the tier `priority` if the request sets none: --ageing-s ahead of priority 0."""


def tier_of(asked: ServiceTier | None, *, uses_priority: bool) -> dict[str, str]:
    """Return the answer's service tier field, if the request has one.

    Args:
        asked: `service_tier` of the request.
        uses_priority: whether the engine uses priorities.

    >>> tier_of("scale", uses_priority=True), tier_of("priority", uses_priority=False)
    ({'service_tier': 'default'}, {'service_tier': 'default'})
    """
    if asked is None:
        return {}
    is_served = asked == FLEX or (asked == PRIORITY and uses_priority)
    return {"service_tier": asked if is_served else "default"}


class HasPriority(Protocol):
    """Request with fields for its priority."""

    priority: int | None
    service_tier: ServiceTier | None


def priority_of(request: HasPriority, *, uses_priority: bool) -> int:
    """Return the priority of a request: its own field, or else that of its tier.

    Args:
        request: the request as sent.
        uses_priority: whether the engine uses priorities.
    """
    if request.priority is None and request.service_tier == PRIORITY and uses_priority:
        return PRIORITY_OF_TIER
    return request.priority or 0


MAX_UNKNOWN = 64
"""Maximum unknown fields of a request; a request with more is not meant for this API."""
_TREATMENT = "x-standing"
_NEUTRAL = "x-neutral"


class WireObject(BaseModel):
    """Object that clients send. Types are strict; unknown fields are kept, so that they can be reported."""

    model_config = ConfigDict(extra="allow", strict=True)

    @model_validator(mode="before")
    @classmethod
    def check_number_of_fields(cls, value: Any) -> Any:
        """Return the value; refuse an object with too many unknown fields before any of them is read."""
        if isinstance(value, dict) and len(cast(dict[Any, Any], value)) > len(cls.model_fields) + MAX_UNKNOWN:
            told = f"it has more than {MAX_UNKNOWN} unknown fields"
            raise PydanticCustomError("unknown_field", "{told}", {"told": told})
        return value

    @property
    def unknown_fields(self) -> list[str]:
        """Paths of the unknown fields of the request and its nested objects; only the first if there are very many."""
        return sorted(itertools.islice(self._unknown(), MAX_UNKNOWN + 1))

    def _unknown(self) -> Iterator[str]:
        """Yield the paths of unknown fields."""
        return _unknown(self, "")

    def check_refused(self) -> None:
        """Refuse unsupported fields that would have to act, also in nested objects.

        Raises:
            InvalidParameter: names the first.
        """
        for name, value, why in _refusals(self, ""):
            raise InvalidParameter(name, value, f"is not supported: {why}", "Leave it out.")


def as_sent(value: WireObject) -> dict[str, Any]:
    """Return the fields that the client has sent and that are not null; plain JSON in them is not copied.

    Bookkeeping fields are left out, because those of one API are unknown to another.
    """
    own = _own_fields(type(value))
    return {
        name: as_sent(item) if isinstance(item, WireObject) else item
        for name, item in value
        if item is not None and name not in own
    }


def acts(description: str, **limits: Any) -> Any:
    """Return an optional field that changes the answer; `limits` are pydantic's."""
    return Field(default=None, description=description, **limits)


def bookkeeping(description: str) -> Any:
    """Return an optional field that is for the client's own records and does not change the answer."""
    return Field(default=None, description=description, json_schema_extra={_TREATMENT: FieldTreatment.BOOKKEEPING})


def refused(why: str, *neutral: Any) -> Any:
    """Return an unsupported field; None and the `neutral` values have no effect and are accepted."""
    extra: Any = {_TREATMENT: FieldTreatment.REFUSED, _NEUTRAL: [None, *neutral]}
    return Field(default=None, description=why, json_schema_extra=extra)


def field_treatments(kind: type[WireObject]) -> Iterator[tuple[str, FieldTreatment, str]]:
    """Yield name, treatment and description of each field."""
    for name, field in kind.model_fields.items():
        yield field.alias or name, _treatment(field), field.description or ""


def _treatment(field: FieldInfo) -> FieldTreatment:
    return FieldTreatment(_extra(field).get(_TREATMENT, FieldTreatment.ACTS))


def _extra(field: FieldInfo) -> dict[str, Any]:
    return field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}


@functools.cache
def _own_fields(kind: type[WireObject]) -> frozenset[str]:
    return frozenset(
        name for name, field in kind.model_fields.items() if _treatment(field) is FieldTreatment.BOOKKEEPING
    )


@functools.cache
def _refused_fields(kind: type[WireObject]) -> Mapping[str, FieldInfo]:
    return {name: field for name, field in kind.model_fields.items() if _treatment(field) is FieldTreatment.REFUSED}


def _given(request: WireObject) -> Iterator[tuple[str, Any]]:
    """Return the fields that the client has sent, with their values, in the schema's order."""
    sent = request.model_fields_set
    return ((name, value) for name, value in vars(request).items() if name in sent)


def _refusals(value: Any, path: str) -> Iterator[tuple[str, Any, str]]:
    """Yield name, value and reason of each field that is not supported."""
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
    """Return the items of a list of objects; an empty list for any other list."""
    return items if items and isinstance(items[0], WireObject) else []


MAX_TOKEN_IDS = 2**20
"""Maximum ids in one list; the default of --max-queued-tokens is the same."""
MAX_PROMPTS = 2048
"""Maximum prompts of one request; OpenAI's limit."""
MAX_TEXTS = 4096
"""Maximum items in a list of short strings; the code that uses them has lower limits."""
MAX_OBJECTS = 8192
"""Maximum messages, parts of a message, or documents in one list. Each takes some microseconds of the event loop."""
MAX_CONTAINERS = 32768
"""Maximum lists and objects of one request, at all depths together."""
MAX_FIELDS = 2**17 + 2**15
"""Maximum fields of all objects of one request together: those of the largest logit_bias, and 32,768 more."""
MAX_CHOICES = 65536
"""Maximum strings in `structured_outputs.choice`."""
MAX_TOOLS = 1024
MAX_PARAMETER_ITEMS = 2**17
"""Maximum entries of logit_bias, or of a list of token ids, independent of --max-parameter-items."""


@dataclass(frozen=True, slots=True)
class AtMost:
    """Limit on a list's length: `Annotated[list[str], AtMost(64)]`."""

    items: int
    at_least: int = 0

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the list's schema with its limits, and a check of its length before it."""
        schema = handler(source)
        assert schema["type"] == "list", f"{source} is no list"
        schema["fail_fast"] = True
        schema["max_length"] = self.items
        if self.at_least:
            schema["min_length"] = self.at_least
        return core_schema.no_info_before_validator_function(self.check_length, schema)

    def check_length(self, value: Any) -> Any:
        """Return the value; refuse a list that is too long or too short."""
        if isinstance(value, list):
            number = len(cast(list[Any], value))
            if number > self.items:
                raise _wrong("too_long", f"must have at most {self.items} items; it has {number}")
            if number < self.at_least:
                raise _wrong("too_short", f"must have at least {self.at_least} item; it has {number}")
        return value


def _check_biases(value: Any) -> Any:
    """Return the value; refuse a map with too many entries, or at its first wrong one."""
    if isinstance(value, dict):
        biases = cast(dict[Any, Any], value)
        if len(biases) > MAX_PARAMETER_ITEMS:
            raise _wrong("too_long", f"must have at most {MAX_PARAMETER_ITEMS} entries; it has {len(biases)}")
        for key, bias in biases.items():
            if type(bias) not in (int, float) or not -100 <= bias <= 100 or not math.isfinite(bias):
                limit = f"must map token ids to numbers from -100 to 100; it has {shown(bias)} for {shown(key)}"
                raise _wrong("bias", limit)
    return value


def _wrong(kind: Any, message: str) -> PydanticCustomError:
    return PydanticCustomError(kind, "{told}", {"told": message})


Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
PositiveCount = Annotated[int, Field(ge=1, le=2**31 - 1)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
TokenIds = Annotated[list[TokenId], AtMost(MAX_TOKEN_IDS)]
SomeTokenIds = Annotated[list[TokenId], AtMost(MAX_PARAMETER_ITEMS)]
Texts = Annotated[list[str], AtMost(MAX_TEXTS)]
Biases = Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(_check_biases)]


def prompt_kind(value: Any) -> str:
    """Return the tag of a prompt's type by its first element, so that errors are about the intended type."""
    if not isinstance(value, list):
        return TEXT.tag
    first = next(iter(cast(list[Any], value)), None)
    return TEXTS.tag if isinstance(first, str) else ID_LISTS.tag if isinstance(first, list) else IDS.tag


# names with a bracket, because validation_answer omits those from a field's path
TEXT, IDS, TEXTS, ID_LISTS = Tag("[text]"), Tag("[ids]"), Tag("[texts]"), Tag("[lists of ids]")
Prompts = Annotated[
    Annotated[str, TEXT]
    | Annotated[TokenIds, IDS]
    | Annotated[list[str], AtMost(MAX_PROMPTS), TEXTS]
    | Annotated[list[TokenIds], AtMost(MAX_PROMPTS), ID_LISTS],
    Discriminator(prompt_kind),
]
"""Text, token ids, or a list of either."""


@dataclass(frozen=True, slots=True)
class AllowsText:
    """Marker of an object that may be replaced by a string: `Annotated[Part, AllowsText("text")]`."""

    type: str
    """Type of the part that a string becomes."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the object's schema with a conversion of strings before it."""
        return core_schema.no_info_before_validator_function(self._part, handler(source))

    def _part(self, given: Any) -> Any:
        return {"type": self.type, "text": given} if isinstance(given, str) else given


STRICT = "Required calls always match the schema; the client must check others."
"""Description of a tool's `strict`, which has no effect here."""
_INSTEAD = {
    "custom": "custom tools are not supported; use a function with one string parameter",
    "allowed_tools": "a subset of tools is not supported; send only those in tools, and the mode as tool_choice",
}


def _check_kind(kind: Any) -> Any:
    if not isinstance(kind, str) or kind == "function":
        return kind
    told = _INSTEAD.get(kind, "only functions, which the client runs, are supported; send type 'function'")
    raise PydanticCustomError("tool_kind", "{told}", {"told": told})


def _check_own(kind: Any) -> Any:
    if not isinstance(kind, str) or kind == "custom":
        return kind
    told = "the server runs no tools; send one that the client runs, with an input_schema and without a type"
    raise PydanticCustomError("tool_kind", "{told}", {"told": told})


FunctionKind = Annotated[Literal["function"], BeforeValidator(_check_kind)]
"""Type of a tool, or of the chosen one."""
ToolKind = Annotated[Literal["custom"], BeforeValidator(_check_own)]
"""Type of a tool in Anthropic's API."""
