"""Every field of a request acts, is refused, or is bookkeeping: each is tried, none can be added without a try."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from server_process import ServerProcess
from twostroke.api.protocol.chat import ChatRequest
from twostroke.api.protocol.fields import FieldTreatment, WireObject, field_treatments
from twostroke.api.protocol.sampling import CompletionRequest
from twostroke.api.reference import PAGE, fields_page

Body = dict[str, Any]

SEEDED: Body = {"max_tokens": 16, "temperature": 1.0, "seed": 11}
COMPLETION: Body = {"prompt": "def add(a, b):\n", **SEEDED}
CHAT: Body = {"messages": [{"role": "user", "content": "def add(a, b):"}], **SEEDED}
TOOLS: Body = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}},
}

# What makes a field act: a body with the field and one without it (or with its default) whose answers differ.
SHARED: Mapping[str, Body] = {
    "temperature": {"temperature": 0},
    "top_p": {"top_p": 0.01},
    "top_k": {"top_k": 1},
    "min_p": {"min_p": 1.0},
    "n": {"n": 2},
    "seed": {"seed": 12},
    "stop": {"stop": ["e", "a", "o", " "]},
    "presence_penalty": {"presence_penalty": 2.0, "temperature": 0, "max_tokens": 64},
    "frequency_penalty": {"frequency_penalty": 2.0, "temperature": 0, "max_tokens": 64},
    "repetition_penalty": {"repetition_penalty": 2.0, "temperature": 0, "max_tokens": 64},
    "logit_bias": {"logit_bias": {"300": 100}},
    "min_tokens": {"min_tokens": 8, "stop": ["\n", " "], "max_tokens": 12},
    "ignore_eos": {"ignore_eos": True, "logit_bias": {"0": 100}},
    "stop_token_ids": {"stop_token_ids": list(range(1, 4096))},
    "bad_words": {"bad_words": ["return", "self", '"""', "    ", "def", "#"], "temperature": 0},
    "allowed_token_ids": {"allowed_token_ids": [300, 301]},
    "include_stop_str_in_output": {"include_stop_str_in_output": True, "stop": ["e"], "max_tokens": 64},
    "skip_special_tokens": {"skip_special_tokens": False, "allowed_token_ids": [1, 2]},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "truncate_prompt_tokens": {"truncate_prompt_tokens": 2},
    "truncation_side": {"truncation_side": "right", "truncate_prompt_tokens": 2},
    "add_special_tokens": {},  # the embedded tokenizer frames nothing; test_special_tokens has a model that does
    "return_token_ids": {"return_token_ids": True},
    "return_tokens_as_token_ids": {"return_tokens_as_token_ids": True},
    "structured_outputs": {"structured_outputs": {"choice": ["x y z"]}},
    "request_id": {"request_id": "mine"},
    "service_tier": {"service_tier": "flex"},  # its effect is tested in test_service_tier.py
}
# What cannot be seen in one answer: the test that shows it.
ELSEWHERE: Mapping[str, str] = {
    "model": "test_names_of_the_model",
    "priority": "test_priority",
    "cache_salt": "test_completions.test_a_prefix_that_was_seen_is_counted_as_cached",
    "stream": "test_completions.test_a_stream_adds_up_to_the_answer",
    "stream_options": "test_completions.test_continuous_usage_counts_up",
    "add_special_tokens": "test_special_tokens",
    "prompt": "test_completions.test_prompts_of_every_kind",
    "best_of": "test_completions.test_best_of_takes_the_most_likely_per_token",
    "messages": "test_chat.test_a_chat_is_the_template_and_the_model",
    "include_reasoning": "test_chat.test_reasoning_is_told_from_the_answer",
    "chat_template_kwargs": "test_chat.test_variables_of_the_template",
    "reasoning_effort": "test_chat.test_variables_of_the_template",
    "documents": "test_chat.test_variables_of_the_template",
    "parallel_tool_calls": "test_chat.test_one_call_at_most",
    "top_logprobs": "test_chat.test_log_probabilities",
}
COMPLETION_ONLY: Mapping[str, Body] = {
    "max_tokens": {"max_tokens": 3},
    "echo": {"echo": True},
    "logprobs": {"logprobs": 2},
}
CHAT_ONLY: Mapping[str, Body] = {
    "max_tokens": {"max_tokens": 3},
    "max_completion_tokens": {"max_completion_tokens": 3},
    "logprobs": {"logprobs": True},
    "response_format": {"response_format": {"type": "json_object"}},
    "tools": {"tools": [TOOLS], "tool_choice": "required", "max_tokens": 64},
    "tool_choice": {"tools": [TOOLS], "tool_choice": {"type": "function", "function": {"name": "f"}}},
    "add_generation_prompt": {"add_generation_prompt": False},
    "continue_final_message": {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "def add"}],
        "continue_final_message": True,
    },
    "echo": {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "def add"}],
        "continue_final_message": True,
        "echo": True,
    },
}
# Fields beside the one in question that the comparison keeps.
CONTEXT: Mapping[str, tuple[str, ...]] = {
    "include_stop_str_in_output": ("stop", "max_tokens"),
    "truncation_side": ("truncate_prompt_tokens",),
    "min_tokens": ("stop", "max_tokens"),
    "ignore_eos": ("logit_bias",),
    "skip_special_tokens": ("allowed_token_ids",),
    "presence_penalty": ("temperature", "max_tokens"),
    "frequency_penalty": ("temperature", "max_tokens"),
    "repetition_penalty": ("temperature", "max_tokens"),
    "bad_words": ("temperature",),
    "return_tokens_as_token_ids": ("logprobs",),
    "continue_final_message": ("messages",),
    "echo": ("messages", "continue_final_message"),
    "tools": ("max_tokens",),
}
REFUSED: Mapping[str, Any] = {
    "suffix": "b",
    "chat_template": "{{ messages }}",
    "verbosity": "high",
    "audio": {"voice": "x"},
    "modalities": ["text", "audio"],
    "web_search_options": {},
    "moderation": {"on": True},
    "functions": [{"name": "f"}],
    "function_call": "auto",
    "best_of": 2,
    "use_beam_search": True,
    "length_penalty": 0.5,
    "guided_json": {"type": "string"},
    "guided_regex": "a+",
    "guided_choice": ["a"],
    "guided_grammar": 'root ::= "a"',
}
BOOKKEEPING: Mapping[str, Any] = {
    "user": "somebody",
    "metadata": {"a": "b"},
    "store": True,
    "safety_identifier": "x",
    "prompt_cache_key": "x",
    "prompt_cache_retention": "24h",
    "prompt_cache_options": {},
    "prediction": {"type": "content", "content": "x"},
}
ENDPOINTS: Mapping[str, tuple[type[WireObject], Body, Mapping[str, Body]]] = {
    "/v1/completions": (CompletionRequest, COMPLETION, COMPLETION_ONLY),
    "/v1/chat/completions": (ChatRequest, CHAT, CHAT_ONLY),
}


