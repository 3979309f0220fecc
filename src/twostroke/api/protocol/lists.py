"""Lists and maps in requests: the length is checked before the elements, and the first wrong element ends the reading.

Without these, pydantic looks at every element of a list that holds the wrong type and keeps an error for each: half a
million numbers where texts are wanted took seconds of the event loop and gigabytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, cast

from pydantic import BeforeValidator, Discriminator, Field, GetCoreSchemaHandler, Tag
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from twostroke.errors import shown

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
