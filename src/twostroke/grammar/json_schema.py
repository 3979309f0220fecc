"""Conversion of structured outputs (JSON schema, regex, choices, Lark, GBNF) to llguidance's one notation.

JSON schemas are stripped of parts that constrain nothing, because llguidance refuses every keyword and format that
it does not know. Such parts are annotation formats (`password`, `byte`), keywords about values of another type, and
rules that every value satisfies (`uniqueItems` false, `contains` with `minContains` 0). Removing them changes no
output. A keyword that does constrain stays, and is refused by name if it is not supported.

Source: JSON Schema 2020-12, https://json-schema.org/draft/2020-12/json-schema-validation.
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
from twostroke.grammar.backend import OptionalCallTokens, RequiredCallSyntax
from twostroke.sampling_params import StructuredOutputs

Schema = dict[str, Any]

KNOWN_FORMATS = frozenset({"date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"})
"""Formats that outputs are constrained to. All others are annotations, the standard's default."""

_ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly"}
)
_SCHEMA_KEYWORDS = ("additionalItems", "additionalProperties", "contains", "else", "if", "items", "not",
        "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties")  # fmt: skip
_SCHEMA_LIST_KEYWORDS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
"""Keywords whose value is a list of schemas; those of `_SCHEMA_KEYWORDS` have one schema as their value."""
SCHEMAS_BY_NAME = frozenset(
    {"$defs", "definitions", "dependentSchemas", "dependencies", "patternProperties", "properties"}
)
"""Keywords whose value maps names to schemas."""


def strip_unconstraining(schema: Any) -> Any:
    """Return an equivalent schema without the keywords and formats that constrain nothing.

    The only values lost are numbers beyond MAX_BOUND that the bounds would allow.

    Args:
        schema: JSON. A value that is not a schema is returned unchanged; the compiler refuses it.
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
            found[name] = {key: strip_unconstraining(part) for key, part in cast(Schema, value).items()}
        elif name in _SCHEMA_LIST_KEYWORDS and isinstance(value, list):
            found[name] = [strip_unconstraining(part) for part in cast(list[Any], value)]
        elif name in _SCHEMA_KEYWORDS:
            found[name] = strip_unconstraining(value)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            found[name] = _clamped(name, value)
        elif name == "$dynamicAnchor":
            # `$ref` treats it as an anchor; `$dynamicRef`, which treats it differently, is refused
            found.setdefault("$anchor", value)
        else:
            found[name] = value
    return found


MAX_BOUND = 2**63 - 1024
"""Largest bound, of either sign, that llguidance reads exactly."""
_LOWER_BOUNDS, _UPPER_BOUNDS = frozenset({"minimum", "exclusiveMinimum"}), frozenset({"maximum", "exclusiveMaximum"})
_COUNTS = frozenset({"maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties"})


def _clamped(name: str, value: float) -> float:
    """Return a keyword's number in a range and type that llguidance reads, which is not all of int64 and float."""
    if name in _COUNTS and isinstance(value, float) and value.is_integer():
        return int(value)
    if name in _LOWER_BOUNDS:
        return max(value, -MAX_BOUND)
    return min(value, MAX_BOUND) if name in _UPPER_BOUNDS else value


def wide_objects(schema: Any) -> Iterator[Schema]:
    """Yield a small schema for each long run of optional properties; it costs as much as the object with the run.

    The object itself may be at a place that a text of the whole schema seldom reaches.
    """
    for part in _parts(schema):
        properties = part.get("properties")
        others = {"additionalProperties": False} if part.get("additionalProperties") is False else {}
        for length, before, behind in _optional_runs(properties, part.get("required")):
            if length > WIDE:
                most = length if before else min(length, ALWAYS_TOO_WIDE)
                needed = ["before"] * before + ["behind"] * behind
                names = [*needed[:before], *(f"p{number}" for number in range(most)), *needed[before:]]
                yield {"type": "object", "properties": {n: {"const": 0} for n in names}, "required": needed, **others}


