"""The Responses API with OpenAI's own client against a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from server_process import ServerProcess
from twostroke import LLM, SamplingParams
from twostroke.api.conversation import chat_params
from twostroke.api.protocol.responses import ResponsesRequest
from twostroke.api.responses import chat_from_response

TEXT = "sort a list of numbers"
USER: list[Any] = [{"role": "user", "content": TEXT}]
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
NOW: dict[str, Any] = {"type": "function", "name": "now", "parameters": NOTHING, "strict": True}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[Any]:
    """Client without types, since the tests check the returned items."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def create(client: Any, given: Any = TEXT, **fields: Any) -> Any:
    return client.responses.create(
        **{"model": "embedded", "input": given, "temperature": 0, "max_output_tokens": 24} | fields
    )


def chat_text(llm: LLM, messages: list[dict[str, Any]], **params: Any) -> str:
    given: dict[str, Any] = {"temperature": 0, "max_tokens": 24} | params
    return llm.chat(messages, SamplingParams(**given))[0].outputs[0].text


def test_text_is_that_of_the_chat(client: Any, llm: LLM) -> None:
    answer = create(client)
    assert answer.output_text == chat_text(llm, USER)
    (item,) = answer.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "incomplete")
    assert (answer.object, answer.status, answer.incomplete_details.reason) == (
        "response",
        "incomplete",
        "max_output_tokens",
    )
    assert answer.usage.output_tokens == 24
    assert answer.usage.total_tokens == answer.usage.input_tokens + 24


def test_usage_tells_what_was_cached(client: Any) -> None:
    long = "count the items of a list " * 40
    first, second = create(client, long).usage, create(client, long).usage
    assert first.input_tokens == second.input_tokens
    assert first.input_tokens_details.cached_tokens == 0
    assert second.input_tokens_details.cached_tokens > 100


def streamed(client: Any, **fields: Any) -> list[Any]:
    given = fields.pop("input", TEXT)
    events = list(create(client, given, stream=True, **fields))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events


def test_stream_adds_up_to_the_answer(client: Any) -> None:
    whole = create(client)
    events = streamed(client)
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    without_deltas = [kind for kind in kinds if kind != "output_text.delta"]
    assert without_deltas == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "incomplete",
    ]
    assert "".join(deltas) == whole.output_text == events[-1].response.output_text
    assert events[-4].text == whole.output_text
    assert events[-1].response.usage == whole.usage.model_copy(
        update={"input_tokens_details": events[-1].response.usage.input_tokens_details}
    )
    assert events[-2].item.status == "incomplete"
    assert events[0].response.output == []


def test_the_clients_own_stream_helper(client: Any) -> None:
    with client.responses.stream(model="embedded", input=TEXT, temperature=0, max_output_tokens=24) as stream:
        events = list(stream)
    assert events[-1].type == "response.incomplete"
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(texts) == create(client).output_text


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}], ids=["required", "named"])
def test_a_required_function_is_called(client: Any, choice: Any) -> None:
    tools = [WEATHER] if choice == "required" else [NOW, WEATHER]
    fields: Any = {
        "tools": tools,
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_output_tokens": 200,
    }
    answer = create(client, **fields)
    (call,) = answer.output
    assert (call.type, call.name, call.status, answer.status) == ("function_call", "weather", "completed", "completed")
    arguments = json.loads(call.arguments)
    assert arguments["city"] in ("Rome", "Oslo")
    events = streamed(client, **fields)
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert "".join(deltas) == done.arguments == call.arguments == events[-1].response.output[0].arguments
    assert events[-1].type == "response.completed"


def test_parallel_calls_can_be_forbidden(client: Any) -> None:
    fields: Any = {"tools": [NOW], "tool_choice": "required", "temperature": 1.5, "max_output_tokens": 100}

    def num_calls(seed: int, parallel: bool) -> int:
        return len(create(client, parallel_tool_calls=parallel, extra_body={"seed": seed}, **fields).output)

    with ThreadPoolExecutor(12) as pool:
        counts = {parallel: list(pool.map(num_calls, range(12), [parallel] * 12)) for parallel in (True, False)}
    assert max(counts[True]) > 1
    assert set(counts[False]) == {1}


