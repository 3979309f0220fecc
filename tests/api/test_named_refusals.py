"""Unsupported parts of a request are refused by name at every API, with what to send instead."""

from __future__ import annotations

import json
from typing import Any

import pytest

from server_process import ServerProcess

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
USER: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
LEAST: dict[str, dict[str, Any]] = {
    CHAT: {"messages": USER, "max_tokens": 4},
    MESSAGES: {"messages": USER, "max_tokens": 4},
    RESPONSES: {"input": "hi", "max_output_tokens": 4},
}
FUNCTION: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
FLAT_FUNCTION: dict[str, Any] = {"type": "function", "name": "f"}


def refused(server: ServerProcess, path: str, **fields: Any) -> tuple[str, str | None]:
    """Return the message, and the parameter that it names."""
    answer = server.post(path, {**LEAST[path], **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return error["message"], error.get("param")


CUSTOM_CALL = {"id": "1", "type": "custom", "custom": {"name": "f", "input": "x"}}
ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [FUNCTION]}


@pytest.mark.parametrize(
    ("path", "fields", "named", "instead"),
    [
        (CHAT, {"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools.0.type='custom'", "use a function"),
        (CHAT, {"tools": [{"type": "web_search"}]}, "tools.0.type='web_search'", "send type 'function'"),
        (CHAT, {"tools": [FUNCTION], "tool_choice": {"type": "custom"}}, "tool_choice.type='custom'", "use a func"),
        (
            CHAT,
            {"tools": [FUNCTION], "tool_choice": ALLOWED},
            "tool_choice.type='allowed_tools'",
            "only those in tools",
        ),
        (RESPONSES, {"tools": [{"type": "custom", "name": "f"}]}, "tools.0.type='custom'", "use a function"),
        (RESPONSES, {"tools": [FLAT_FUNCTION], "tool_choice": ALLOWED}, "tool_choice.type='all", "only those in tools"),
        (RESPONSES, {"input": [{"type": "custom_tool_call", "input": "x"}]}, "'custom_tool_call'", "'function_call' w"),
        (RESPONSES, {"input": [{"type": "custom_tool_call_output"}]}, "'custom_tool_call_o", "'function_call_output'."),
        (CHAT, {"messages": [*USER, {"role": "assistant", "tool_calls": [CUSTOM_CALL]}]}, "'custom'", "'function'"),
        (MESSAGES, {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0.type='bash_2", "an input_schema"),
        (
            CHAT,
            {
                "messages": [
                    {"role": "user", "content": "x" * 70_000},
                    {"role": "assistant", "tool_calls": [CUSTOM_CALL]},
                ]
            },
            "'custom'",
            "'function'",
        ),
    ],
    ids=lambda given: str(given)[:50],
)
def test_other_tools_than_functions(
    server: ServerProcess, path: str, fields: dict[str, Any], named: str, instead: str
) -> None:
    message, _ = refused(server, path, **fields)
    assert named in message
    assert instead in message


def test_redacted_thinking_is_taken_and_shown_to_nobody(server: ServerProcess) -> None:
    said: list[dict[str, Any]] = [{"type": "text", "text": "hello"}]
    redacted: list[dict[str, Any]] = [{"type": "redacted_thinking", "data": "EmwK"}]
    prompts = [
        server.post(
            "/v1/messages/count_tokens", {"messages": [*USER, {"role": "assistant", "content": content}, *USER]}
        )
        for content in (said, redacted + said, said + redacted)
    ]
    assert len({prompt.text for prompt in prompts}) == 1
    assert prompts[0].status_code == 200
    assert "x-ignored-params" not in prompts[1].headers
    assert "redacted_thinking" in refused(server, MESSAGES, messages=[{"role": "user", "content": redacted}])[0]


SCHEMAS: dict[str, dict[str, Any]] = {
    "unknown type": {"type": "strin"},
    "reference elsewhere": {"$ref": "http://x/y"},
    "not implemented": {"type": "array", "uniqueItems": True},
    "no regex": {"type": "string", "pattern": "("},
    "never": {"not": {}},
}
WANTING: dict[str, tuple[str, Any]] = {
    "response_format": (
        CHAT,
        lambda schema: {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
    ),
    "text.format": (RESPONSES, lambda schema: {"text": {"format": {"type": "json_schema", "schema": schema}}}),
    "output_config.format": (
        MESSAGES,
        lambda schema: {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
    ),
    "structured_outputs.json": (CHAT, lambda schema: {"structured_outputs": {"json": schema}}),
    "tools": (CHAT, lambda schema: {"tools": [called(schema)], "tool_choice": "required"}),
    "tools='f'": (CHAT, lambda schema: {"tools": [called(schema)], "tool_choice": FUNCTION}),
    "tools=": (
        RESPONSES,
        lambda schema: {"tools": [FLAT_FUNCTION | called(schema)["function"]], "tool_choice": "required"},
    ),
    "tools='f": (
        MESSAGES,
        lambda schema: {"tools": [{"name": "f", "input_schema": taking(schema)}], "tool_choice": {"type": "any"}},
    ),
}


def taking(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}


def called(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": taking(schema)}}


@pytest.mark.parametrize("field", WANTING)
@pytest.mark.parametrize("schema", SCHEMAS)
def test_a_form_is_refused_by_the_field_that_asked(server: ServerProcess, field: str, schema: str) -> None:
    path, fields = WANTING[field]
    message, param = refused(server, path, **fields(SCHEMAS[schema]))
    assert message.startswith(field)
    assert "cannot be used" in message
    assert "minItems" not in message
    assert path == MESSAGES or param == field.partition("=")[0]


@pytest.mark.parametrize("field", ["response_format", "text.format"])
def test_a_form_without_its_schema_is_named_likewise(server: ServerProcess, field: str) -> None:
    given = {"type": "json_schema"}
    fields = {"response_format": given} if field == "response_format" else {"text": {"format": given}}
    message, param = refused(server, CHAT if field == "response_format" else RESPONSES, **fields)
    told = f"{field}='json_schema': needs a schema. Send it in the field schema."
    assert (message, param) == (told, field)


@pytest.mark.parametrize("form", ["json_object", "json_schema"])
def test_a_required_call_has_no_use_for_the_form_of_an_answer(server: ServerProcess, form: str) -> None:
    schema = {"enum": ["a"]}
    required: dict[str, Any] = {"temperature": 0, "tool_choice": "required", "parallel_tool_calls": False}
    chat = {**LEAST[CHAT], **required, "tools": [called(schema)], "max_tokens": 60}
    wanted = {"response_format": {"type": form, "json_schema": {"name": "x", "schema": schema}}}
    (choice,) = server.post(CHAT, chat | wanted).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"a": "a"}
    tools = [FLAT_FUNCTION | called(schema)["function"]]
    body = {**LEAST[RESPONSES], **required, "tools": tools, "max_output_tokens": 60}
    (item,) = server.post(RESPONSES, body | {"text": {"format": {"type": form, "schema": schema}}}).json()["output"]
    assert json.loads(item["arguments"]) == {"a": "a"}


def test_two_forms_are_refused(server: ServerProcess) -> None:
    both = {"response_format": {"type": "json_object"}, "structured_outputs": {"choice": ["a"]}}
    assert refused(server, CHAT, **both)[0].startswith("structured_outputs and response_format=")
    required = {"tools": [FUNCTION], "tool_choice": "required", "structured_outputs": {"choice": ["a"]}}
    assert refused(server, CHAT, **required)[0].startswith("structured_outputs and tools=")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"stop_sequences": [""]}, "stop_sequences="),
        ({"stop_sequences": ["x" * 70_000]}, "stop_sequences="),
        ({"tool_choice": {"type": "any"}}, "tool_choice='any'"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ],
    ids=str,
)
def test_parameters_have_the_names_of_their_api(server: ServerProcess, fields: dict[str, Any], named: str) -> None:
    assert refused(server, MESSAGES, **fields)[0].startswith(named)
    if "tool_choice" in fields:
        answer = server.post(f"{MESSAGES}/count_tokens", {"messages": USER, **fields})
        assert answer.json()["error"]["message"].startswith(named)