def cases(standing: FieldTreatment) -> list[tuple[str, str]]:
    return [
        (path, name)
        for path, (kind, _, _) in ENDPOINTS.items()
        for name, found, _ in field_treatments(kind)
        if found is standing
    ]


def answer_of(server: ServerProcess, path: str, body: Body) -> Body:
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    answer = response.json()
    answer["id"] = answer["id"] if "mine" in answer["id"] else ""
    answer["created"] = 0
    answer["usage"].pop("prompt_tokens_details")
    for choice in answer["choices"]:
        for call in choice.get("message", {}).get("tool_calls", []):
            call["id"] = ""
    return answer


@pytest.mark.parametrize(("path", "name"), cases(FieldTreatment.ACTS))
def test_it_acts(server: ServerProcess, path: str, name: str) -> None:
    _, body, own = ENDPOINTS[path]
    acting = own.get(name) or SHARED.get(name)
    if not acting:
        assert name in ELSEWHERE, f"{path} has {name}, and nothing shows that it acts"
        return
    if name == "return_tokens_as_token_ids":
        acting = acting | {"logprobs": True if "chat" in path else 1}
    kept = {key: acting[key] for key in CONTEXT.get(name, ()) if key in acting and key != name}
    assert answer_of(server, path, body | acting) != answer_of(server, path, body | kept)


