"""JSON schemas without what constrains nothing: llguidance refuses every keyword and format that it does not know.

A schema may hold more than rules: formats that are notes to people (`password`, `byte`), keywords that only concern
values of another type, and rules that every value keeps (`uniqueItems` false, `contains` beside `minContains` 0).
Leaving these out changes no answer. A keyword that does constrain stays, and is refused by name where it cannot be
followed.

See JSON Schema 2020-12, https://json-schema.org/draft/2020-12/json-schema-validation.

Beside it: from what people write (JSON schema, regular expression, choices, Lark, GBNF) to llguidance's one notation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import groupby
from types import NoneType
from typing import Any, cast

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from twostroke.errors import InvalidParameter
from twostroke.grammar.backend import RequiredCall, WrittenCalls
from twostroke.sampling_params import StructuredOutputs

Schema = dict[str, Any]

KNOWN_FORMATS = frozenset({"date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"})
"""Formats that answers are held to; all others are annotations, as the standard has it by default."""

_NOTES = frozenset({"title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly"})
_ONE = ("additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then",
        "unevaluatedItems", "unevaluatedProperties")  # fmt: skip
_SEVERAL = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
"""Keywords whose value is a schema, and those whose value is a list of schemas."""
SCHEMAS_BY_NAME = frozenset(
    {"$defs", "definitions", "dependentSchemas", "dependencies", "patternProperties", "properties"}
)
"""Keywords whose value holds schemas by name."""


def constraining(schema: Any) -> Any:
    """Return a schema of the same values, without keywords and formats that constrain nothing.

    Only numbers beyond MAX_BOUND, which bounds may allow, are left out of its values.

    Args:
        schema: JSON. What is no schema is returned as it is: whoever compiles it says so.
    """
    if not isinstance(schema, dict):
        return schema
    found = _with_constraining_parts(cast(Schema, schema))
    for name, constrains_nothing in _RULES.items():
        if name in found and constrains_nothing(found):
            del found[name]
    return found


def _with_constraining_parts(schema: Schema) -> Schema:
    found: Schema = {}
    for name, value in schema.items():
        if name in SCHEMAS_BY_NAME and isinstance(value, dict):
            found[name] = {key: constraining(part) for key, part in cast(Schema, value).items()}
        elif name in _SEVERAL and isinstance(value, list):
            found[name] = [constraining(part) for part in cast(list[Any], value)]
        elif name in _ONE:
            found[name] = constraining(value)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            found[name] = _readable(name, value)
        elif name == "$dynamicAnchor":
            found.setdefault("$anchor", value)  # to `$ref` it is one; `$dynamicRef`, to which it is more, is refused
        else:
            found[name] = value
    return found


MAX_BOUND = 2**63 - 1024
"""The largest that llguidance reads exactly of both signs."""
_LEAST, _MOST = frozenset({"minimum", "exclusiveMinimum"}), frozenset({"maximum", "exclusiveMaximum"})
_COUNTS = frozenset({"maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties"})


def _readable(name: str, value: float) -> float:
    """Return the value of a keyword as llguidance reads it: the ranges of int64 and of floats are too wide for it."""
    if name in _COUNTS and isinstance(value, float) and value.is_integer():
        return int(value)
    if name in _LEAST:
        return max(value, -MAX_BOUND)
    return min(value, MAX_BOUND) if name in _MOST else value


def wide_objects(schema: Any) -> Iterator[Schema]:
    """Yield a small schema for each long run of optional properties, which takes as much as the object that has it.

    A run may stand where a text of the whole schema seldom leads.
    """
    for part in _parts(schema):
        properties = part.get("properties")
        others = {"additionalProperties": False} if part.get("additionalProperties") is False else {}
        for length, before, behind in _optional_runs(properties, part.get("required")):
            if length > WIDE:
                most = length if before else min(length, TOO_WIDE)
                needed = ["before"] * before + ["behind"] * behind
                names = [*needed[:before], *(f"p{number}" for number in range(most)), *needed[before:]]
                yield {"type": "object", "properties": {n: {"const": 0} for n in names}, "required": needed, **others}


def _optional_runs(properties: Any, required: Any) -> Iterator[tuple[int, bool, bool]]:
    """Yield the length of each run of optional properties, and whether a required one stands before and behind it."""
    if not isinstance(properties, dict):
        return
    needed = cast(list[Any], required) if isinstance(required, list) else []
    runs = [(is_needed, len([*run])) for is_needed, run in groupby(name in needed for name in cast(Schema, properties))]
    for index, (is_needed, length) in enumerate(runs):
        if not is_needed:
            yield length, index > 0, index < len(runs) - 1


WIDE = 500
"""Optional properties that an object may always have."""
TOO_WIDE = 800
"""So many before the first that is required are always too many, and more of them only take longer to be refused."""


def _parts(schema: Any) -> Iterator[Schema]:
    """A schema and all those within it."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if not isinstance(part, dict):
            continue
        part = cast(Schema, part)
        yield part
        for name, value in part.items():
            if name in SCHEMAS_BY_NAME and isinstance(value, dict):
                waiting += cast(Schema, value).values()
            elif name in _SEVERAL and isinstance(value, list):
                waiting += cast(list[Any], value)
            elif name in _ONE:
                waiting.append(value)


