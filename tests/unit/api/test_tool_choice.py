"""The schemas that make a model call a tool, as the grammar engine understands them."""

from __future__ import annotations

import json
from typing import Any

import llguidance
import pytest

from chat_outputs import TOOLS
from twostroke.api.parsers.chat_parser import make_parser
from twostroke.api.parsers.tool_choice import ChatTools, NamedTool, Tool, ToolChoice, tool_choice_schema
from twostroke.errors import InvalidParameter

TREE = Tool(
    "a/~tree",
    {
        "type": "object",
        "properties": {"size": {"$ref": "#/$defs/Size"}, "left": {"$ref": "#"}},
        "required": ["size"],
        "additionalProperties": False,
        "$defs": {"Size": {"type": "integer"}},
    },
)
LEAF = Tool(
    "leaf", {"type": "object", "properties": {"size": {"$ref": "#/$defs/Size"}}, "$defs": {"Size": {"type": "string"}}}
)


def _nested(depth: int) -> dict[str, Any]:
    return {"items": _nested(depth - 1)} if depth else {}


DEEP = Tool("deep", _nested(900))


def accepts(schema: dict[str, Any], value: object) -> bool:
    """Return whether a generation may be this value, byte by byte."""
    matcher = llguidance.LLMatcher(
        llguidance.LLTokenizer("byte"), llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
    )
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(json.dumps(value, ensure_ascii=False).encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def call(name: str, parameters: object) -> dict[str, object]:
    return {"name": name, "parameters": parameters}


@pytest.mark.parametrize(
    ("value", "is_call"),
    [
        ([call("now", {})], True),
        ([call("get_weather", {"city": "Paris", "days": 3}), call("now", {})], True),
        ([], False),
        ([call("later", {})], False),
        ([call("get_weather", {"city": 3})], False),
        (call("now", {}), False),
        ([call("a/~tree", {"size": 1, "left": {"size": 2}})], True),
        ([call("a/~tree", {"size": 1, "left": {"size": "2"}})], False),
        ([call("leaf", {"size": "2"})], True),
        ([call("leaf", {"size": 2})], False),
    ],
)
def test_required(value: object, is_call: bool) -> None:
    schema = tool_choice_schema((*TOOLS, TREE, LEAF), "required")
    assert schema is not None
    assert accepts(schema, value) == is_call


@pytest.mark.parametrize("name", ["get weather", "Größe", "%41", "a#b", "a/~b"])
def test_required_by_any_name(name: str) -> None:
    schema = tool_choice_schema([Tool("now"), Tool(name, LEAF.parameters)], "required")
    assert schema is not None
    assert accepts(schema, [call(name, {"size": "2"})])
    assert not accepts(schema, [call(name, {"size": 2})])


ARGUMENTS: dict[str, dict[str, Any]] = {
    "nothing said": {},
    "no type": {"properties": {"a": {"type": "integer"}}, "required": ["a"]},
    "object or text": {"anyOf": [{"type": "object", "properties": {"a": {"type": "integer"}}}, {"type": "string"}]},
    "object or null": {"type": ["object", "null"], "properties": {"a": {"type": "integer"}}},
    "one of": {"oneOf": [{"type": "array"}, {"type": "object", "properties": {"a": {"type": "integer"}}}]},
    "a reference": {"$ref": "#/$defs/x", "$defs": {"x": {"properties": {"a": {"type": "integer"}}}}},
    "all of": {"allOf": [{"properties": {"a": {"type": "integer"}}}, {"required": ["a"]}]},
    "a document": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$id": "https://example.org/arguments",
        "properties": {"a": {"$ref": "#/definitions/n"}},
        "definitions": {"n": {"type": "integer"}},
    },
}


@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize("choice", ["required", NamedTool("f")], ids=["required", "named"])
def test_arguments_are_an_object_whatever_the_schema_says(arguments: str, choice: ToolChoice) -> None:
    schema = tool_choice_schema([Tool("f", ARGUMENTS[arguments])], choice)
    assert schema is not None

    def fits(value: object) -> bool:
        return accepts(schema, [call("f", value)] if choice == "required" else value)

    assert fits({"a": 1})
    for other in (True, None, 5, "x", [1], []):
        assert not fits(other), other
    if arguments != "nothing said":
        assert not fits({"a": "x"})


