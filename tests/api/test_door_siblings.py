"""Siblings of what went wrong with messages, stop strings and forced calls, at every door, streamed and whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.hostile.sound_files import CHATML
from server_process import ServerProcess

USER = {"role": "user", "content": "hi"}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "x\\ny é🙂"}}\n</tool_call>'
ARGUMENTS = '{"a": "x\\ny é🙂"}'
OBJECT: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 4}}, "required": ["a"]}
OBJECT["additionalProperties"] = False


@pytest.fixture(scope="module", params=["qwen3", "deepseek_r1"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Server that knows tools and reasoning; it must log no internal error."""
    path = tmp_path_factory.mktemp("template") / "template.jinja"
    path.write_text(CHATML)
    flags = ("--chat-template", str(path), "--tool-call-parser", "hermes", "--reasoning-parser", request.param)
    server = ServerProcess(*flags)
    yield server
    server.wait_until_idle()
    server.stop()
    assert not [line for line in server.lines if "internal error" in line or "Traceback" in line]


def tool(parameters: Any, name: str = "f") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


Choice = tuple[str, str, list[tuple[str, str]], str, Any]
"""Content, reasoning, calls, why it ended, and the stop string."""


def whole(server: ServerProcess, **body: Any) -> list[Choice]:
    answer = server.post("/v1/chat/completions", {"messages": [USER], "temperature": 0, "max_tokens": 400, **body})
    assert answer.status_code == 200, answer.text
    found: list[Choice] = []
    for choice in answer.json()["choices"]:
        message = choice["message"]
        functions = [call["function"] for call in message.get("tool_calls", [])]
        calls = [(function["name"], function["arguments"]) for function in functions]
        reasoning: str = message.get("reasoning", "")
        found.append((message["content"] or "", reasoning, calls, choice["finish_reason"], choice["stop_reason"]))
    return found


def streamed(server: ServerProcess, **body: Any) -> list[Choice]:
    asked = {"messages": [USER], "temperature": 0, "max_tokens": 400, **body}
    found: dict[int, dict[str, Any]] = {}
    for event in server.events("/v1/chat/completions", asked):
        for choice in event["choices"]:
            one = found.setdefault(choice["index"], {"content": "", "reasoning": "", "calls": [], "end": ("", None)})
            delta = choice["delta"]
            one["content"] += delta.get("content") or ""
            one["reasoning"] += delta.get("reasoning", "")
            for call in delta.get("tool_calls", []):
                if "id" in call:
                    one["calls"].append((call["function"]["name"], ""))
                name, arguments = one["calls"][call["index"]]
                one["calls"][call["index"]] = (name, arguments + call["function"]["arguments"])
            if choice["finish_reason"]:
                one["end"] = (choice["finish_reason"], choice["stop_reason"])
    return [(one["content"], one["reasoning"], one["calls"], *one["end"]) for _, one in sorted(found.items())]


