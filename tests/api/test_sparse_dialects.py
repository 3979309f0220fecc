"""Chats in the formats of gpt-oss and GLM-4.5, at a real server whose model writes what a form makes it write."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harmony_template import TEMPLATE
from server_process import ServerProcess

USER = [{"role": "user", "content": "hello"}]
PARAMETERS = {"type": "object", "properties": {"days": {"type": "integer"}}, "required": ["days"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS | {"additionalProperties": False}}}
NAMED = {"type": "function", "function": {"name": "weather"}}
HEADER = "<|start|>assistant<|channel|>"
WRITTEN = {
    "openai": "<|channel|>analysis<|message|>Hm.<|end|>"
    f"{HEADER}commentary<|message|>Let me look.<|end|>"
    f'{HEADER}commentary to=functions.weather <|constrain|>json<|message|>{{"days": 3}}<|call|>',
    "glm45": "\n<think>Hm.</think>\nLet me look.\n"
    "<tool_call>weather\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
}
REASONING = {"openai": "openai_gptoss", "glm45": "glm45"}


@pytest.fixture(scope="module", params=sorted(WRITTEN))
def parser(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def server(parser: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    template: Path = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE, encoding="utf-8")
    flags = ("--tool-call-parser", parser, "--reasoning-parser", REASONING[parser])
    server = ServerProcess("--chat-template", str(template), *flags)
    yield server
    server.wait_until_idle()
    server.stop()


def body(parser: str, **more: Any) -> dict[str, Any]:
    form = {"structured_outputs": {"choice": [WRITTEN[parser]]}}
    return {"messages": USER, "tools": [TOOL], "max_tokens": 600, "temperature": 0, **form, **more}


def test_reasoning_content_and_calls_are_told_apart(server: ServerProcess, parser: str) -> None:
    answer = server.post("/v1/chat/completions", body(parser)).json()
    (choice,) = answer["choices"]
    message = choice["message"]
    assert (message["reasoning"], message["content"], choice["finish_reason"]) == ("Hm.", "Let me look.", "tool_calls")
    (call,) = message["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("weather", {"days": 3})
    assert 0 < answer["usage"]["completion_tokens_details"]["reasoning_tokens"] < answer["usage"]["completion_tokens"]


def test_a_stream_adds_up_to_the_message(server: ServerProcess, parser: str) -> None:
    joined = {"reasoning": "", "content": "", "arguments": ""}
    for event in server.events("/v1/chat/completions", body(parser)):
        delta = event["choices"][0]["delta"]
        for name in ("reasoning", "content"):
            joined[name] += delta.get(name) or ""
        for call in delta.get("tool_calls", []):
            joined["arguments"] += call["function"]["arguments"]
    assert joined == {"reasoning": "Hm.", "content": "Let me look.", "arguments": '{"days": 3}'}


def test_what_was_answered_can_be_sent_back(server: ServerProcess, parser: str) -> None:
    message = server.post("/v1/chat/completions", body(parser)).json()["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "sunny"}
    given = {"messages": [*USER, message, result], "max_tokens": 1, "return_token_ids": True}
    answer = server.post("/v1/chat/completions", given)
    assert answer.status_code == 200, answer.text
    prompt = server.post("/detokenize", {"tokens": answer.json()["prompt_token_ids"]}).json()["prompt"]
    assert "<|channel|>analysis<|message|>Hm.\nLet me look.<|end|>" in prompt


@pytest.mark.parametrize("choice", ["required", NAMED], ids=str)
def test_a_call_that_is_required_comes_and_fits(server: ServerProcess, parser: str, choice: Any) -> None:
    given = {"messages": USER, "tools": [TOOL], "tool_choice": choice, "max_tokens": 300, "temperature": 1.0, "seed": 2}
    message = server.post("/v1/chat/completions", given).json()["choices"][0]["message"]
    assert message["tool_calls"]
    assert all(isinstance(json.loads(call["function"]["arguments"])["days"], int) for call in message["tool_calls"])


def test_no_tools_no_calls(server: ServerProcess, parser: str) -> None:
    given = {name: value for name, value in body(parser).items() if name != "tools"}
    message = server.post("/v1/chat/completions", given).json()["choices"][0]["message"]
    assert message["reasoning"] == "Hm."
    assert not message.get("tool_calls")
    assert "<|" not in message["content"]