VALUES: dict[str, dict[str, Any]] = {
    "a constant that looks like a reference": {"properties": {"a": {"const": {"$ref": "#/a"}}}, "required": ["a"]},
    "values that look like references": {"properties": {"a": {"enum": [{"$ref": "#"}, "#"]}}, "required": ["a"]},
    "properties that are called like keywords": {
        "properties": {
            "const": {"$ref": "#/$defs/n"},
            "enum": {"$ref": "#/$defs/n"},
            "title": {"$ref": "#/$defs/n"},
            "description": {"type": "string"},
            "examples": {"type": "array", "items": {"$ref": "#/$defs/n"}},
            "$ref": {"$ref": "#/$defs/n"},
        },
        "required": ["const", "enum", "title", "description", "examples", "$ref"],
        "$defs": {"n": {"type": "integer", "title": "n"}},
    },
    "definitions elsewhere": {
        "properties": {"a": {"$ref": "#/components/schemas/list"}},
        "required": ["a"],
        "components": {
            "schemas": {
                "list": {"type": "array", "items": {"$ref": "#/components/schemas/n"}},
                "n": {"type": "integer"},
            }
        },
    },
    "an anchor": {
        "properties": {"a": {"$ref": "#n"}},
        "required": ["a"],
        "$defs": {"x": {"$anchor": "n", "type": "integer"}},
    },
    "its own address": {
        "$id": "https://example.org/arguments#",
        "properties": {"a": {"$ref": "https://example.org/arguments#/$defs/n"}, "b": {"$ref": "arguments#m"}},
        "required": ["a", "b"],
        "$defs": {"n": {"type": "integer"}, "m": {"$anchor": "m", "type": "boolean"}},
    },
    "a document within": {
        "properties": {"a": {"$ref": "list.json"}},
        "required": ["a"],
        "$defs": {
            "n": {"type": "string"},
            "list": {
                "$id": "list.json",
                "type": "array",
                "items": {"$ref": "#/$defs/n"},
                "$defs": {"n": {"type": "integer"}},
            },
        },
    },
    "a recursive model": {
        "$ref": "#/$defs/Node",
        "description": "As pydantic describes it.",
        "$defs": {
            "Node": {
                "type": "object",
                "properties": {
                    "v": {"type": "integer"},
                    "next": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]},
                },
                "required": ["v"],
                "additionalProperties": False,
            }
        },
    },
    "a name with a space": {"properties": {"a": {"$ref": "#/$defs/x%20y"}}, "$defs": {"x y": {"type": "integer"}}},
    "the same name twice": {
        "properties": {"a": {"$ref": "#/definitions/q"}, "b": {"$ref": "#/$defs/q"}},
        "required": ["a", "b"],
        "definitions": {"q": {"type": "integer"}},
        "$defs": {"q": {"type": "string"}},
    },
    "an example of a reference": {"properties": {"a": {"examples": [{"$ref": "#/x"}], "type": "integer"}}},
    "a pattern that matches a keyword": {
        "patternProperties": {r"^\$ref$": {"type": "integer"}},
        "additionalProperties": False,
    },
    "object or nothing": {"type": ["null", "object"], "properties": {"a": {"const": 1}}, "required": ["a"]},
    "items of no list": {"items": {"type": "string"}, "properties": {"a": {"type": "integer"}}},
    "a tree": {"properties": {"next": {"$ref": "#"}}, "required": [], "additionalProperties": False},
    "a pattern of names": {"patternProperties": {"^a": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "integer"}}},
}
FITTING: dict[str, tuple[Any, Any]] = {
    "a constant that looks like a reference": ({"a": {"$ref": "#/a"}}, {"a": {"$ref": "#/$defs/0/a"}}),
    "values that look like references": ({"a": {"$ref": "#"}}, {"a": {"$ref": "#/$defs/0"}}),
    "properties that are called like keywords": (
        {"const": 1, "enum": 2, "title": 3, "description": "d", "examples": [4], "$ref": 5},
        {"const": "1", "enum": 2, "title": 3, "description": "d", "examples": [4], "$ref": 5},
    ),
    "definitions elsewhere": ({"a": [1, 2]}, {"a": ["x"]}),
    "an anchor": ({"a": 1}, {"a": "x"}),
    "its own address": ({"a": 1, "b": True}, {"a": 1, "b": 1}),
    "a document within": ({"a": [1]}, {"a": ["x"]}),
    "a recursive model": ({"v": 1, "next": {"v": 2, "next": None}}, {"v": 1, "next": {}}),
    "a name with a space": ({"a": 1}, {"a": "x"}),
    "the same name twice": ({"a": 1, "b": "x"}, {"a": "x", "b": 1}),
    "an example of a reference": ({"a": 1}, {"a": "x"}),
    "a pattern that matches a keyword": ({"$ref": 1}, {"$ref": "x"}),
    "object or nothing": ({"a": 1}, {"a": 2}),
    "items of no list": ({"a": 1}, {"a": "x"}),
    "a tree": ({"next": {"next": {}}}, {"next": {"other": 1}}),
    "a pattern of names": ({"ab": 1}, {"ab": "x"}),
}


