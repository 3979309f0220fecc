"""/v1/chat/completions: the template, the model, and the dialect's parsers; a real server with a template of ours."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server_process import ServerProcess
from twostroke import LLM, SamplingParams

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if documents %}{{ documents | tojson }}{% endif %}"
    "{{ mood or '' }}{{ reasoning_effort or '' }}{% if add_generation_prompt %}[assistant]{% endif %}"
)
USER = [{"role": "user", "content": "hello"}]
BODY: dict[str, Any] = {"messages": USER, "max_tokens": 12, "temperature": 0}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"days": {"type": "integer"}},
            "required": ["days"],
            "additionalProperties": False,
        },
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"days": 3}}\n</tool_call>'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    template: Path = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE, encoding="utf-8")
    server = ServerProcess(
        *("--chat-template", str(template), "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"),
        *("--served-model-name", "first", "--served-model-name", "second"),
    )
    yield server
    server.wait_until_idle()
    server.stop()


def chat(server: ServerProcess, **body: Any) -> dict[str, Any]:
    response = server.post("/v1/chat/completions", BODY | body)
    assert response.status_code == 200, response.text
    return response.json()


def message(server: ServerProcess, **body: Any) -> dict[str, Any]:
    return chat(server, **body)["choices"][0]["message"]


def streamed(server: ServerProcess, **body: Any) -> tuple[dict[str, Any], str]:
    """The message that a stream adds up to, and why it ended."""
    joined: dict[str, Any] = {"role": "", "content": "", "reasoning": "", "tool_calls": []}
    reasons: list[str] = []
    for event in server.events("/v1/chat/completions", BODY | body):
        (choice,) = event["choices"]
        delta = choice["delta"]
        for name in ("role", "content", "reasoning"):
            joined[name] += delta.get(name) or ""
        for call in delta.get("tool_calls", []):
            if "id" in call:
                assert call["index"] == len(joined["tool_calls"])
                joined["tool_calls"].append({"name": call["function"]["name"], "arguments": ""})
            joined["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
        reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    (reason,) = reasons
    return joined, reason


def rendered(server: ServerProcess, **body: Any) -> str:
    """The prompt that the model saw."""
    ids = chat(server, **body, return_token_ids=True)["prompt_token_ids"]
    return server.post("/detokenize", {"tokens": ids}).json()["prompt"]


def test_a_chat_is_the_template_and_the_model(server: ServerProcess, llm: LLM) -> None:
    expected = llm.generate(["[user]hello[assistant]"], SamplingParams(max_tokens=12, temperature=0))[0]
    assert rendered(server) == "[user]hello[assistant]"
    answer = chat(server)
    assert answer["choices"][0]["message"]["content"] == expected.outputs[0].text
    assert answer["model"] == "first"
    assert chat(server, model="second")["model"] == "second"
    joined, reason = streamed(server)
    assert (joined["role"], joined["content"], reason) == ("assistant", expected.outputs[0].text, "length")
    assert server.post("/tokenize", {"messages": USER}).json()["tokens"] == list(expected.prompt_token_ids)


def test_variables_of_the_template(server: ServerProcess) -> None:
    assert rendered(server, chat_template_kwargs={"mood": "gay"}) == "[user]hellogay[assistant]"
    assert rendered(server, reasoning_effort="low") == "[user]hellolow[assistant]"
    assert rendered(server, documents=[{"a": 1}]) == '[user]hello[{"a": 1}][assistant]'
    assert "weather" in rendered(server, tools=[TOOL])
    assert "weather" not in rendered(server, tools=[TOOL], tool_choice="none")


def test_text_parts_are_joined_and_others_refused_by_name(server: ServerProcess) -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    assert "hel" in rendered(server, messages=[{"role": "user", "content": parts}])
    for kind in ("image_url", "input_audio", "file"):
        response = server.post(
            "/v1/chat/completions", BODY | {"messages": [{"role": "user", "content": [{"type": kind}]}]}
        )
        assert response.status_code == 400
        assert kind in response.json()["error"]["message"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=str)
def test_a_call_that_is_required_comes_and_fits(server: ServerProcess, choice: Any) -> None:
    body = {"tools": [TOOL], "tool_choice": choice, "max_tokens": 64, "temperature": 1.0, "seed": 2}
    answer = chat(server, **body)["choices"][0]
    calls = answer["message"]["tool_calls"]
    assert {call["function"]["name"] for call in calls} == {"weather"}
    assert all(isinstance(json.loads(call["function"]["arguments"])["days"], int) for call in calls)
    assert answer["finish_reason"] == ("tool_calls" if choice == "required" else "stop")
    joined, reason = streamed(server, **body)
    assert joined["tool_calls"] == [call["function"] for call in calls]
    assert reason == answer["finish_reason"]


def test_the_models_own_calls_are_found(server: ServerProcess) -> None:
    body = {"tools": [TOOL], "structured_outputs": {"choice": ["Well. " + CALL]}, "max_tokens": 100}
    answer = chat(server, **body)["choices"][0]
    (call,) = answer["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"days": 3}
    assert (answer["message"]["content"].strip(), answer["finish_reason"]) == ("Well.", "tool_calls")
    joined, reason = streamed(server, **body)
    assert joined["tool_calls"] == [call["function"]]
    assert (joined["content"], reason) == (answer["message"]["content"], "tool_calls")


def test_one_call_at_most(server: ServerProcess) -> None:
    body = {"tools": [TOOL], "structured_outputs": {"choice": [CALL + "\n" + CALL]}, "max_tokens": 200}
    assert len(message(server, **body)["tool_calls"]) == 2
    assert len(message(server, **body, parallel_tool_calls=False)["tool_calls"]) == 1


def test_reasoning_is_told_from_the_answer(server: ServerProcess) -> None:
    thinking = [*USER, {"role": "assistant", "content": "<think>"}]
    body = {"messages": thinking, "continue_final_message": True}
    answer = chat(server, **body)
    found = answer["choices"][0]["message"]
    assert found["content"] == ""
    assert found["reasoning"] == found["reasoning_content"] != ""
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 12
    assert streamed(server, **body)[0]["reasoning"] == found["reasoning"]
    hidden = message(server, **body, include_reasoning=False)
    assert "reasoning" not in hidden
    assert hidden["content"] == ""


def test_log_probabilities(server: ServerProcess) -> None:
    entries = chat(server, logprobs=True, top_logprobs=3)["choices"][0]["logprobs"]["content"]
    assert len(entries) == 12
    assert bytes(b for entry in entries for b in entry["bytes"]).decode() == message(server)["content"]
    for entry in entries:
        assert len(entry["top_logprobs"]) == 3
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"]  # greedy
    assert chat(server, logprobs=True)["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    assert server.post("/v1/chat/completions", BODY | {"top_logprobs": 3}).status_code == 400


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, None),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"messages": []}, "messages"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
    ids=str,
)
def test_contradictions_are_refused(server: ServerProcess, body: dict[str, Any], param: str | None) -> None:
    response = server.post("/v1/chat/completions", BODY | body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert param is None or error["param"] == param