def _accepts_all(schema: Any) -> bool:
    """Whether every value fits."""
    return schema is True or (isinstance(schema, dict) and not set(cast(Schema, schema)) - _NOTES)


def _excludes(schema: Schema, kind: str) -> bool:
    """Whether no value of a type fits, because the schema names other types."""
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return kinds != kind
    return isinstance(kinds, list) and kind not in kinds


def _names_need_nothing(schema: Schema) -> bool:
    """Whether every name of a property fits: names are texts."""
    names = schema["propertyNames"]
    if isinstance(names, dict):
        names = {key: value for key, value in cast(Schema, names).items() if (key, value) not in _OF_ALL_TEXTS}
    return _accepts_all(names)


_OF_ALL_TEXTS: tuple[tuple[str, Any], ...] = (("type", "string"), ("minLength", 0), ("pattern", ""), ("pattern", ".*"))
"""Keywords with values that every text keeps."""


def _has_no_fewer(schema: Schema) -> bool:
    """Whether the required properties alone are enough."""
    least, required = schema["minProperties"], schema.get("required")
    return isinstance(least, int) and isinstance(required, list) and least <= len(_texts(required))


def _has_no_more(schema: Schema) -> bool:
    """Whether all properties that there may be are not too many."""
    most, properties = schema["maxProperties"], schema.get("properties")
    if schema.get("additionalProperties") is not False or "patternProperties" in schema:
        return False
    return isinstance(most, int) and isinstance(properties, dict) and most >= len(cast(Schema, properties))


def _texts(values: Any) -> frozenset[str]:
    """The texts of a list, each once."""
    return frozenset(value for value in cast(list[Any], values) if isinstance(value, str))


def _holds_at_most_one_item(schema: Schema) -> bool:
    most, first = schema.get("maxItems"), schema.get("prefixItems", [])
    if schema.get("items") is False and isinstance(first, list):
        number = len(cast(list[Any], first))
        most = min(number, most) if isinstance(most, int) else number
    return isinstance(most, int) and most <= 1


def _needs_no_item(schema: Schema) -> bool:
    """Whether `contains` with its bounds is kept by every list."""
    return schema.get("minContains") == 0 and "maxContains" not in schema


def _dependents_are_required(schema: Schema) -> bool:
    required = schema.get("required")
    known = cast(list[Any], required) if isinstance(required, list) else []
    return _all_named(
        schema["dependentRequired"],
        lambda names: isinstance(names, list) and all(name in known for name in cast(list[Any], names)),
    )


def _dependencies_are_kept(schema: Schema) -> bool:
    return _all_named(schema["dependencies"], lambda part: part == [] or _accepts_all(part))