@pytest.mark.parametrize("parameters", VALUES)
def test_a_schema_means_the_same_under_both_choices(parameters: str) -> None:
    tools = [Tool("f", VALUES[parameters]), Tool("g", VALUES[parameters])]
    fits, does_not = FITTING[parameters]
    required, named = tool_choice_schema(tools, "required"), tool_choice_schema(tools, NamedTool("g"))
    assert required is not None
    assert named is not None
    assert (accepts(named, fits), accepts(named, does_not)) == (True, False)
    for name in ("f", "g"):
        assert (accepts(required, [call(name, fits)]), accepts(required, [call(name, does_not)])) == (True, False)


def test_what_readers_are_told_does_not_count() -> None:
    """Descriptions are most of what agents send; the form of a call has a limit for what constrains."""
    told = {"description": "x" * 2000, "title": "y" * 200, "$comment": "z" * 200}
    parameters = {"type": "object", "properties": {"a": {"type": "integer", **told}}, "required": ["a"], **told}
    schema = tool_choice_schema([Tool(f"tool{number}", parameters) for number in range(100)], "required")
    assert schema is not None
    assert len(json.dumps(schema)) < 30_000
    assert accepts(schema, [call("tool99", {"a": 1})])


@pytest.mark.parametrize("kind", ["string", "array", ["string", "null"], 5])
def test_parameters_that_describe_no_object_are_refused(kind: object) -> None:
    for choice in ("required", NamedTool("f")):
        with pytest.raises(InvalidParameter, match=r"the parameters of 'f' are of type .* they must be an object"):
            tool_choice_schema([Tool("f", {"type": kind})], choice)  # type: ignore[arg-type]


NAMES = ["get weather", "a" * 256, "é" * 256, '"' * 200, "f(x)", "{}", "<b>", "a,b;c=d", "\n", "名前"]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name[:12])
def test_every_name_is_called_by_both_choices(name: str) -> None:
    tools = [Tool("now"), Tool(name)]
    schema = tool_choice_schema(tools, "required")
    assert schema is not None
    assert accepts(schema, [call(name, {})])
    for text in (json.dumps([call(name, {"a": 1})]), json.dumps([call(name, {"a": 1})], ensure_ascii=False)):
        parsed = make_parser("hermes", None, ChatTools(tools, "required")).parse(text)
        assert [(one.name, json.loads(one.arguments)) for one in parsed.tool_calls] == [(name, {"a": 1})]
    parsed = make_parser("hermes", None, ChatTools(tools, NamedTool(name))).parse('{"a": 1}')
    assert [one.name for one in parsed.tool_calls] == [name]


def test_the_grammar_of_a_call_that_was_cut_is_no_content() -> None:
    tools = [Tool("now"), Tool("f")]
    whole = json.dumps([call("now", {"a": [1, 2]}), call("f", {})], indent=1)
    for end in range(len(whole)):
        parsed = make_parser("hermes", None, ChatTools(tools, "required")).parse(whole[:end])
        assert parsed.content == ""
        if end > whole.index('"f"'):
            assert parsed.tool_calls[0].name == "now"
            assert json.loads(parsed.tool_calls[0].arguments) == {"a": [1, 2]}
        named = make_parser("hermes", None, ChatTools(tools, NamedTool("f"))).parse('  { "a": 1}'[:end])
        assert named.content == ""


def test_required_but_one() -> None:
    schema = tool_choice_schema(TOOLS, "required", parallel_tool_calls=False)
    assert schema is not None
    assert accepts(schema, [call("now", {})])
    assert not accepts(schema, [call("now", {}), call("now", {})])


def test_named_is_the_arguments_alone() -> None:
    schema = tool_choice_schema((TREE, LEAF), NamedTool("a/~tree"))
    assert schema is not None
    assert accepts(schema, {"size": 1, "left": {"size": 2}})
    assert not accepts(schema, {"left": {"size": 2}})


@pytest.mark.parametrize("tool_choice", ["auto", "none"])
def test_free(tool_choice: ToolChoice) -> None:
    assert tool_choice_schema(TOOLS, tool_choice) is None


def test_a_schema_named_like_a_reference_is_left_alone() -> None:
    tool = Tool("f", {"type": "object", "properties": {"$ref": {"type": "string"}}, "examples": [["#"]]})
    schema = tool_choice_schema([tool], "required")
    assert schema is not None
    assert schema["$defs"]["0"] == tool.parameters


@pytest.mark.parametrize(
    ("tools", "tool_choice", "message"),
    [
        (TOOLS, NamedTool("later"), "tool_choice='later': must be one of tools: get_weather, now"),
        ((), "required", "tool_choice='required': needs at least one of tools"),
        ((DEEP,), "required", "tools='deep': parameters are nested deeper than 64"),
        ((Tool("now"), Tool("now")), "auto", "tools='now': two tools have this name"),
    ],
)
def test_refused(tools: tuple[Tool, ...], tool_choice: ToolChoice, message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        tool_choice_schema(tools, tool_choice)