def _optional_runs(properties: Any, required: Any) -> Iterator[tuple[int, bool, bool]]:
    """Yield each run of optional properties: its length, and whether a required property precedes and follows it."""
    if not isinstance(properties, dict):
        return
    needed = cast(list[Any], required) if isinstance(required, list) else []
    runs = [(is_needed, len([*run])) for is_needed, run in groupby(name in needed for name in cast(Schema, properties))]
    for index, (is_needed, length) in enumerate(runs):
        if not is_needed:
            yield length, index > 0, index < len(runs) - 1


WIDE = 500
"""Number of optional properties that an object may always have."""
ALWAYS_TOO_WIDE = 800
"""Number of optional properties before the first required one that is always refused; larger ones are only slower."""


def _parts(schema: Any) -> Iterator[Schema]:
    """Yield a schema and all schemas nested in it."""
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
            elif name in _SCHEMA_LIST_KEYWORDS and isinstance(value, list):
                waiting += cast(list[Any], value)
            elif name in _SCHEMA_KEYWORDS:
                waiting.append(value)


def _accepts_all(schema: Any) -> bool:
    """Return whether every value matches."""
    return schema is True or (isinstance(schema, dict) and not set(cast(Schema, schema)) - _ANNOTATIONS)


def _excludes(schema: Schema, kind: str) -> bool:
    """Return whether no value of type `kind` matches, because the schema names other types."""
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return kinds != kind
    return isinstance(kinds, list) and kind not in kinds


def _names_need_nothing(schema: Schema) -> bool:
    """Return whether every property name matches `propertyNames`; names are always strings."""
    names = schema["propertyNames"]
    if isinstance(names, dict):
        names = {key: value for key, value in cast(Schema, names).items() if (key, value) not in _OF_ALL_TEXTS}
    return _accepts_all(names)


_OF_ALL_TEXTS: tuple[tuple[str, Any], ...] = (("type", "string"), ("minLength", 0), ("pattern", ""), ("pattern", ".*"))
"""Keywords with values that every string satisfies."""


def _has_no_fewer(schema: Schema) -> bool:
    """Return whether the required properties alone satisfy `minProperties`."""
    least, required = schema["minProperties"], schema.get("required")
    return isinstance(least, int) and isinstance(required, list) and least <= len(_texts(required))


def _has_no_more(schema: Schema) -> bool:
    """Return whether all properties that are allowed together satisfy `maxProperties`."""
    most, properties = schema["maxProperties"], schema.get("properties")
    if schema.get("additionalProperties") is not False or "patternProperties" in schema:
        return False
    return isinstance(most, int) and isinstance(properties, dict) and most >= len(cast(Schema, properties))


def _texts(values: Any) -> frozenset[str]:
    """Return the distinct strings of a list."""
    return frozenset(value for value in cast(list[Any], values) if isinstance(value, str))


def _holds_at_most_one_item(schema: Schema) -> bool:
    most, first = schema.get("maxItems"), schema.get("prefixItems", [])
    if schema.get("items") is False and isinstance(first, list):
        number = len(cast(list[Any], first))
        most = min(number, most) if isinstance(most, int) else number
    return isinstance(most, int) and most <= 1


def _needs_no_item(schema: Schema) -> bool:
    """Return whether every list satisfies `contains` with its bounds."""
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
    """Return whether every value matches each branch (`then`, `else`) that can apply."""
    branches = {"then": schema["if"] is not False, "else": not _accepts_all(schema["if"])}
    return all(not is_taken or _accepts_all(schema.get(name, True)) for name, is_taken in branches.items())


_KINDS = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
_NUMBERS = frozenset({"integer", "number"})
_KIND_OF: Mapping[type, str] = {bool: "boolean", NoneType: "null", str: "string", list: "array", dict: "object"}