WRITTEN: dict[str, tuple[str, dict[str, Any], Choice]] = {
    "a character beyond ASCII": ("Hello é🙂 you", {"stop": "🙂"}, ("Hello é", "", [], "stop", "🙂")),
    "kept in the output": (
        "Hello é🙂 you",
        {"stop": "🙂", "include_stop_str_in_output": True},
        ("Hello é🙂", "", [], "stop", "🙂"),
    ),
    "within joined emoji": ("👩\u200d👩\u200d👧 b", {"stop": "\u200d👧"}, ("👩\u200d👩", "", [], "stop", "\u200d👧")),
    "another way to write é": ("cafe\u0301", {"stop": "é"}, ("cafe\u0301", "", [], "stop", None)),
    "a backslash and an n": ("a\nb\\nc", {"stop": "\\n"}, ("a\nb", "", [], "stop", "\\n")),
    "a control character": ("a\x00b", {"stop": "\x00"}, ("a", "", [], "stop", "\x00")),
    "behind a call": (
        f"Sure. {CALL} done X",
        {"stop": "X"},
        ("Sure.  done ", "", [("f", ARGUMENTS)], "tool_calls", "X"),
    ),
    "in arguments": (CALL, {"stop": ["é🙂", "\\n"]}, ("", "", [("f", ARGUMENTS)], "tool_calls", None)),
    "in the reasoning": ("<think>a X</think>b X", {"stop": "X"}, ("b ", "a X", [], "stop", "X")),
    "the end of the reasoning": ("<think>a</think>b", {"stop": "</think>"}, ("b", "a", [], "stop", None)),
    "from the tag into the answer": ("<think>a</think>\n\nb", {"stop": "k>\n\nb"}, ("b", "a", [], "stop", None)),
    "the layout behind the tag": ("<think>a</think>\n\nb\nc", {"stop": "\n"}, ("b", "a", [], "stop", "\n")),
    "one within another": ("abcdef", {"stop": ["cdef", "de"]}, ("abc", "", [], "stop", "de")),
    "several that end together": ("abcdef", {"stop": ["d", "cd", "bcd"]}, ("a", "", [], "stop", "bcd")),
    "the first tokens": ("X X X X", {"stop": "X", "min_tokens": 3}, ("X X ", "", [], "stop", "X")),
    "one call at most": (CALL + CALL, {"parallel_tool_calls": False}, ("", "", [("f", ARGUMENTS)], "tool_calls", None)),
    "more behind the arguments": (
        '<tool_call>{"name": "f", "arguments": {}, "why": [1]}</tool_call>',
        {},
        ("", "", [("f", "{}")], "tool_calls", None),
    ),
    "no arguments": (
        '<tool_call>{"name": "f", "arguments": ""}</tool_call>',
        {},
        ("", "", [("f", "{}")], "tool_calls", None),
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_is_found_streamed_and_whole_in_every_choice(server: ServerProcess, name: str) -> None:
    text, more, expected = WRITTEN[name]
    asked = {"tools": [tool(OBJECT)], "structured_outputs": {"choice": [text]}, "n": 2, **more}
    assert whole(server, **asked) == [expected] * 2
    assert streamed(server, **asked) == [expected] * 2


@pytest.mark.parametrize("limit", range(1, 70, 9))
def test_calls_that_are_cut_are_the_same_streamed_and_whole(server: ServerProcess, limit: int) -> None:
    text = f"Sure. {CALL}{CALL}"
    asked = {"tools": [tool(OBJECT)], "structured_outputs": {"choice": [text]}, "max_tokens": limit}
    found = whole(server, **asked)
    assert found == streamed(server, **asked)
    assert "name" not in found[0][0]


def test_a_continued_answer_is_one_at_every_door(server: ServerProcess) -> None:
    """A continued answer is not read as reasoning, although one of the servers reads everything as reasoning first."""
    chat = [USER, {"role": "assistant", "content": [{"type": "text", "text": "def add(a, b):"}]}]
    ((content, reasoning, *_),) = whole(server, messages=chat, continue_final_message=True, max_tokens=8)
    assert (bool(content), reasoning) == (True, "")
    ((echoed, *_),) = whole(server, messages=chat, continue_final_message=True, max_tokens=8, echo=True)
    assert echoed == f"def add(a, b):{content}"
    answer = server.post("/v1/messages", {"messages": chat, "max_tokens": 8, "temperature": 0}).json()
    assert answer["content"] == [{"type": "text", "text": content}]
    thinking = [USER, {"role": "assistant", "content": "<think>def add(a, b):"}]
    answer = server.post("/v1/messages", {"messages": thinking, "max_tokens": 8, "temperature": 0}).json()
    assert {block["type"] for block in answer["content"]} == {"thinking"}


FORCED: dict[str, dict[str, Any]] = {
    "a reference": {"$ref": "#/$defs/A", "$defs": {"A": OBJECT}},
    "one of two": {"oneOf": [{"properties": {"x": {"const": 1}}, "required": ["x"], "additionalProperties": False}]},
    "values": {"enum": [{"a": 1}, {"b": 2}]},
    "a constant": {"const": {"a": [1, None]}},
    "no arguments": {"type": "object", "properties": {}, "additionalProperties": False},
    "its own address": {"$id": "https://example.org/f", **OBJECT, "properties": {"a": {"$ref": "f#/$defs/b"}}}
    | {"$defs": {"b": {"type": "boolean"}}},
    "an integer of 64 bits": {**OBJECT, "properties": {"a": {"type": "integer", "minimum": -(2**63), "maximum": 99}}},
    "a number of 32 bits": {**OBJECT, "properties": {"a": {"type": "number", "minimum": 0, "maximum": 3.4e38}}},
    "counts as floats": {**OBJECT, "properties": {"a": {"type": "string", "minLength": 1.0, "maxLength": 2.0}}},
    "several types": {**OBJECT, "properties": {"a": {"type": ["boolean", "null"]}}},
}


@pytest.mark.parametrize("name", FORCED)
def test_forced_calls_are_the_same_at_every_door_and_can_be_sent_back(server: ServerProcess, name: str) -> None:
    schema = FORCED[name]
    limits = {"temperature": 0, "max_tokens": 60}
    named = {"type": "function", "function": {"name": "f"}}
    found = whole(server, tools=[tool(schema)], tool_choice=named, **limits)
    assert found == streamed(server, tools=[tool(schema)], tool_choice=named, **limits)
    (content, _, calls, reason, _) = found[0]
    assert content == ""
    own_tool = {"name": "f", "input_schema": schema}
    asked = {"messages": [USER], "tools": [own_tool], "tool_choice": {"type": "tool", "name": "f"}, **limits}
    message = server.post("/v1/messages", asked).json()
    items: dict[str, Any] = {
        "input": [USER],
        "temperature": 0,
        "max_output_tokens": 60,
        "tools": [{"type": "function", "name": "f"}],
    }
    items["tools"][0]["parameters"] = schema
    items["tool_choice"] = {"type": "function", "name": "f"}
    response = server.post("/v1/responses", items).json()
    if reason != "length":
        arguments = json.loads(calls[0][1])
        assert isinstance(arguments, dict)
        assert [block["input"] for block in message["content"]] == [arguments]
        assert [json.loads(item["arguments"]) for item in response["output"]] == [arguments]
    turn = {"role": "assistant", "content": message["content"]}
    back = server.post("/v1/messages", {"messages": [USER, turn, USER], "max_tokens": 1})
    assert back.status_code == 200, back.text
    back = server.post("/v1/responses", {"input": [USER, *response["output"], USER], "max_output_tokens": 1})
    assert back.status_code == 200, back.text


def test_whole_calls_of_a_response_that_was_cut_are_completed(server: ServerProcess) -> None:
    asked = {"input": [USER], "temperature": 0, "tools": [{"type": "function", "name": "f", "parameters": OBJECT}]}
    seen: set[str] = set()
    for limit in range(8, 60):
        response = server.post("/v1/responses", {**asked, "tool_choice": "required", "max_output_tokens": limit}).json()
        for item in response["output"]:
            is_whole = item["arguments"].rstrip().endswith("}")
            assert item["status"] == ("completed" if is_whole else "incomplete")
            seen.add(f"{item['status']} in {response['status']}")
    assert "completed in incomplete" in seen


def test_a_form_that_is_too_long_says_how_long_and_what_to_do(server: ServerProcess) -> None:
    tools = [tool({**OBJECT, "properties": {"x" * 600: True, **OBJECT["properties"]}}, f"f{n}") for n in range(100)]
    refused = server.post("/v1/chat/completions", {"messages": [USER], "tools": tools, "tool_choice": "required"})
    assert refused.status_code == 400
    told = refused.json()["error"]["message"]
    assert "bytes in UTF-8; at most 65536 are allowed. Ask for less" in told
