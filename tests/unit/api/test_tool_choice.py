"""The schemas that make a model call a tool, as the grammar engine understands them."""

from __future__ import annotations

import json
from typing import Any

import llguidance
import pytest

from chat_outputs import TOOLS
from twostroke.api.parsers.tool_choice import NamedTool, Tool, ToolChoice, tool_choice_schema
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
    """Whether a generation may be this value, byte by byte."""
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