def _kinds(schema: Schema) -> frozenset[str]:
    """Return the types that matching values may have, as far as the schema names types or values."""
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
    """Return whether `not` excludes nothing: the values that it names have another type or do not match anyway."""
    excluded = schema["not"]
    if isinstance(excluded, dict):
        excluded = cast(Schema, excluded)
        differ = _names_no_value_of(excluded, schema) or not _kinds(excluded) & _kinds(schema)
        return _accepts_all(excluded.get("not", False)) or differ
    return excluded is False


def _values(schema: Schema) -> list[Any] | None:
    """Return the only values that match, from `const` or `enum`; None if the schema lists none."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return cast(list[Any], values) if isinstance(values, list) else None


def _names_no_value_of(one: Schema, other: Schema) -> bool:
    """Return whether both schemas list their values and have none in common."""
    mine, others = _values(one), _values(other)
    return mine is not None and others is not None and not any(value in others for value in mine)


_RULES: Mapping[str, Callable[[Schema], bool]] = {
    "format": lambda s: s["format"] not in [*KNOWN_FORMATS] or _excludes(s, "string"),
    "propertyNames": lambda s: _excludes(s, "object") or _names_need_nothing(s),
    "dependentRequired": lambda s: _excludes(s, "object") or _dependents_are_required(s),
    "dependentSchemas": lambda s: _excludes(s, "object") or _all_named(s["dependentSchemas"], _accepts_all),
    "dependencies": lambda s: _excludes(s, "object") or _dependencies_are_kept(s),
    # "additionalProperties" or "items" as one schema covers all others, so none is unevaluated
    "unevaluatedProperties": lambda s: (
        _excludes(s, "object") or "additionalProperties" in s or _accepts_all(s["unevaluatedProperties"])
    ),
    "unevaluatedItems": lambda s: (
        _excludes(s, "array") or _accepts_all(s["unevaluatedItems"]) or not isinstance(s.get("items", []), list)
    ),
    # it only applies beside a list of "items"
    "additionalItems": lambda s: (
        _excludes(s, "array") or _accepts_all(s["additionalItems"]) or not isinstance(s.get("items"), list)
    ),
    "uniqueItems": lambda s: s["uniqueItems"] is False or _excludes(s, "array") or _holds_at_most_one_item(s),
    "contains": lambda s: _excludes(s, "array") or _needs_no_item(s),
    # these two have no effect without "contains"
    "minContains": lambda s: "contains" not in s,
    "maxContains": lambda s: "contains" not in s,
    "minProperties": lambda s: _excludes(s, "object") or _has_no_fewer(s),
    "maxProperties": lambda s: _excludes(s, "object") or _has_no_more(s),
    "not": _excludes_nothing,
    "if": _branches_accept_all,
    # these two have no effect without "if"
    "then": lambda s: "if" not in s,
    "else": lambda s: "if" not in s,
    "$recursiveAnchor": lambda s: True,  # only `$recursiveRef` looks for it, and that one is refused
}
"""Keyword to a test of whether it constrains nothing in this schema, in the order of evaluation."""


WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
"""Whitespace between the parts of JSON. Without a bound a weak model may write spaces until max_tokens; 32 characters
indent six levels."""

_MAX_REASON = 200
NO_TEXT = "no text but the empty one matches it, or no token of this model can begin a matching text"
TOO_MANY_WAYS = "one place has too many alternatives, as with more than 500 optional properties of one object"
_TOP = '%llguidance {"no_forcing": true}\nstart: @wanted'
"""Top-level rule that allows every tokenization of an allowed text.