@pytest.mark.parametrize(("path", "name"), cases(FieldTreatment.BOOKKEEPING))
def test_it_is_bookkeeping(server: ServerProcess, path: str, name: str) -> None:
    _, body, _ = ENDPOINTS[path]
    response = server.post(path, body | {name: BOOKKEEPING[name]})
    assert "x-ignored-params" not in response.headers
    assert answer_of(server, path, body | {name: BOOKKEEPING[name]}) == answer_of(server, path, body)


@pytest.mark.parametrize(("path", "name"), cases(FieldTreatment.REFUSED))
def test_it_is_refused_by_name(server: ServerProcess, path: str, name: str) -> None:
    _, body, _ = ENDPOINTS[path]
    response = server.post(path, body | {name: REFUSED[name]})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == name
    assert name in error["message"]
    assert server.post(path, body | {name: None}).status_code == 200


@pytest.mark.parametrize("path", ENDPOINTS)
def test_an_unknown_field_is_named(server: ServerProcess, path: str) -> None:
    _, body, _ = ENDPOINTS[path]
    response = server.post(path, body | {"best_off": 3, "stream_options": None, "zz": {}})
    assert response.status_code == 200
    assert response.headers["x-ignored-params"] == "best_off, zz"


def test_a_name_writes_no_line_of_the_log(server: ServerProcess) -> None:
    response = server.post("/v1/completions", COMPLETION | {"x\nERROR forged": 1})
    assert response.headers["x-ignored-params"] == "x?ERROR forged"
    server.wait_for("logged", "/health", lambda _: any("x?ERROR forged" in line for line in server.lines))
    assert not any(line.startswith("ERROR forged") for line in server.lines)


def test_a_request_of_unknown_fields_is_refused(server: ServerProcess) -> None:
    """A list of hundreds of thousands of names is useless, and making it would block the event loop."""
    response = server.post("/v1/completions", COMPLETION | {f"k{i}": 1 for i in range(64)})
    assert response.headers["x-ignored-params"].count(",") == 63
    response = server.post("/v1/completions", COMPLETION | {f"k{i}": 1 for i in range(65)})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "unknown_field"


def test_unknown_fields_within_objects_are_named(server: ServerProcess) -> None:
    body = COMPLETION | {"stream": True, "stream_options": {"include_usage": True, "chunky": 1}}
    response = server.post("/v1/completions", body)
    assert response.headers["x-ignored-params"] == "stream_options.chunky"


def test_unknown_fields_within_messages_are_named(server: ServerProcess) -> None:
    """Whatever the model's template does not read either; null asks for nothing."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}", "lazy": 1}, "cached": True}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "def add(a, b):", "shade": 1}], "mood": "calm"},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "audio": None},
        {"role": "user", "content": "go on", "mood": "calm"},
    ]
    response = server.post("/v1/chat/completions", CHAT | {"messages": messages})
    assert response.status_code == 200
    named = "messages.content.shade, messages.mood, messages.tool_calls.cached, messages.tool_calls.function.lazy"
    assert response.headers["x-ignored-params"] == named


def test_names_of_the_model(server: ServerProcess) -> None:
    assert server.post("/v1/completions", COMPLETION | {"model": "embedded"}).json()["model"] == "embedded"
    response = server.post("/v1/completions", COMPLETION | {"model": "gpt-4"})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


def test_priority(server: ServerProcess) -> None:
    """The priority reaches the scheduler, whose own tests check that it orders the queue."""
    assert server.post("/v1/completions", COMPLETION | {"priority": 3}).status_code == 200
    response = server.post("/v1/completions", COMPLETION | {"priority": 2**40})
    assert response.json()["error"]["param"] == "priority"


def test_the_published_table_is_this_one() -> None:
    assert PAGE.read_text(encoding="utf-8") == fields_page(), "run python -m twostroke.api.reference"


@pytest.mark.parametrize("path", ENDPOINTS)
def test_every_field_is_described(path: str) -> None:
    kind, _, _ = ENDPOINTS[path]
    missing = [name for name, _, description in field_treatments(kind) if not description and name not in ("model",)]
    assert not missing