def _all_named(parts: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(parts, dict) and all(fits(part) for part in cast(Schema, parts).values())


def _branches_accept_all(schema: Schema) -> bool:
    """Whether every value fits the branches that it may have to fit."""
    branches = {"then": schema["if"] is not False, "else": not _accepts_all(schema["if"])}
    return all(not is_taken or _accepts_all(schema.get(name, True)) for name, is_taken in branches.items())


_KINDS = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
_NUMBERS = frozenset({"integer", "number"})
_KIND_OF: Mapping[type, str] = {bool: "boolean", NoneType: "null", str: "string", list: "array", dict: "object"}


def _kinds(schema: Schema) -> frozenset[str]:
    """Types that the values of a schema may have, as far as it names types or values."""
    kinds = schema.get("type")
    names = cast(list[Any], kinds) if isinstance(kinds, list) else [kinds]
    found = _texts(names) & _KINDS
    if not found and (values := _values(schema)) is not None:
        found = frozenset[str]().union(*map(_kinds_of_value, values))
    return (found | _NUMBERS if "number" in found else found) or _KINDS


def _kinds_of_value(value: Any) -> frozenset[str]:
    kind = _KIND_OF.get(type(value))
    return _NUMBERS if kind is None else frozenset({kind})


def _excludes_nothing(schema: Schema) -> bool:
    """Whether the values that `not` names do not fit anyway, because they have another type."""
    excluded = schema["not"]
    if isinstance(excluded, dict):
        excluded = cast(Schema, excluded)
        differ = _names_no_value_of(excluded, schema) or not _kinds(excluded) & _kinds(schema)
        return _accepts_all(excluded.get("not", False)) or differ
    return excluded is False


def _values(schema: Schema) -> list[Any] | None:
    """Return the values that a schema names, and no others fit; None where it names none."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return cast(list[Any], values) if isinstance(values, list) else None


def _names_no_value_of(one: Schema, other: Schema) -> bool:
    """Whether both name their values, and none is the same."""
    mine, others = _values(one), _values(other)
    return mine is not None and others is not None and not any(value in others for value in mine)


_RULES: Mapping[str, Callable[[Schema], bool]] = {
    "format": lambda s: s["format"] not in [*KNOWN_FORMATS] or _excludes(s, "string"),
    "propertyNames": lambda s: _excludes(s, "object") or _names_need_nothing(s),
    "dependentRequired": lambda s: _excludes(s, "object") or _dependents_are_required(s),
    "dependentSchemas": lambda s: _excludes(s, "object") or _all_named(s["dependentSchemas"], _accepts_all),
    "dependencies": lambda s: _excludes(s, "object") or _dependencies_are_kept(s),
    # where "additionalProperties" or "items" is a schema of all others, none is left over
    "unevaluatedProperties": lambda s: (
        _excludes(s, "object") or "additionalProperties" in s or _accepts_all(s["unevaluatedProperties"])
    ),
    "unevaluatedItems": lambda s: (
        _excludes(s, "array") or _accepts_all(s["unevaluatedItems"]) or not isinstance(s.get("items", []), list)
    ),
    # it follows a list of "items", and says nothing without one
    "additionalItems": lambda s: (
        _excludes(s, "array") or _accepts_all(s["additionalItems"]) or not isinstance(s.get("items"), list)
    ),
    "uniqueItems": lambda s: s["uniqueItems"] is False or _excludes(s, "array") or _holds_at_most_one_item(s),
    "contains": lambda s: _excludes(s, "array") or _needs_no_item(s),
    # these two follow "contains": without it they say nothing
    "minContains": lambda s: "contains" not in s,
    "maxContains": lambda s: "contains" not in s,
    "minProperties": lambda s: _excludes(s, "object") or _has_no_fewer(s),
    "maxProperties": lambda s: _excludes(s, "object") or _has_no_more(s),
    "not": _excludes_nothing,
    "if": _branches_accept_all,
    # these two follow "if"
    "then": lambda s: "if" not in s,
    "else": lambda s: "if" not in s,
    "$recursiveAnchor": lambda s: True,  # only `$recursiveRef` looks for it, and that one is refused
}
"""Keyword to whether it constrains nothing in this schema, in the order in which they are looked at."""


WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
"""Between the parts of JSON. Unbounded, a weak model may well write spaces until max_tokens; 32 indent six levels."""

_MAX_REASON = 200
NO_TEXT = "no text but the empty one matches it, or no token of this model can begin one"
TOO_MANY_WAYS = "there are too many ways to go on at one place, as with more than 500 optional properties of one object"
_TOP = '%llguidance {"no_forcing": true}\nstart: @wanted'
"""Every tokenization of an allowed text is allowed. By default llguidance leaves only the tokenizer's own where the
text is certain, which would take the last way out of a request whose bad_words or allowed_token_ids forbid it."""


def to_llguidance(wanted: StructuredOutputs, calls: WrittenCalls | RequiredCall | None = None) -> str:
    """The grammar in llguidance's JSON form; whether it can be followed is not looked at.

    Args:
        wanted: the form.
        calls: tool calls that may be written instead, or how the call is written that the form requires.

    Raises:
        InvalidParameter: a GBNF grammar or a JSON schema that cannot even be read.
    """
    try:
        if isinstance(calls, RequiredCall):
            parts = _framed(calls)
        else:
            inner = _inner(wanted)
            parts = [inner | {"name": "wanted"}] if calls is None else _either(inner, calls)
    except (ValueError, RecursionError) as error:
        raise refusal(wanted, str(error)) from error
    return json.dumps({"grammars": [{"lark_grammar": _TOP}, *parts]}, ensure_ascii=False)


def wide_parts(wanted: StructuredOutputs) -> Iterator[str]:
    """Yield a grammar for each place of a JSON schema that may have too many ways to go on."""
    if isinstance(wanted.json, str):
        for part in wide_objects(json.loads(wanted.json)):
            yield to_llguidance(StructuredOutputs(json=part))


def _either(form: dict[str, object], calls: WrittenCalls) -> list[dict[str, object]]:
    """Parts of a grammar of what has the form or begins as a call does; behind its beginning a call is free."""
    beginning = calls.beginning
    if not beginning and calls.markers:
        markers = [json.dumps(marker) for marker in calls.markers] + _tokens(calls.first_tokens)
        beginning = f"beginning: {' | '.join(markers)}"
    rest = " | ".join(["TEXT", *_tokens(calls.tokens)])
    ways = ["@form", *([f"beginning ({rest})*"] if beginning else []), *(["@call"] if calls.bare else [])]
    lark = f"start: {' | '.join(ways)}\n{beginning}\nTEXT: /(.|\\n)+/"
    parts: list[dict[str, object]] = [{"lark_grammar": lark, "name": "wanted"}, form | {"name": "form"}]
    return [*parts, _json(json.dumps(calls.bare)) | {"name": "call"}] if calls.bare else parts


def _framed(call: RequiredCall) -> list[dict[str, object]]:
    """Return parts of a grammar of a required call in the model's own form."""
    arguments = [_json(json.dumps(schema)) | {"name": name} for name, schema in call.schemas.items()]
    return [{"lark_grammar": call.rules, "name": "wanted"}, *arguments]


def _tokens(token_ids: Collection[int]) -> list[str]:
    return [f"<[{token_id}]>" for token_id in sorted(token_ids)]


def refusal(wanted: StructuredOutputs, reason: str) -> InvalidParameter:
    """The error for what llguidance does not take. Of its report, with quotations and positions, a line is kept."""
    found = re.search(r"^error: (.+)$", reason, re.MULTILINE)
    line = found.group(1) if found else re.sub(r"^(at )?\d+\(\d+\): ", "", reason.strip()).partition("\n")[0]
    if line.startswith("NoExtension"):
        line = NO_TEXT
    if "items; max is" in line or "Too many items" in line:
        line = TOO_MANY_WAYS
    return InvalidParameter(
        f"structured_outputs.{wanted.kind}",
        getattr(wanted, wanted.kind),
        f"cannot be followed: {line[:_MAX_REASON] or 'no reason was given'}",
        "Ask for less, and check the rest in the text.",
    )


def _inner(wanted: StructuredOutputs) -> dict[str, object]:
    """What was asked for, as one part of a grammar."""
    if wanted.regex is not None:
        return _only(LLMatcher.grammar_from_regex(wanted.regex))
    if wanted.choice is not None:
        texts = " | ".join(json.dumps(text) for text in wanted.choice)  # a control character has to be escaped
        return {"lark_grammar": f"start: {texts}"}
    if wanted.grammar is not None:
        try:
            return {"lark_grammar": any_to_lark(wanted.grammar)}
        except Exception as error:  # GbnfToLarkError is a plain Exception
            raise ValueError(str(error)) from error
    schema = '{"type": "object"}' if wanted.json is None else wanted.json
    assert isinstance(schema, str), "StructuredOutputs keeps a schema as text"
    return _json(schema)


def _json(schema: str) -> dict[str, object]:
    return _only(
        # against the schema's own "x-guidance", too
        LLMatcher.grammar_from_json_schema(
            json.dumps(constraining(json.loads(schema)), ensure_ascii=False),
            overrides={"whitespace_pattern": WHITESPACE, "lenient": False},
        )
    )


def _only(grammar: str) -> dict[str, object]:
    """The one part of a grammar in JSON form."""
    (part,) = json.loads(grammar)["grammars"]
    return part