def test_the_next_turn_computes_only_what_is_new(client: Any) -> None:
    asked: list[dict[str, str]] = [{"role": "user", "content": "name the items of this list, one by one: " * 30}]
    first = create(client, asked)
    asked += [{"role": "assistant", "content": first.output_text}, {"role": "user", "content": "and then?"}]
    second = create(client, asked)
    cached = second.usage.input_tokens_details.cached_tokens
    assert cached % 16 == 0, "whole blocks"
    assert cached > first.usage.input_tokens - 16, "every full block of the first turn's prompt is found"
    assert second.usage.input_tokens - cached < first.usage.output_tokens + 48


def test_a_conversation_goes_on_by_its_items(client: Any, llm: LLM) -> None:
    first = create(client)
    items = [*USER, *[item.model_dump() for item in first.output], {"role": "user", "content": "again"}]
    chat = [*USER, {"role": "assistant", "content": first.output_text}, {"role": "user", "content": "again"}]
    assert create(client, items).output_text == chat_text(llm, chat)


def chat_messages(items: list[Any]) -> list[dict[str, Any]]:
    return chat_from_response(ResponsesRequest.model_validate({"input": items})).messages


def test_what_the_assistant_said_is_one_turn() -> None:
    reasoning = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    text = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]}
    call = {"type": "function_call", "call_id": "c1", "name": "now", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "noon"}]}
    called = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    assert chat_messages([*USER, reasoning, text, call, {**call, "call_id": "c2"}, result, text, reasoning]) == [
        {"role": "user", "content": TEXT},
        {
            "role": "assistant",
            "reasoning_content": "Hm.",
            "content": "I look.",
            "tool_calls": [called, {**called, "id": "c2"}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
        {"role": "assistant", "content": "I look."},
        {"role": "assistant", "reasoning_content": "Hm.", "content": ""},
    ]
    assert chat_messages([call, text]) == [
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "assistant", "content": "I look."},
    ]
    developer = {"role": "developer", "content": "be brief"}
    assert chat_messages([developer]) == [developer]  # what it is to the model is for its template, as in chats


def test_reasoning_is_an_item(reasoning_server: ServerProcess) -> None:
    client = openai.OpenAI(base_url=f"{reasoning_server.url}/v1", api_key="none")
    answer = create(client)
    (item,) = answer.output
    assert (item.type, item.summary, answer.output_text) == ("reasoning", [], "")
    assert answer.usage.output_tokens_details.reasoning_tokens == 24
    events = streamed(client)
    deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    (done,) = [event for event in events if event.type == "response.reasoning_text.done"]
    assert "".join(deltas) == done.text == item.content[0].text != ""


def test_instructions_stand_before_the_input(client: Any, llm: LLM) -> None:
    chat = [{"role": "system", "content": "write Python"}, *USER]
    answer = create(client, instructions="write Python")
    assert answer.output_text == chat_text(llm, chat) != chat_text(llm, USER)
    assert answer.instructions == "write Python"


def test_json_of_a_schema(client: Any) -> None:
    form = {"type": "json_schema", "name": "verdict", "schema": {"enum": ["yes", "no"]}, "strict": True}
    answer = create(client, text={"format": form})
    assert answer.output_text in ('"yes"', '"no"')
    assert answer.status == "completed"
    assert answer.text.format.type == "json_schema"


def test_any_json_object(client: Any) -> None:
    assert create(client, text={"format": {"type": "json_object"}}).output_text.lstrip().startswith("{")


@pytest.mark.parametrize(
    ("field", "value"), [("temperature", 1.3), ("top_p", 0.3), ("top_k", 2), ("seed", 5), ("max_output_tokens", 7)]
)
def test_sampling_fields_act(server: ServerProcess, llm: LLM, field: str, value: Any) -> None:
    base: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_output_tokens": 24}
    body = server.post("/v1/responses", {"input": TEXT, **base, field: value}).json()
    ours = {name.replace("max_output", "max"): given for name, given in (base | {field: value}).items()}
    assert body["output"][0]["content"][0]["text"] == chat_text(llm, USER, **ours)
    assert chat_text(llm, USER, **ours) != chat_text(llm, USER, temperature=1.0, seed=3)


def test_effort_and_template_variables_reach_the_chat() -> None:
    given = {"input": TEXT, "reasoning": {"effort": "low"}, "chat_template_kwargs": {"a": 1}, "priority": 2}
    chat = chat_from_response(ResponsesRequest.model_validate(given))
    assert (chat.reasoning_effort, chat.chat_template_kwargs, chat.priority) == ("low", {"a": 1}, 2)


def test_the_end_of_text_can_be_ignored() -> None:
    """Load generators request this of every API."""
    chat = chat_from_response(ResponsesRequest.model_validate({"input": TEXT, "ignore_eos": True}))
    assert chat_params(chat, None).ignore_eos


def refused(server: ServerProcess, **fields: Any) -> str:
    answer = server.post("/v1/responses", {"input": TEXT, "max_output_tokens": 4, **fields})
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("previous_response_id", "resp_1"),
        ("conversation", "conv_1"),
        ("prompt", {"id": "p"}),
        ("background", True),
        ("background_options", {}),
        ("truncation", "auto"),
        ("context_management", [{"type": "compaction"}]),
        ("top_logprobs", 3),
        ("moderation", {"model": "m"}),
        ("image", {}),
        ("access_programs", {}),
        ("include", ["message.output_text.logprobs"]),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(server: ServerProcess, field: str, value: Any) -> None:
    assert field in refused(server, **{field: value})


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"reasoning": {"context": "all_turns"}}, "reasoning.context"),
        ({"tools": [{**NOW, "defer_loading": True}], "tool_choice": "required"}, "tools.defer_loading"),
        ({"tools": [{**NOW, "allowed_callers": ["programmatic"]}], "tool_choice": "required"}, "tools.allowed_callers"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "input.encrypted_content"),
        ({"tools": [NOW]}, "--tool-call-parser"),
    ],
    ids=str,
)
def test_refusals_reach_into_objects(server: ServerProcess, fields: dict[str, Any], named: str) -> None:
    assert named in refused(server, **fields)


