"""Siblings of the faults that real use found, as new users try them: a right answer, or a short, right sentence."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from benchmarks.hostile.sound_files import CHATML
from server_process import ServerProcess

USER = {"role": "user", "content": "hi"}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "ok"}
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Server that knows tools, reasoning and two model names; it must log no internal error."""
    path = tmp_path_factory.mktemp("template") / "template.jinja"
    path.write_text(CHATML)
    flags = ("--chat-template", str(path), "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")
    server = ServerProcess(*flags, "--served-model-name", "embedded", "B")
    yield server
    server.wait_until_idle()
    server.stop()
    assert not [line for line in server.lines if "internal error" in line or "Traceback" in line]


def refusal_of(answer: httpx.Response, status: int = 400) -> str:
    assert answer.status_code == status, answer.text
    message: str = answer.json()["error"]["message"]
    return message


def prompt_of(server: ServerProcess, messages: list[Any]) -> str:
    counted = server.post("/tokenize", {"messages": messages})
    assert counted.status_code == 200, counted.text
    text: str = server.post("/detokenize", {"tokens": counted.json()["tokens"]}).json()["prompt"]
    return text


def call(arguments: Any, **more: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}], **more}


WRITTEN: dict[str, tuple[dict[str, Any], str]] = {
    "spaces around": (call('  {"a": 1}  '), '{"a": 1}'),
    "null as a text": (call("null"), "{}"),
    "null": (call(None), "{}"),
    "JSON within JSON": (call('{"code": "{\\"x\\": 1}"}'), '{"code": "{\\"x\\": 1}"}'),
    "a key twice": (call('{"a":1,"a":2}'), '{"a":1,"a":2}'),
    "numbers of any size": (call('{"a": 12345678901234567890, "b": 1e400}'), '{"a": 12345678901234567890, "b": 1e400}'),
    "an answer that was cut": (call('{"a": "x'), '{"a": "x'),
    "no content in a list": (call("{}", content=[]), "{}"),
    "characters beyond ASCII": (call('{"ü": "日本"}'), '{"ü": "日本"}'),
    "OpenAI's older form": (
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}},
        '{"a": 1}',
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_calls_that_are_sent_back(server: ServerProcess, name: str) -> None:
    message, arguments = WRITTEN[name]
    prompt = prompt_of(server, [USER, message, RESULT])
    assert '<tool_call>\n{"name": "f", "arguments": ' + arguments in prompt
    assert "None" not in prompt


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a role in capitals": ({"role": "User", "content": "hi"}, "roles are in lower case: 'user'"),
    "a role of spaces": ({"role": "", "content": "hi"}, "has no role"),
    "a number": ({"role": "user", "content": 5}, "not a number"),
    "a switch": ({"role": "user", "content": True}, "not a boolean"),
    "nothing": ({"role": "user", "content": None}, "has no content"),
    "a part without text": ({"role": "user", "content": [{"type": "text", "text": None}]}, "has no text"),
    "a sound": ({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}, "text only"),
    "a call without a name": ({"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}, "has no name"),
    "an older call that is none": ({"role": "assistant", "function_call": "f"}, "an object with a name"),
    "arguments in a list": (call([1]), "a JSON object or the text of one"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_messages_that_are_none(server: ServerProcess, name: str, path: str) -> None:
    message, words = REFUSED[name]
    assert words in refusal_of(server.post(path, {"messages": [USER, message], "max_tokens": 1}))


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/responses", {"input": []}, "at least 1 item"),
        ("/v1/responses", {"input": [{"type": "item_reference", "id": "x"}]}, "'item_reference' is not known; known:"),
        ("/v1/responses", {"input": "x", "previous_response_id": "r"}, "nothing is stored"),
        ("/v1/responses", {"input": "x", "conversation": "c"}, "nothing is stored"),
        ("/v1/responses", {"input": "x", "tools": [{"type": "web_search"}]}, "tools.0.type='web_search'"),
        (
            "/v1/messages",
            {"messages": [USER, {"role": "user", "content": [{"type": "image"}]}]},
            "'image' is not known",
        ),
        ("/v1/messages", {"messages": []}, "at least 1 item"),
        ("/v1/messages", {"messages": [{"role": "robot", "content": "x"}]}, "role"),
        ("/v1/chat/completions", {"messages": []}, "at least 1 item"),
        ("/v1/chat/completions", {"messages": "hi"}, "messages"),
    ],
)
def test_what_other_doors_refuse(server: ServerProcess, path: str, body: dict[str, Any], words: str) -> None:
    told = refusal_of(server.post(path, {"max_tokens": 1, **body}))
    assert words in told
    assert "_kind" not in told


@pytest.mark.parametrize(
    ("stop", "words"),
    [
        ("", "none of them empty"),
        ([""], "none of them empty"),
        ([None], "stop.0=null"),
        (5, "stop=5"),
        ({"a": 1}, "stop"),
        ([["a"]], "stop"),
        (["a" * 40_000], "--max-parameter-items"),
        ([], ""),
        (["\0"], ""),
        (["</think>", "<tool_call>"], ""),
        (["a", "a"], ""),
        ([" "] * 64, ""),
    ],
)
def test_stop_strings_of_any_kind(server: ServerProcess, stop: Any, words: str) -> None:
    answer = server.post("/v1/chat/completions", {"messages": [USER], "max_tokens": 2, "stop": stop})
    if words:
        assert words in refusal_of(answer)
    else:
        assert answer.status_code == 200, answer.text


def tool(parameters: Any, name: str = "f") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


SCHEMAS: dict[str, Any] = {
    "none": None,
    "a type of several": {"type": ["object", "null"]},
    "a constant": {"const": {"a": 1}},
    "one of an enumeration": {"enum": [{"a": 1}, "b", 5]},
    "a reference": {"$ref": "#/$defs/x", "$defs": {"x": {"type": "object", "properties": {"a": {"type": "integer"}}}}},
    "one of two": {"oneOf": [{"type": "object"}, {"type": "string"}]},
    "all of several": {"allOf": [{"required": ["a"]}, {"properties": {"a": {"type": "boolean"}}}]},
    "an example": {"type": "object", "examples": [{"a": 1}], "$comment": "c", "deprecated": True},
    "a pattern of names": {"type": "object", "patternProperties": {"^a$": {"type": "null"}}},
    "nothing else": {"type": "object", "additionalProperties": False},
}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}], ids=["any", "named"])
@pytest.mark.parametrize("name", SCHEMAS)
def test_forced_calls_have_objects_and_show_no_grammar(server: ServerProcess, name: str, choice: Any) -> None:
    asked = {"messages": [USER], "max_tokens": 40, "tools": [tool(SCHEMAS[name])], "tool_choice": choice}
    answer = server.post("/v1/chat/completions", asked)
    assert answer.status_code == 200, answer.text
    (found,) = answer.json()["choices"]
    assert not found["message"]["content"]
    for made in found["message"].get("tool_calls", []):
        assert made["function"]["name"] == "f"
        if found["finish_reason"] != "length":
            assert isinstance(json.loads(made["function"]["arguments"]), dict)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"tools": [], "tool_choice": "required"}, "needs at least one of tools"),
        ({"tools": [tool({}), tool({})], "tool_choice": "required"}, "two tools have this name"),
        ({"tools": [tool({}, "")]}, "at least 1 character"),
        ({"tools": [tool(True)]}, "Input should be an object"),
        ({"tools": [tool({"type": "string"})], "tool_choice": "required"}, "they must be an object"),
        (
            {"tools": [tool({})], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "one of tools: f",
        ),
        ({"tools": [tool({})], "tool_choice": "f"}, "tool_choice"),
        ({"response_format": {"type": "json_schema"}}, "needs a schema"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": []}}}},
            "cannot be used",
        ),
    ],
)
def test_forms_that_cannot_be(server: ServerProcess, body: dict[str, Any], words: str) -> None:
    assert words in refusal_of(server.post("/v1/chat/completions", {"messages": [USER], "max_tokens": 1, **body}))


