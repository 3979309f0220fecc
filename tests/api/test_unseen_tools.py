"""Tools and calls that the chat template does not write: the model never sees them, and the client is told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server_process import ServerProcess

USER = [{"role": "user", "content": "the time?"}]
PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "now", "parameters": PARAMETERS}}
CALL = {"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
CALLED = [*USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, *USER]
FLAT_TOOL = {"type": "function", "name": "now", "parameters": PARAMETERS}
ITEMS = [*USER, {"type": "function_call", "call_id": "1", "name": "now", "arguments": "{}"}, *USER]
CUSTOM_TOOL = {"name": "now", "input_schema": PARAMETERS}
TURNS = [*USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "now", "input": {}}]}, *USER]
NAMED = {"type": "function", "function": {"name": "now"}}

UNSEEN: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"messages": USER, "tools": [TOOL]}, "tools"),
    ("/v1/chat/completions", {"messages": CALLED}, "messages.tool_calls"),
    ("/v1/chat/completions", {"messages": CALLED, "tools": [TOOL]}, "tools, messages.tool_calls"),
    ("/v1/chat/completions", {"messages": USER, "tools": [TOOL], "response_format": {"type": "json_object"}}, "tools"),
    ("/v1/responses", {"input": "the time?", "tools": [FLAT_TOOL]}, "tools"),
    ("/v1/responses", {"input": ITEMS}, "input.function_call"),
    ("/v1/messages", {"messages": USER, "tools": [CUSTOM_TOOL]}, "tools"),
    ("/v1/messages", {"messages": TURNS}, "messages.content.tool_use"),
]
SEEN: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": USER}),
    ("/v1/chat/completions", {"messages": USER, "tools": []}),
    ("/v1/chat/completions", {"messages": USER, "tools": [TOOL], "tool_choice": "none"}),
    ("/v1/chat/completions", {"messages": USER, "tools": [TOOL], "tool_choice": "required"}),
    ("/v1/chat/completions", {"messages": USER, "tools": [TOOL], "tool_choice": NAMED}),
    ("/v1/chat/completions", {"messages": USER, "tools": [TOOL], "structured_outputs": {"choice": ["a", "b"]}}),
    ("/v1/responses", {"input": "the time?", "tools": [FLAT_TOOL], "tool_choice": "required"}),
    ("/v1/messages", {"messages": USER, "tools": [CUSTOM_TOOL], "tool_choice": {"type": "any"}}),
]


@pytest.fixture(scope="module", params=[(), ("--strict",)], ids=["lenient", "strict"])
def server(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    """The embedded model, whose template writes neither tools nor calls."""
    server = ServerProcess("--tool-call-parser", "hermes", *request.param)
    yield server
    server.wait_until_idle()
    server.stop()


def is_strict(server: ServerProcess) -> bool:
    return "--strict" in server.process.args  # type: ignore[operator]


def limited(path: str, body: dict[str, Any]) -> dict[str, Any]:
    return {**body, "max_output_tokens" if path == "/v1/responses" else "max_tokens": 4}


@pytest.mark.parametrize(("path", "body", "named"), UNSEEN)
def test_what_the_model_does_not_see_is_named(
    server: ServerProcess, path: str, body: dict[str, Any], named: str
) -> None:
    """A strict server refuses tools, and never what it has answered itself."""
    answer = server.post(path, limited(path, body))
    if is_strict(server) and named.startswith("tools"):
        assert answer.status_code == 400
        assert "tools: this model's chat template does not render them" in answer.json()["error"]["message"]
    else:
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-unseen-params"] == named
        assert "x-ignored-params" not in answer.headers


@pytest.mark.parametrize(("path", "body"), SEEN)
def test_what_acts_is_not_named(server: ServerProcess, path: str, body: dict[str, Any]) -> None:
    answer = server.post(path, limited(path, body))
    assert answer.status_code == 200, answer.text
    assert "x-unseen-params" not in answer.headers


def test_a_stream_and_a_count_tell_as_well(server: ServerProcess) -> None:
    if is_strict(server):
        pytest.skip("a strict server refuses it")
    body = {"messages": USER, "tools": [TOOL], "max_tokens": 2, "stream": True, "mood": 1}
    with server.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.headers["x-unseen-params"] == "tools"
        assert answer.headers["x-ignored-params"] == "mood"
    counted = server.post("/v1/messages/count_tokens", {"messages": TURNS, "tools": [CUSTOM_TOOL]})
    assert counted.headers["x-unseen-params"] == "tools, messages.content.tool_use"
    assert server.stderr.count("does not write tools: the model does not see them") == 1


def test_what_a_server_has_answered_can_be_sent_back(server: ServerProcess) -> None:
    forced = {"messages": USER, "tools": [TOOL], "tool_choice": "required", "max_tokens": 200, "temperature": 0}
    answer = server.post("/v1/chat/completions", forced).json()["choices"][0]["message"]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "noon"} for call in answer["tool_calls"]]
    back = server.post("/v1/chat/completions", forced | {"messages": [*USER, answer, *results], "max_tokens": 2})
    assert back.status_code == 200, back.text


WRITES_CALLS_ALONE = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
SAID = "Let me look."


def test_text_beside_calls_is_told_at_every_door_and_never_refused(tmp_path: Path) -> None:
    """Llama 3's and Mistral's templates behave like this one."""
    template = tmp_path / "calls_alone.jinja"
    template.write_text(WRITES_CALLS_ALONE)
    used = {"type": "tool_use", "id": "1", "name": "now", "input": {}}
    asked = {
        "/v1/chat/completions": ("messages", [*USER, {**CALLED[1], "content": SAID}, *USER], "messages.content"),
        "/v1/messages": (
            "messages",
            [*USER, {"role": "assistant", "content": [{"type": "text", "text": SAID}, used]}, *USER],
            "messages.content.text",
        ),
        "/v1/responses": ("input", [*USER, {"role": "assistant", "content": SAID}, *ITEMS[1:]], "input.message"),
    }
    server = ServerProcess("--chat-template", str(template), "--strict")
    try:
        for path, (field, turns, named) in asked.items():
            answer = server.post(
                path, limited(path, {field: turns}) | ({"max_output_tokens": 16} if field == "input" else {})
            )
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-unseen-params"] == named
            silent = server.post(path, limited(path, {field: "the time?" if field == "input" else USER}))
            assert "x-unseen-params" not in silent.headers
        counted = server.post("/v1/messages/count_tokens", {"messages": asked["/v1/messages"][1]})
        assert counted.headers["x-unseen-params"] == "messages.content.text"
        assert server.stderr.count("does not write text beside tool calls") == 1
    finally:
        server.stop()