By default llguidance allows only the tokenizer's own tokenization where the text is certain. With bad_words or
allowed_token_ids, that could leave a request no allowed token.
"""


def to_llguidance(wanted: StructuredOutputs, calls: OptionalCallTokens | RequiredCallSyntax | None = None) -> str:
    """Return the grammar in llguidance's JSON form, without a check of whether it is supported.

    Args:
        wanted: the form.
        calls: syntax of the tool calls that may be written instead, or of the call that the form requires.

    Raises:
        InvalidParameter: the GBNF grammar or JSON schema cannot be parsed.
    """
    try:
        if isinstance(calls, RequiredCallSyntax):
            parts = _required_call_parts(calls)
        else:
            inner = _inner(wanted)
            parts = [inner | {"name": "wanted"}] if calls is None else _form_or_call_parts(inner, calls)
    except (ValueError, RecursionError) as error:
        raise refusal(wanted, str(error)) from error
    return json.dumps({"grammars": [{"lark_grammar": _TOP}, *parts]}, ensure_ascii=False)


def wide_parts(wanted: StructuredOutputs) -> Iterator[str]:
    """Yield a grammar for each place of a JSON schema that may have too many alternatives."""
    if isinstance(wanted.json, str):
        for part in wide_objects(json.loads(wanted.json)):
            yield to_llguidance(StructuredOutputs(json=part))


def _form_or_call_parts(form: dict[str, object], calls: OptionalCallTokens) -> list[dict[str, object]]:
    """Return the parts of a grammar for a text that has the form or begins like a call; after its beginning a call is
    unconstrained."""
    beginning = calls.beginning
    if not beginning and calls.markers:
        markers = [json.dumps(marker) for marker in calls.markers] + _tokens(calls.first_tokens)
        beginning = f"beginning: {' | '.join(markers)}"
    rest = " | ".join(["TEXT", *_tokens(calls.tokens)])
    ways = ["@form", *([f"beginning ({rest})*"] if beginning else []), *(["@call"] if calls.bare else [])]
    lark = f"start: {' | '.join(ways)}\n{beginning}\nTEXT: /(.|\\n)+/"
    parts: list[dict[str, object]] = [{"lark_grammar": lark, "name": "wanted"}, form | {"name": "form"}]
    return [*parts, _json(json.dumps(calls.bare)) | {"name": "call"}] if calls.bare else parts


def _required_call_parts(call: RequiredCallSyntax) -> list[dict[str, object]]:
    """Return the parts of a grammar for a required call in the model's own syntax."""
    arguments = [_json(json.dumps(schema)) | {"name": name} for name, schema in call.schemas.items()]
    return [{"lark_grammar": call.rules, "name": "wanted"}, *arguments]


def _tokens(token_ids: Collection[int]) -> list[str]:
    return [f"<[{token_id}]>" for token_id in sorted(token_ids)]


def refusal(wanted: StructuredOutputs, reason: str) -> InvalidParameter:
    """Return the error for a grammar that llguidance refuses, with one line of llguidance's report."""
    found = re.search(r"^error: (.+)$", reason, re.MULTILINE)
    line = found.group(1) if found else re.sub(r"^(at )?\d+\(\d+\): ", "", reason.strip()).partition("\n")[0]
    if line.startswith("NoExtension"):
        line = NO_TEXT
    if "items; max is" in line or "Too many items" in line:
        line = TOO_MANY_WAYS
    return InvalidParameter(
        f"structured_outputs.{wanted.kind}",
        getattr(wanted, wanted.kind),
        f"cannot be used: {line[:_MAX_REASON] or 'no reason was given'}",
        "Simplify it, and validate the rest in the output.",
    )


def _inner(wanted: StructuredOutputs) -> dict[str, object]:
    """Return the requested form as one part of a grammar."""
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
        # overrides also win over the schema's own "x-guidance"
        LLMatcher.grammar_from_json_schema(
            json.dumps(strip_unconstraining(json.loads(schema)), ensure_ascii=False),
            overrides={"whitespace_pattern": WHITESPACE, "lenient": False},
        )
    )


def _only(grammar: str) -> dict[str, object]:
    """Return the single part of a grammar in JSON form."""
    (part,) = json.loads(grammar)["grammars"]
    return part