def sent(method: str, path: str, status: int, **more: Any) -> tuple[str, str, int, dict[str, Any]]:
    return method, path, status, more


CHAT = b'{"messages":[{"role":"user","content":"x"}],"max_tokens":1,'


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/completions", b'{"prompt":"x","logit_bias":{"' + b"9" * 5000 + b'":1}}', "must be keyed by token ids"),
        ("/v1/completions", b'{"prompt":"x","logit_bias":{"1.0":1}}', "must be keyed by token ids"),
        ("/v1/completions", b'{"prompt":"x","\\ud800":1}', "its field '\\ud800' has a lone surrogate"),
        ("/v1/completions", b'"prompt"', "must be a JSON object"),
        ("/v1/completions", b"{}", "not valid: prompt: Field required."),
        ("/v1/messages", b'{"max_tokens":1}', "not valid: messages: Field required."),
        ("/v1/chat/completions", CHAT + b'"tools":[{"type":"function"}]}', "tools.0.function: Field required."),
        ("/v1/chat/completions", CHAT + b'"logprobs":true,"top_logprobs":21}', "top_logprobs=21: at most max_logprobs"),
        ("/v1/completions", b'{"prompt":"x","logprobs":21}', "logprobs=21: at most max_logprobs"),
        ("/v1/chat/completions", CHAT + b'"zz":' + b"9" * 5000 + b"}", "a number has more than 4300 digits"),
        ("/v1/completions", '{"prompt":"x"}'.encode("utf-16"), "byte 0 is not UTF-8"),
        ("/v1/completions", b'{"prompt":"x","seed":1.0}', "seed=1.0: Input should be a valid integer."),
        ("/v1/completions", b'{"prompt":"x","stop":["\\udc00"]}', "half a character"),
        ("/v1/completions", b'{"prompt":"x","top_k":1e400}', "top_k=inf"),
        ("/detokenize", b'{"tokens":[true]}', "tokens.0=true"),
        ("/v1/responses", b'{"input":"x","top_logprobs":21}', "top_logprobs=21: is not supported"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_bodies_of_any_kind(server: ServerProcess, path: str, body: bytes, words: str) -> None:
    told = refusal_of(server.http.post(path, content=body, headers=JSON))
    assert words in told
    assert len(told) < 1000


BODY = b'{"prompt":"x","max_tokens":1}'
HTTP = [
    sent("DELETE", "/v1/models", 405),
    sent("TRACE", "/v1/models", 405),
    sent("PUT", "/v1/completions", 405, content=BODY, headers=JSON),
    sent("HEAD", "/metrics", 200),
    sent("HEAD", "/v1/models/embedded", 200),
    sent("OPTIONS", "/v1/chat/completions", 204),
    sent("GET", "/v1/model%73", 200),
    sent("GET", "/v1/models/B", 200),
    sent("GET", "/v1/models/b", 404),
    sent("GET", "/v1/models?limit=1", 200),
    sent("GET", "/v1/models", 200, headers={"range": "bytes=0-1", "accept": "text/xml"}),
    sent("POST", "/v1/completions", 415, content=BODY, headers=JSON | {"content-encoding": "br"}),
    sent("POST", "/v1/completions", 400, content='{"prompt":"x"}'.encode("utf-16"), headers=JSON),
    sent("POST", "/v1/completions", 400, content='{"prompt":"x"}'.encode("utf-32"), headers=JSON),
    sent("POST", "/v1/completions", 200, content=b"\xef\xbb\xbf" + BODY, headers=JSON),
    sent("POST", "/v1/completions", 400, content=b"", headers=JSON),
    sent("POST", "/v1/completions", 400, content=BODY + b" x", headers=JSON),
    sent("POST", "/v1/completions", 400, content=b'{"prompt":"x","temperature":NaN}', headers=JSON),
    sent("POST", "/v1/completions", 400, content=b"prompt=x", headers=JSON),
    sent("POST", "/v1/completions", 415, content=b"prompt=x", headers={"content-type": "multipart/form-data"}),
]


@pytest.mark.parametrize(("method", "path", "status", "more"), HTTP, ids=lambda value: str(value)[:40])
def test_http_of_any_kind(server: ServerProcess, method: str, path: str, status: int, more: dict[str, Any]) -> None:
    assert server.http.request(method, path, **more).status_code == status


def test_a_path_that_begins_with_two_slashes_names_no_host(server: ServerProcess) -> None:
    """A rule of a proxy for `//…` must not lead elsewhere."""
    with httpx.Client() as client:
        request = client.build_request("GET", f"{server.url}/v1/models")
        request.extensions["target"] = b"//x/v1/models"
        answer = client.send(request)
    assert answer.status_code == 404
    assert "//x/v1/models" in refusal_of(answer, 404)
