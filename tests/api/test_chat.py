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
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>{% endfor %}{% endfor %}"
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
        *("--served-model-name", "first", "second", "--served-model-name", "third"),
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
    """Return the message that a stream adds up to, and its finish reason."""
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
    """Return the prompt that the model saw."""
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


def test_a_call_may_hold_a_stop_string(server: ServerProcess) -> None:
    body = {
        "tools": [TOOL],
        "structured_outputs": {"choice": [CALL + "\nDone."]},
        "max_tokens": 100,
        "stop": ["\n", "Do"],
    }
    answer = chat(server, **body)["choices"][0]
    assert [call["function"] for call in answer["message"]["tool_calls"]] == [
        {"name": "weather", "arguments": '{"days": 3}'}
    ]
    assert (answer["message"]["content"], answer["finish_reason"], answer["stop_reason"]) == (None, "tool_calls", "Do")
    joined, reason = streamed(server, **body)
    assert (joined["content"], reason) == ("", "tool_calls")
    assert joined["tool_calls"] == [call["function"] for call in answer["message"]["tool_calls"]]
    prompt = {"prompt": "x", "max_tokens": 100, "stop": ["\n"], "structured_outputs": {"choice": [CALL]}}
    text = server.post("/v1/completions", prompt).json()["choices"][0]["text"]
    assert text == "<tool_call>"


FORM: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {
        "name": "form",
        "schema": {
            "type": "object",
            "properties": {"ok": {"type": "boolean"}},
            "required": ["ok"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.parametrize("bias", [-100, 100])
def test_a_form_and_a_tool_can_both_be_wanted(server: ServerProcess, bias: int) -> None:
    """The first characters that the model writes decide; here a grammar forces its choice."""
    first = server.post("/tokenize", {"prompt": "<tool_call>", "add_special_tokens": False}).json()["tokens"][0]
    body = {"tools": [TOOL], "response_format": FORM, "max_tokens": 40, "logit_bias": {str(first): bias}}
    answer = chat(server, **body)["choices"][0]["message"]
    if bias < 0:
        assert isinstance(json.loads(answer["content"])["ok"], bool)
    else:
        assert not answer["content"]  # a call, or the beginning of one


def test_json_by_any_field_leaves_the_calls(server: ServerProcess) -> None:
    """A schema is the form of the answer, whichever field brings it; other forms are all that is written."""
    first = server.post("/tokenize", {"prompt": "<tool_call>", "add_special_tokens": False}).json()["tokens"][0]
    body = {"tools": [TOOL], "max_tokens": 300, "logit_bias": {str(first): 100}}
    schema = FORM["json_schema"]["schema"]
    for form in ({"json": schema}, {"json": json.dumps(schema)}, {"json_object": True}):
        (call,) = message(server, **body, structured_outputs=form)["tool_calls"]
        assert call["function"]["name"] == "weather", form
        cut = message(server, **body | {"max_tokens": 12}, structured_outputs=form)
        assert not cut["content"], form
        without = message(server, **body, structured_outputs=form, tool_choice="none")
        assert without["content"].lstrip().startswith("{"), form
    for form in ({"choice": ["yes", "no"]}, {"regex": "yes|no"}, {"grammar": 'start: "yes" | "no"'}):
        assert message(server, **body, structured_outputs=form)["content"] in ("yes", "no"), form


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>a b</think>c", "a b", "c"),
        ("<think>\nEND\n</think>\n\nfine END no", "END", "fine "),
        ("a <think>b</think>", "", "a <think>b</think>"),
        ("<think>END " + CALL + " END", "END " + CALL + " END", ""),
    ],
)
def test_reasoning_that_a_form_writes_is_told(server: ServerProcess, text: str, reasoning: str, content: str) -> None:
    body = {"structured_outputs": {"choice": [text]}, "max_tokens": 100, "stop": "END"}
    answer = chat(server, **body)
    found = answer["choices"][0]["message"]
    assert (found.get("reasoning", ""), found["content"]) == (reasoning, content)
    details = answer["usage"].get("completion_tokens_details")
    assert bool(reasoning) == bool(details and details["reasoning_tokens"])
    joined, _ = streamed(server, **body)
    assert (joined["reasoning"], joined["content"]) == (reasoning, content)


def test_a_form_of_json_holds_no_reasoning(server: ServerProcess) -> None:
    """A forced format has no reasoning, even if the prompt has opened it: what has the format is the answer."""
    thinking = [*USER, {"role": "assistant", "content": "<think>"}]
    body = {"messages": thinking, "continue_final_message": True, "response_format": FORM, "max_tokens": 60}
    found = message(server, **body)
    assert found["content"].lstrip().startswith("{")
    assert "reasoning" not in found


def test_a_forced_call_that_is_cut_shows_no_grammar(server: ServerProcess) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        for limit in range(1, 24):
            body = {"tools": [TOOL], "tool_choice": choice, "max_tokens": limit, "seed": 2}
            answer = chat(server, **body)["choices"][0]
            assert not answer["message"]["content"]
            joined, reason = streamed(server, **body)
            assert (joined["content"], reason) == ("", answer["finish_reason"])


def test_a_conversation_means_the_same_at_every_door(server: ServerProcess) -> None:
    arguments = '{"days": 3, "where": "Köln"}'
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "the weather?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "Sunny."}]},
        {"role": "user", "content": "thanks"},
    ]
    text = (
        "[system]Be brief.[user]the weather?[assistant]<call>weather " + arguments + "</call>[tool]sunny"
        "[assistant]Sunny.[user]thanks[assistant]"
    )
    assert rendered(server, messages=messages) == text
    assert rendered(server, messages=[{**messages[0], "role": "developer"}, *messages[1:]]) == text
    num_tokens = len(server.post("/tokenize", {"messages": messages}).json()["tokens"])
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "the weather?"}]},
        {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": arguments},
        {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "Sunny."}]},
        {"role": "user", "content": "thanks"},
    ]
    answer = server.post("/v1/responses", {"input": items, "max_output_tokens": 1}).json()
    assert answer["usage"]["input_tokens"] == num_tokens
    turns = [
        {"role": "user", "content": "the weather?"},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "1", "name": "weather", "input": json.loads(arguments)}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "sunny"}]},
        {"role": "assistant", "content": "Sunny."},
        {"role": "user", "content": "thanks"},
    ]
    counted = server.post(
        "/v1/messages/count_tokens", {"system": "Be brief.", "messages": turns, "model": "first"}
    ).json()
    assert counted["input_tokens"] == num_tokens


def test_an_answer_can_always_be_sent_back(server: ServerProcess) -> None:
    body = {"tools": [TOOL], "structured_outputs": {"choice": ["Well. " + CALL]}, "max_tokens": 100}
    for limit in range(1, 40, 3):
        back = chat(server, **body | {"max_tokens": limit})["choices"][0]["message"]
        assert rendered(server, messages=[*USER, back, *USER]).endswith("[user]hello[assistant]")


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
        ({"response_format": {"type": "json_schema"}}, "response_format"),
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
