"""What a server does not do is refused by what the client sent, at every door, and it is said what to send instead."""

from __future__ import annotations

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
    """The message, and the parameter that it is about."""
    answer = server.post(path, {**LEAST[path], **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return error["message"], error.get("param")


CUSTOM_CALL = {"id": "1", "type": "custom", "custom": {"name": "f", "input": "x"}}
ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [FUNCTION]}


@pytest.mark.parametrize(
    ("path", "fields", "named", "instead"),
    [
        (CHAT, {"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools.0.type='custom'", "offer a function"),
        (CHAT, {"tools": [{"type": "web_search"}]}, "tools.0.type='web_search'", "send type 'function'"),
        (CHAT, {"tools": [FUNCTION], "tool_choice": {"type": "custom"}}, "tool_choice.type='custom'", "offer a func"),
        (CHAT, {"tools": [FUNCTION], "tool_choice": ALLOWED}, "tool_choice.type='allowed_tools'", "alone in tools"),
        (RESPONSES, {"tools": [{"type": "custom", "name": "f"}]}, "tools.0.type='custom'", "offer a function"),
        (RESPONSES, {"tools": [FLAT_FUNCTION], "tool_choice": ALLOWED}, "tool_choice.type='all", "alone in tools"),
        (RESPONSES, {"input": [{"type": "custom_tool_call", "input": "x"}]}, "'custom_tool_call'", "'function_call' w"),
        (RESPONSES, {"input": [{"type": "custom_tool_call_output"}]}, "'custom_tool_call_o", "'function_call_output'."),
        (CHAT, {"messages": [*USER, {"role": "assistant", "tool_calls": [CUSTOM_CALL]}]}, "'custom'", "'function'"),
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