@pytest.mark.parametrize("kind", ["input_image", "input_file", "input_audio"])
def test_parts_that_are_no_text_are_refused_by_name(server: ServerProcess, kind: str) -> None:
    assert kind in refused(server, input=[{"role": "user", "content": [{"type": kind}]}])


@pytest.mark.parametrize("kind", ["item_reference", "web_search_call", "computer_call"])
def test_items_of_other_tools_are_refused_by_name(server: ServerProcess, kind: str) -> None:
    assert kind in refused(server, input=[{"type": kind, "id": "x"}])


def test_bookkeeping_changes_nothing(server: ServerProcess) -> None:
    plain = {"input": TEXT, "max_output_tokens": 8, "temperature": 0}
    noted = {
        "metadata": {"a": "b"},
        "store": True,
        "user": "u",
        "safety_identifier": "s",
        "service_tier": "auto",
        "max_tool_calls": 3,
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "prompt_cache_options": {"mode": "implicit"},
        "include": ["reasoning.encrypted_content"],
        "stream_options": {"include_obfuscation": False},
        "reasoning": {"summary": "auto", "generate_summary": "auto"},
        "background": False,
        "truncation": "disabled",
    }
    expected, found = server.post("/v1/responses", plain), server.post("/v1/responses", plain | noted)
    texts = [answer.json()["output"][0]["content"] for answer in (expected, found)]
    assert texts[0] == texts[1]
    assert found.json()["metadata"] == {"a": "b"}
    assert found.json()["store"] is False
    assert "x-ignored-params" not in found.headers


def test_unknown_fields_are_named(server: ServerProcess) -> None:
    answer = server.post("/v1/responses", {"input": [{**USER[0], "mood": 1}], "max_output_tokens": 2, "wish": 1})
    assert answer.headers["x-ignored-params"] == "input.mood, wish"


def test_unknown_model(client: Any) -> None:
    with pytest.raises(openai.NotFoundError, match="other"):
        create(client, model="other")


def test_salt_reaches_the_engine(server: ServerProcess) -> None:
    long = "name the days of a week " * 40
    cached = [
        server.post("/v1/responses", {"input": long, "max_output_tokens": 1, "cache_salt": salt}).json()["usage"][
            "input_tokens_details"
        ]["cached_tokens"]
        for salt in ("a", "a", "b")
    ]
    assert [num > 0 for num in cached] == [False, True, False]
