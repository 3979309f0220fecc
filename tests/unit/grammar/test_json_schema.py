"""Parts of a JSON schema without a constraint are dropped; constraints stay."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given
from hypothesis import strategies as st

import text_fakes
from grammar_walks import backend
from twostroke.errors import InvalidParameter
from twostroke.grammar.json_schema import KNOWN_FORMATS, strip_unconstraining
from twostroke.sampling_params import StructuredOutputs

ANNOTATIONS = [
    "path",
    "binary",
    "byte",
    "password",
    "regex",
    "iri",
    "iri-reference",
    "idn-email",
    "idn-hostname",
    "uri-reference",
    "uri-template",
    "json-pointer",
    "relative-json-pointer",
    "int32",
    "int64",
    "float",
    "double",
    "decimal",
    "color",
    "phone",
    "base64",
    "html",
    "markdown",
]

CONSTRAINS_NOTHING: list[dict[str, Any]] = [
    {"uniqueItems": False},
    {"uniqueItems": True, "maxItems": 1},
    {"uniqueItems": True, "type": "string"},
    {"contains": {"type": "string"}, "minContains": 0},
    {"contains": True, "type": ["integer", "null"]},
    {"minContains": 2},
    {"maxContains": 3},
    {"not": False},
    {"dependentRequired": {}},
    {"dependentRequired": {"a": []}},
    {"dependentRequired": {"a": ["b"]}, "required": ["b"]},
    {"dependentSchemas": {}},
    {"dependentSchemas": {"a": {"description": "a note"}}},
    {"dependencies": {"a": [], "b": True}},
    {"propertyNames": True},
    {"propertyNames": {"type": "string"}},
    {"propertyNames": {"pattern": "a"}, "type": "array"},
    {"unevaluatedProperties": True},
    {"unevaluatedProperties": {}},
    {"unevaluatedItems": {}},
    {"additionalItems": {"title": "anything"}},
    {"then": {"type": "string"}},
    {"else": False},
    {"if": {"type": "string"}},
    {"if": {"type": "string"}, "then": {}, "else": {"$comment": "anything"}},
    {"$dynamicAnchor": "node"},
    {"$recursiveAnchor": True},
    {"type": "string", "not": {"type": "integer"}},
    {"type": ["string", "null"], "not": {"type": ["number", "object"]}},
    {"not": {"not": {}}},
    {"additionalProperties": False, "unevaluatedProperties": False},
    {"additionalProperties": {"type": "string"}, "unevaluatedProperties": False},
    {"items": {"type": "string"}, "unevaluatedItems": False},
    {"uniqueItems": True, "prefixItems": [{"type": "integer"}], "items": False},
    {"type": "array", "items": {"type": "string"}, "additionalItems": False},
    {"additionalItems": False},
    {"type": "array", "items": {"type": "integer"}, "unevaluatedItems": False},
    {"type": "object", "properties": {"a": True}, "additionalProperties": False, "unevaluatedProperties": False},
    {"additionalProperties": {"type": "integer"}, "unevaluatedProperties": {"type": "string"}},
    {"type": "string", "not": {"type": "null"}},
    {"type": ["string", "integer"], "not": {"type": ["object", "array"], "required": ["a"]}},
    {"type": "string", "not": {"const": None}},
    {"type": "integer", "not": {"enum": ["a", None, [1]]}},
    {"enum": ["a", "b"], "not": {"type": "integer"}},
    {"enum": ["a", "b"], "not": {"const": "c"}},
    {"const": ["a"], "not": {"enum": ["a", ["b"]]}},
    {"propertyNames": {"type": "string", "minLength": 0, "format": "path"}},
    {"propertyNames": {"pattern": ".*"}},
    {"minProperties": 2, "required": ["a", "b"]},
    {"minProperties": 2, "type": "string"},
    {"properties": {"a": True, "b": True}, "additionalProperties": False, "maxProperties": 2},
    {"if": True, "else": False},
    {"if": {}, "then": True, "else": {"type": "string"}},
    {"if": False, "then": {"type": "string"}},
    *({"type": "string", "format": name} for name in ANNOTATIONS),
    {"type": "integer", "format": "int32"},
    {"type": "number", "format": "date"},
]
CONSTRAINS: list[dict[str, Any]] = [
    {"uniqueItems": True},
    {"contains": {"type": "string"}},
    {"contains": {"type": "string"}, "minContains": 0, "maxContains": 1},
    {"not": {"type": "string"}},
    {"type": "number", "not": {"type": "integer"}},
    {"type": ["string", "null"], "not": {"type": "string"}},
    {"prefixItems": [True], "unevaluatedItems": False},
    {"uniqueItems": True, "prefixItems": [True, True], "items": False},
    {"type": [["string"]], "not": {"type": "integer"}},
    {"dependentRequired": {"a": ["b"]}},
    {"dependentRequired": {"a": ["b"]}, "required": ["a"]},
    {"dependentSchemas": {"a": {"required": ["b"]}}},
    {"dependencies": {"a": ["b"]}},
    {"propertyNames": {"pattern": "^a"}},
    {"unevaluatedProperties": False},
    {"unevaluatedItems": {"type": "string"}},
    {"if": {"type": "string"}, "then": {"minLength": 3}},
    {"if": {"type": "string"}, "else": False},
    {"not": {"not": {"type": "string"}}},
    {"propertyNames": {"minLength": 1}},
    {"properties": {"a": True, "b": True}, "minProperties": 2, "required": ["a"]},
    {"if": True, "then": {"type": "string"}},
    {"if": False, "else": {"type": "string"}},
    {"type": "integer", "not": {"type": "number"}},
    {"type": "number", "not": {"const": 1}},
    {"enum": ["a", "b"], "not": {"const": "a"}},
    {"enum": [1, 2], "not": {"enum": [1.0]}},
    {"enum": ["a", 1], "not": {"type": "string"}},
    {"type": ["string", "null"], "not": {"type": "null"}},
    {"type": "string", "not": {"minLength": 3}},
    {"properties": {"a": True}, "unevaluatedProperties": False},
    {"prefixItems": [True], "unevaluatedItems": False},
]
PLACES = {
    "alone": lambda schema: schema,
    "in a property": lambda schema: {"type": "object", "properties": {"a": schema}},
    "in a list": lambda schema: {"type": "array", "items": schema, "prefixItems": [schema]},
    "in a choice": lambda schema: {"anyOf": [{"type": "null"}, schema], "allOf": [schema]},
    "behind a reference": lambda schema: {"$ref": "#/$defs/x", "$defs": {"x": schema}},
    "in the rest": lambda schema: {"type": "object", "additionalProperties": schema},
}


def is_taken(schema: Any) -> bool:
    try:
        backend("byte_level").compile(StructuredOutputs(json=schema))
    except InvalidParameter:
        return False
    return True


@pytest.mark.parametrize("place", PLACES)
def test_what_constrains_nothing_is_accepted(place: str) -> None:
    together = {str(number): PLACES[place](schema) for number, schema in enumerate(CONSTRAINS_NOTHING)}
    if place == "behind a reference":
        together = {key: schema["$defs"]["x"] for key, schema in together.items()}
    assert is_taken({"type": "object", "properties": together}), [s for s in CONSTRAINS_NOTHING if not is_taken(s)]


@pytest.mark.parametrize("schema", CONSTRAINS, ids=json.dumps)
def test_what_constrains_is_still_refused(schema: dict[str, Any]) -> None:
    assert strip_unconstraining(schema) == schema
    assert not is_taken(schema)


def test_a_reference_finds_a_dynamic_anchor() -> None:
    node = {"$dynamicAnchor": "node", "type": "string", "maxLength": 3}
    assert is_taken({"type": "object", "properties": {"a": {"$ref": "#node"}}, "$defs": {"n": node}})


BOUNDS: list[tuple[dict[str, Any], str, str]] = [
    ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, "-5", "x"),
    ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, "12345678901234567", "-1"),
    ({"type": "integer", "minimum": -(2.0**63), "exclusiveMaximum": 2.0**63}, "0", "0.5"),
    ({"type": "integer", "exclusiveMinimum": -1e30, "maximum": 7}, "7", "8"),
    ({"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308}, "-5.5", '"x"'),
    ({"type": "number", "minimum": 0, "exclusiveMaximum": 3.4028235e38}, "5.5", "-5.5"),
    ({"minimum": -(2**63)}, "-5", "-"),
    ({"type": "array", "items": {"const": 0}, "minItems": 1.0, "maxItems": 2.0}, "[0,0]", "[]"),
    ({"type": "string", "minLength": 1.0, "maxLength": 2.0}, '"ab"', '"abc"'),
    ({"type": "number", "minimum": 0, "exclusiveMinimum": True}, "1", "0"),
]


@pytest.mark.parametrize(("schema", "fits", "does_not"), BOUNDS, ids=lambda given: json.dumps(given)[:70])
def test_the_ranges_of_int64_and_floats_are_taken(schema: dict[str, Any], fits: str, does_not: str) -> None:
    tokenizer = text_fakes.tokenizer("byte_level")
    grammars = backend("byte_level")
    matcher = grammars.matcher(grammars.compile(StructuredOutputs(json=schema)))

    def takes(text: str) -> bool:
        trial = matcher.copy()
        for token_id in tokenizer.encode(text, add_special_tokens=False):
            trial.accept(token_id)
        return trial.is_accepting

    assert (takes(fits), takes(does_not)) == (True, False)


def test_a_bound_that_no_number_within_reach_keeps_is_refused() -> None:
    assert not is_taken({"type": "integer", "minimum": 10**30})
    assert not is_taken({"type": "number", "maximum": -1e300})


def test_formats_that_are_followed_stay() -> None:
    for name in KNOWN_FORMATS:
        schema = {"type": "string", "format": name}
        assert strip_unconstraining(schema) == schema
        assert is_taken(schema)


def test_values_and_names_that_look_like_keywords_are_left_alone() -> None:
    schema = {
        "enum": [{"uniqueItems": False}],
        "const": {"format": "path"},
        "default": {"not": False},
        "properties": {"format": {"type": "string"}, "if": {"const": {"then": True}}, "not": {"type": "integer"}},
    }
    assert strip_unconstraining(schema) == schema


@pytest.mark.parametrize(
    "schema",
    [True, None, 5, "x", [], {"format": {}}, {"required": [{}], "dependentRequired": {"a": [{}]}}, {"type": [{}]}],
)
def test_what_is_no_schema_raises_nothing(schema: Any) -> None:
    strip_unconstraining(schema)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text("ab", max_size=2),
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(st.sampled_from("ab"), parts, max_size=2),
    max_leaves=6,
)


@given(
    schema=st.sampled_from(CONSTRAINS_NOTHING + CONSTRAINS),
    other=st.sampled_from(CONSTRAINS_NOTHING + CONSTRAINS),
    value=VALUES,
)
def test_the_same_values_fit(schema: dict[str, Any], other: dict[str, Any], value: Any) -> None:
    """Validate with another implementation of JSON Schema, which also has rules that are not enforced here."""
    both = {**schema, **other}
    both = {key: part for key, part in both.items() if key != "dependencies"}  # of older drafts: not in this one
    assert jsonschema_rs.is_valid(both, value) == jsonschema_rs.is_valid(strip_unconstraining(both), value)
