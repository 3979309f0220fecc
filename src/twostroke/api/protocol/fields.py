"""What fields of requests are made of, and what becomes of each: it acts, it is bookkeeping, it is refused, or unknown.

    acts          changes the answer; the routes read it
    bookkeeping   the client's own notes; accepted, changes nothing
    refused       would change the answer and is not supported: 400 that names it, unless its value asks for nothing
    unknown       not in the schema at all: named in the header x-ignored-params; 400 with --strict

Tools and calls of a conversation that the model's chat template does not write are named in x-unseen-params.

`standings` is the one source of docs/api-fields.md and of the tests that hold every field to what is said of it.

The length of a list or map is checked before its elements, and the first wrong element ends the reading. Without that,
pydantic looks at every element of a list that holds the wrong type and keeps an error for each: half a million numbers
where texts are wanted took seconds of the event loop and gigabytes.
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


class FieldStanding(StrEnum):
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


def acts(description: str, **limits: Any) -> Any:
    """A field that changes the answer, and may be left out; `limits` are pydantic's."""
    return Field(default=None, description=description, **limits)


def bookkeeping(description: str) -> Any:
    """A field of the client's own."""
    return Field(default=None, description=description, json_schema_extra={_STANDING: FieldStanding.BOOKKEEPING})


def refused(why: str, *neutral: Any) -> Any:
    """A field that is not supported; None and the `neutral` values ask for nothing and pass."""
    extra: Any = {_STANDING: FieldStanding.REFUSED, _NEUTRAL: [None, *neutral]}
    return Field(default=None, description=why, json_schema_extra=extra)


def standings(kind: type[WireObject]) -> Iterator[tuple[str, FieldStanding, str]]:
    """Name, standing and description of each field."""
    for name, field in kind.model_fields.items():
        yield field.alias or name, _standing(field), field.description or ""


def _standing(field: FieldInfo) -> FieldStanding:
    return FieldStanding(_extra(field).get(_STANDING, FieldStanding.ACTS))


def _extra(field: FieldInfo) -> dict[str, Any]:
    return field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}


@functools.cache
def _own_fields(kind: type[WireObject]) -> frozenset[str]:
    return frozenset(name for name, field in kind.model_fields.items() if _standing(field) is FieldStanding.BOOKKEEPING)


@functools.cache
def _refused_fields(kind: type[WireObject]) -> Mapping[str, FieldInfo]:
    return {name: field for name, field in kind.model_fields.items() if _standing(field) is FieldStanding.REFUSED}


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


MAX_TOKEN_IDS = 2**20
"""Most ids in one list. The default of --max-queued-tokens is as large."""
MAX_PROMPTS = 2048
"""Of one request; OpenAI's limit."""
MAX_TEXTS = 4096
"""Of a list of short texts; what uses them has a lower limit of its own."""
MAX_OBJECTS = 8192
"""Most messages, parts of a message, or documents in one list. Each takes some microseconds of the event loop."""
MAX_CONTAINERS = 32768
"""Lists and objects of one request, at all depths together."""
MAX_FIELDS = 2**17 + 2**15
"""Most fields of all objects of one request together: those of the largest logit_bias, and 32,768 more."""
MAX_CHOICES = 65536
"""Texts of which the output has to be one."""
MAX_TOOLS = 1024
MAX_PARAMETER_ITEMS = 2**17
"""Entries of logit_bias, or ids that may be generated or end the generation, whatever --max-parameter-items says."""


@dataclass(frozen=True, slots=True)
class AtMost:
    """Bounds a list: `Annotated[list[str], AtMost(64)]`."""

    items: int
    at_least: int = 0

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Give the list's schema its limits, and put the check of its length before it."""
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
                raise _wrong("too_long", f"must have at most {self.items} items, and has {number}")
            if number < self.at_least:
                raise _wrong("too_short", f"must have at least {self.at_least} item, and has {number}")
        return value


def _check_biases(value: Any) -> Any:
    """Return the value; refuse a map with too many entries, or at its first wrong one."""
    if isinstance(value, dict):
        biases = cast(dict[Any, Any], value)
        if len(biases) > MAX_PARAMETER_ITEMS:
            raise _wrong("too_long", f"must have at most {MAX_PARAMETER_ITEMS} entries, and has {len(biases)}")
        for key, bias in biases.items():
            if type(bias) not in (int, float) or not -100 <= bias <= 100 or not math.isfinite(bias):
                limit = f"must map token ids to numbers from -100 to 100, and has {shown(bias)} for {shown(key)}"
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
    """Return the tag of a prompt's kind, by its first element: the error is then about the kind that was meant."""
    if not isinstance(value, list):
        return TEXT.tag
    first = next(iter(cast(list[Any], value)), None)
    return TEXTS.tag if isinstance(first, str) else ID_LISTS.tag if isinstance(first, list) else IDS.tag


# validation_answer leaves names with a bracket out of a field's path
TEXT, IDS, TEXTS, ID_LISTS = Tag("[text]"), Tag("[ids]"), Tag("[texts]"), Tag("[lists of ids]")
Prompts = Annotated[
    Annotated[str, TEXT]
    | Annotated[TokenIds, IDS]
    | Annotated[list[str], AtMost(MAX_PROMPTS), TEXTS]
    | Annotated[list[TokenIds], AtMost(MAX_PROMPTS), ID_LISTS],
    Discriminator(prompt_kind),
]
"""A text, token ids, or a list of either."""


@dataclass(frozen=True, slots=True)
class OrText:
    """In the place of such an object a text may stand: `Annotated[Part, OrText("text")]`."""

    type: str
    """Of the part that the text becomes."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema of the object, which is made of a text first."""
        return core_schema.no_info_before_validator_function(self._part, handler(source))

    def _part(self, given: Any) -> Any:
        return {"type": self.type, "text": given} if isinstance(given, str) else given


STRICT = "Required calls always fit the schema; others are for the client to check."
"""The description of a tool's `strict`, which changes nothing here."""
_INSTEAD = {
    "custom": "custom tools are not supported; offer a function whose parameters have one text",
    "allowed_tools": "a choice of tools is not supported; send those alone in tools, and its mode as tool_choice",
}


def _check_kind(kind: Any) -> Any:
    if not isinstance(kind, str) or kind == "function":
        return kind
    told = _INSTEAD.get(kind, "functions are the only kind of tool, and the client runs them; send type 'function'")
    raise PydanticCustomError("tool_kind", "{told}", {"told": told})


def _check_own(kind: Any) -> Any:
    if not isinstance(kind, str) or kind == "custom":
        return kind
    told = "no tools are run here; send a tool with an input_schema, and without a type, which the client runs"
    raise PydanticCustomError("tool_kind", "{told}", {"told": told})


FunctionKind = Annotated[Literal["function"], BeforeValidator(_check_kind)]
"""The type of a tool, or of the one that is chosen."""
ToolKind = Annotated[Literal["custom"], BeforeValidator(_check_own)]
"""The same in Anthropic's words."""
