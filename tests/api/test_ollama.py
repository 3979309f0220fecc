"""Ollama's API: the same answers as everywhere else, in its shapes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from server_process import ServerProcess
from twostroke import LLM, SamplingParams
from twostroke.api.generation import AnswerHead
from twostroke.api.ollama import Lines, chat_from_ollama
from twostroke.api.protocol.fields import FieldTreatment, WireObject, field_treatments
from twostroke.api.protocol.ollama import (
    OllamaChatRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaOptions,
)
from twostroke.api.reply import Block, BlockKind
from twostroke.version import __version__

Body = dict[str, Any]
USER: list[Any] = [{"role": "user", "content": "sort a list of numbers"}]
GREEDY: Body = {"temperature": 0, "num_predict": 24}
COLOUR = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}


def ask(server: ServerProcess, path: str, body: Mapping[str, Any], status: int = 200) -> Any:
    response = server.post(path, {"model": "embedded", **body})
    assert response.status_code == status, response.text
    if body.get("stream") is not False and response.headers["content-type"] == "application/x-ndjson":
        return [json.loads(line) for line in response.text.splitlines()]
    return response.json()


def test_a_chat_has_the_text_of_the_model(server: ServerProcess, llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=24)
    expected = llm.chat(USER, params)[0]
    answer = ask(server, "/api/chat", {"messages": USER, "stream": False, "options": GREEDY})
    assert answer["message"] == {"role": "assistant", "content": expected.outputs[0].text}
    assert (answer["model"], answer["done"], answer["done_reason"]) == ("embedded", True, "length")
    assert (answer["prompt_eval_count"], answer["eval_count"]) == (len(expected.prompt_token_ids), 24)
    assert answer["total_duration"] >= answer["prompt_eval_duration"] + answer["eval_duration"] > 0


def test_a_chat_is_streamed_unless_it_says_otherwise(server: ServerProcess) -> None:
    whole = ask(server, "/api/chat", {"messages": USER, "stream": False, "options": GREEDY})
    *pieces, last = ask(server, "/api/chat", {"messages": USER, "options": GREEDY})
    assert len(pieces) > 1
    assert "".join(piece["message"]["content"] for piece in pieces) == whole["message"]["content"]
    assert not any(piece["done"] for piece in pieces)
    assert last["message"] == {"role": "assistant", "content": ""}
    assert last.keys() == whole.keys()
    assert (last["done_reason"], last["eval_count"]) == ("length", 24)


@pytest.mark.parametrize("streams", [True, False])
def test_a_raw_prompt_is_continued(server: ServerProcess, llm: LLM, streams: bool) -> None:
    expected = llm.generate("def add(a, b):", SamplingParams(temperature=0, max_tokens=24))[0].outputs[0].text
    body = {"prompt": "def add(a, b):", "raw": True, "stream": streams, "options": GREEDY}
    answer = ask(server, "/api/generate", body)
    pieces = answer if streams else [answer]
    assert "".join(piece["response"] for piece in pieces) == expected
    assert pieces[-1]["eval_count"] == 24


def test_a_prompt_is_a_chat_of_one_turn(server: ServerProcess, llm: LLM) -> None:
    messages = [{"role": "system", "content": "be short"}, {"role": "user", "content": "add two numbers"}]
    expected = llm.chat(messages, SamplingParams(temperature=0, max_tokens=24))[0].outputs[0].text
    body = {"prompt": "add two numbers", "system": "be short", "stream": False, "options": GREEDY}
    assert ask(server, "/api/generate", body)["response"] == expected


def test_without_a_prompt_the_model_is_loaded(server: ServerProcess) -> None:
    for path, said in (("/api/generate", "response"), ("/api/chat", "message")):
        answer = ask(server, path, {"keep_alive": "5m"})
        assert (answer["done"], answer["done_reason"]) == (True, "load")
        assert said in answer


def test_a_format_is_kept(server: ServerProcess) -> None:
    for path, body in (
        ("/api/chat", {"messages": USER}),
        ("/api/generate", {"prompt": "a colour"}),
        ("/api/generate", {"prompt": "a colour", "raw": True}),
    ):
        answer = ask(server, path, {**body, "format": COLOUR, "stream": False, "options": {"temperature": 0}})
        text = answer["message"]["content"] if path == "/api/chat" else answer["response"]
        assert json.loads(text)["colour"] in ("red", "blue")


def test_reasoning_has_a_field_of_its_own(reasoning_server: ServerProcess) -> None:
    whole = ask(reasoning_server, "/api/chat", {"messages": USER, "stream": False, "options": {"temperature": 0}})
    assert whole["message"]["thinking"]
    assert whole["message"]["content"] == ""
    pieces = ask(reasoning_server, "/api/chat", {"messages": USER, "options": {"temperature": 0}})
    assert "".join(piece["message"].get("thinking", "") for piece in pieces) == whole["message"]["thinking"]


@pytest.mark.parametrize("raw", [True, False])
def test_the_server_limits_answers_that_set_no_limit(reasoning_server: ServerProcess, raw: bool) -> None:
    answer = ask(reasoning_server, "/api/generate", {"prompt": "def f(", "raw": raw, "stream": False})
    assert answer["eval_count"] <= 12


def test_calls_and_results_of_earlier_turns_reach_the_template() -> None:
    request = OllamaChatRequest.model_validate(
        {
            "model": "m",
            "messages": [
                {"role": "user", "content": "weather?"},
                {
                    "role": "assistant",
                    "thinking": "Hm.",
                    "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Oslo"}}}],
                },
                {"role": "tool", "content": "cold", "tool_name": "weather"},
            ],
            "tools": [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}],
            "think": "high",
            "options": {"repeat_penalty": 1.1, "num_predict": -1, "stop": ["x"]},
        }
    )
    chat = chat_from_ollama(request, 4096)
    _, called, result = chat.messages
    assert called["reasoning_content"] == "Hm."
    assert called["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
    assert (result["role"], result["name"], result["content"]) == ("tool", "weather", "cold")
    assert chat.tools is not None
    assert chat.tools[0].function.name == "weather"
    assert (chat.reasoning_effort, chat.repetition_penalty, chat.max_tokens, chat.stop) == ("high", 1.1, None, ["x"])
    assert chat.stream is True


def test_a_call_is_one_piece_with_its_arguments_as_an_object() -> None:
    lines = Lines(AnswerHead("ollama-1", "m", 0), is_chat=True)
    calls = [
        Block(0, BlockKind.CALL, "ollama-1-0", "weather", ['{"city": ', '"Oslo"}']),
        Block(1, BlockKind.CALL, "ollama-1-1", "now", ["[1]"]),
    ]
    assert lines.piece(calls=calls)["message"]["tool_calls"] == [
        {"id": "ollama-1-0", "function": {"index": 0, "name": "weather", "arguments": {"city": "Oslo"}}},
        {"id": "ollama-1-1", "function": {"index": 1, "name": "now", "arguments": {"arguments": "[1]"}}},
    ]


def test_embeddings_are_those_of_openai_s_api(server: ServerProcess) -> None:
    texts = ["def add(a, b):", "import os"]
    expected = server.post("/v1/embeddings", {"model": "embedded", "input": texts}).json()
    answer = ask(server, "/api/embed", {"input": texts, "stream": False})
    assert answer["embeddings"] == [entry["embedding"] for entry in expected["data"]]
    assert answer["prompt_eval_count"] == expected["usage"]["prompt_tokens"]
    one = ask(server, "/api/embeddings", {"prompt": texts[0], "stream": False})
    assert one == {"embedding": answer["embeddings"][0]}
    short = ask(server, "/api/embed", {"input": texts[0], "dimensions": 8, "stream": False})
    assert len(short["embeddings"][0]) == 8


def test_a_long_text_is_cut_before_it_is_embedded_unless_it_may_not_be(server: ServerProcess) -> None:
    long = "count the words of a text " * 4000
    assert len(ask(server, "/api/embed", {"input": long, "stream": False})["embeddings"]) == 1
    told = ask(server, "/api/embed", {"input": long, "truncate": False, "stream": False}, status=400)
    assert "max_model_len" in told["error"]


def test_the_served_model_is_listed_and_described(server: ServerProcess) -> None:
    (listed,) = httpx.get(server.url + "/api/tags").json()["models"]
    assert (listed["name"], listed["details"]["family"]) == ("embedded", "llama")
    assert listed["size"] > 0
    (running,) = httpx.get(server.url + "/api/ps").json()["models"]
    assert running["context_length"] == 4096
    shown = ask(server, "/api/show", {"stream": False})
    assert shown["model_info"]["llama.context_length"] == 4096
    assert set(shown["capabilities"]) == {"completion", "embedding"}
    assert httpx.get(server.url + "/api/version").json() == {"version": __version__}


def test_a_tag_that_clients_add_is_left_out(server: ServerProcess) -> None:
    assert ask(server, "/api/show", {"model": "embedded:latest", "stream": False})["details"]
    told = ask(server, "/api/chat", {"model": "llama3", "messages": USER}, status=404)
    assert told == {"error": "the model 'llama3' does not exist; this server has 'embedded'."}


ACTING: Mapping[str, tuple[Body, Body]] = {
    "temperature": ({"temperature": 2, "seed": 1}, {"temperature": 0, "seed": 1}),
    "seed": ({"temperature": 1, "seed": 1}, {"temperature": 1, "seed": 2}),
    "top_p": ({"temperature": 2, "seed": 1, "top_p": 0.01}, {"temperature": 2, "seed": 1}),
    "top_k": ({"temperature": 2, "seed": 1, "top_k": 1}, {"temperature": 2, "seed": 1}),
    "min_p": ({"temperature": 2, "seed": 1, "min_p": 1}, {"temperature": 2, "seed": 1}),
    "num_predict": ({"num_predict": 3}, {"num_predict": 9}),
    "stop": ({"stop": "\n"}, {}),
    "presence_penalty": ({"presence_penalty": 2}, {}),
    "frequency_penalty": ({"frequency_penalty": 2}, {}),
    "repeat_penalty": ({"repeat_penalty": 100}, {}),
}
REFUSED: Mapping[str, Any] = {
    "repeat_last_n": 64,
    "typical_p": 0.5,
    "tfs_z": 0.5,
    "mirostat": 2,
    "penalize_newline": False,
    "vocab_only": True,
    "num_ctx": 10**6,
}


def names(kind: type[WireObject], standing: FieldTreatment) -> set[str]:
    return {name for name, found, _ in field_treatments(kind) if found is standing}


def test_the_tables_have_every_option() -> None:
    assert ACTING.keys() == names(OllamaOptions, FieldTreatment.ACTS) - {"num_ctx"}
    assert REFUSED.keys() == names(OllamaOptions, FieldTreatment.REFUSED) | {"num_ctx"}


@pytest.mark.parametrize("name", ACTING)
def test_an_option_acts(server: ServerProcess, name: str) -> None:
    texts = [
        ask(server, "/api/chat", {"messages": USER, "stream": False, "options": GREEDY | options})["message"]["content"]
        for options in ACTING[name]
    ]
    assert texts[0] != texts[1]


@pytest.mark.parametrize("name", REFUSED)
def test_an_option_is_refused_by_name(server: ServerProcess, name: str) -> None:
    told = ask(server, "/api/chat", {"messages": USER, "options": {name: REFUSED[name]}}, status=400)
    assert f"options.{name}={json.dumps(REFUSED[name])}" in told["error"]


@pytest.mark.parametrize(
    ("kind", "path", "body", "name", "value"),
    [
        (OllamaChatRequest, "/api/chat", {"messages": USER}, "logprobs", True),
        (OllamaChatRequest, "/api/chat", {"messages": USER}, "top_logprobs", 2),
        (OllamaGenerateRequest, "/api/generate", {"prompt": "a"}, "logprobs", True),
        (OllamaGenerateRequest, "/api/generate", {"prompt": "a"}, "top_logprobs", 2),
        (OllamaGenerateRequest, "/api/generate", {"prompt": "a"}, "suffix", "b"),
        (OllamaGenerateRequest, "/api/generate", {"prompt": "a"}, "template", "{{ .Prompt }}"),
        (OllamaGenerateRequest, "/api/generate", {"prompt": "a"}, "context", [1]),
        (OllamaGenerateRequest, "/api/generate", {"prompt": "a"}, "images", ["x"]),
    ],
)
def test_a_field_is_refused_by_name(
    server: ServerProcess, kind: type[WireObject], path: str, body: Body, name: str, value: Any
) -> None:
    assert name in names(kind, FieldTreatment.REFUSED)
    assert name in ask(server, path, body | {name: value}, status=400)["error"]


def test_what_is_wrong_is_told_in_ollama_s_shape(server: ServerProcess) -> None:
    for body in (
        {"messages": 3},
        {"messages": USER, "think": "some"},
        {"messages": [{"role": "user", "images": ["x"]}]},
    ):
        assert ask(server, "/api/chat", body, status=400).keys() == {"error"}
    assert ask(server, "/api/embed", {"input": []}, status=400).keys() == {"error"}
    assert not names(OllamaEmbedRequest, FieldTreatment.REFUSED)


def test_an_unknown_field_is_named(server: ServerProcess) -> None:
    response = server.post("/api/chat", {"model": "embedded", "messages": USER, "options": {"zz": 1, **GREEDY}})
    assert response.headers["x-ignored-params"] == "options.zz"
