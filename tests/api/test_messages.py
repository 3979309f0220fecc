"""Anthropic's API with Anthropic's own client against a real server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import pytest

from server_process import ServerProcess
from twostroke import LLM, SamplingParams
from twostroke.api.messages import chat_from_messages
from twostroke.api.parsers.json_text import is_complete_value
from twostroke.api.protocol.messages import CountTokensRequest, MessagesRequest
from twostroke.tokenizer.chat_template import ChatTemplate

USER: list[Any] = [{"role": "user", "content": "sort a list of numbers"}]
WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"enum": [1, 2]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
NOW: dict[str, Any] = {
    "name": "now",
    "input_schema": {"type": "object", "properties": {}, "additionalProperties": False},
}


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[Any]:
    """Client without types, since the tests check the returned blocks."""
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def create(client: Any, **fields: Any) -> Any:
    extra = {name: fields.pop(name) for name in ("temperature", "top_p", "top_k", "seed") if name in fields}
    fields.setdefault("messages", USER)
    return client.messages.create(
        model="embedded", extra_body={"temperature": 0, **extra}, **({"max_tokens": 24} | fields)
    )


def chat_text(llm: LLM, messages: list[dict[str, Any]], **params: Any) -> str:
    given: dict[str, Any] = {"temperature": 0, "max_tokens": 24} | params
    return llm.chat(messages, SamplingParams(**given))[0].outputs[0].text


def test_text_is_that_of_the_chat(client: Any, llm: LLM) -> None:
    answer = create(client)
    assert [block.type for block in answer.content] == ["text"]
    assert answer.content[0].text == chat_text(llm, USER)
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "embedded")
    assert (answer.stop_reason, answer.stop_sequence) == ("max_tokens", None)
    assert answer.usage.output_tokens == 24
    count = client.messages.count_tokens(model="embedded", messages=USER)
    assert count.input_tokens == answer.usage.input_tokens + answer.usage.cache_read_input_tokens


def test_a_last_turn_of_the_assistant_is_continued(client: Any, llm: LLM) -> None:
    messages = [*USER, {"role": "assistant", "content": [{"type": "text", "text": "def sort_numbers("}]}]
    continued = {"continue_final_message": True, "add_generation_prompt": False}
    expected = llm.chat(messages, SamplingParams(temperature=0, max_tokens=24), **continued)[0]
    answer = create(client, messages=messages)
    assert answer.content[0].text == expected.outputs[0].text
    count = client.messages.count_tokens(model="embedded", messages=messages)
    assert count.input_tokens == len(expected.prompt_token_ids)


def test_a_conversation_beyond_the_context_is_counted(client: Any) -> None:
    long = [{"role": "user", "content": "count the words of a text " * 4000}]
    assert client.messages.count_tokens(model="embedded", messages=long).input_tokens > 8192


def test_usage_counts_the_cached_part_apart(client: Any) -> None:
    long = [{"role": "user", "content": "count the words of a text " * 40}]
    first, second = create(client, messages=long).usage, create(client, messages=long).usage
    assert first.cache_read_input_tokens == 0
    assert second.cache_read_input_tokens > 100
    assert first.input_tokens == second.input_tokens + second.cache_read_input_tokens


def test_stream_adds_up_to_the_answer(client: Any) -> None:
    whole = create(client)
    with client.messages.stream(
        model="embedded", max_tokens=24, messages=USER, extra_body={"temperature": 0}
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert final.content[0].text == whole.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"


def test_events_come_in_anthropics_order(server: ServerProcess) -> None:
    body = {"messages": USER, "max_tokens": 8, "temperature": 0, "stream": True}
    with server.http.stream("POST", "/v1/messages", json=body) as response:
        names = [line.removeprefix("event: ") for line in response.iter_lines() if line.startswith("event: ")]
    kept = [name for at, name in enumerate(names) if name != "content_block_delta" or names[at - 1] != name]
    assert kept == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


def test_async_client(server: ServerProcess, client: Any) -> None:
    async def run() -> Any:
        ours: Any = anthropic.AsyncAnthropic(base_url=server.url, api_key="none")
        async with ours:
            whole = await ours.messages.create(
                model="embedded", max_tokens=24, messages=USER, extra_body={"temperature": 0}
            )
            async with ours.messages.stream(
                model="embedded", max_tokens=24, messages=USER, extra_body={"temperature": 0}
            ) as stream:
                return whole, "".join([text async for text in stream.text_stream])

    whole, streamed = asyncio.run(run())
    assert whole.content[0].text == streamed == create(client).content[0].text


@pytest.mark.parametrize(
    "choice", [{"type": "any"}, {"type": "tool", "name": "weather"}], ids=lambda choice: choice["type"]
)
def test_a_required_tool_is_called(client: Any, choice: dict[str, Any]) -> None:
    tools = [WEATHER] if choice["type"] == "any" else [NOW, WEATHER]
    fields: Any = {"tools": tools, "tool_choice": {**choice, "disable_parallel_tool_use": True}, "max_tokens": 200}
    answer = create(client, **fields)
    (call,) = answer.content
    assert (call.type, call.name, answer.stop_reason) == ("tool_use", "weather", "tool_use")
    assert call.id.startswith("toolu_")
    assert call.input["city"] in ("Rome", "Oslo")
    assert call.input["days"] in (1, 2)
    with client.messages.stream(model="embedded", messages=USER, extra_body={"temperature": 0}, **fields) as stream:
        final = stream.get_final_message()
    assert (final.content[0].input, final.content[0].name, final.stop_reason) == (call.input, "weather", "tool_use")


def test_parallel_calls_can_be_forbidden(client: Any) -> None:
    fields: Any = {"tools": [NOW], "max_tokens": 100, "temperature": 1.5}

    def num_calls(seed: int, is_forbidden: bool) -> int:
        choice = {"type": "any", "disable_parallel_tool_use": is_forbidden}
        return len(create(client, tool_choice=choice, seed=seed, **fields).content)

    with ThreadPoolExecutor(12) as pool:
        several, one = (list(pool.map(num_calls, range(12), [is_forbidden] * 12)) for is_forbidden in (False, True))
    assert max(several) > 1
    assert set(one) == {1}


@pytest.mark.parametrize("max_tokens", range(1, 25, 3))
def test_half_a_call_is_no_call(server: ServerProcess, client: Any, max_tokens: int) -> None:
    """A client would run such a call. A stream ends with an error, after the text that was written."""
    fields: Any = {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "weather"}, "max_tokens": max_tokens}
    answer = create(client, **fields)
    body = {"messages": USER, "temperature": 0, "stream": True, **fields}
    events = [
        json.loads(line[6:]) for line in server.post("/v1/messages", body).text.splitlines() if line[:5] == "data:"
    ]
    written = "".join(
        event["delta"].get("partial_json", "") for event in events if "index" in event and "delta" in event
    )
    (end,) = [event["delta"] for event in events if event["type"] == "message_delta"]
    assert end["stop_reason"] == answer.stop_reason
    if is_complete_value(written):
        assert [block.input for block in answer.content] == [json.loads(written)]
    else:
        assert (answer.content, answer.stop_reason) == ([], "max_tokens")


def test_whole_calls_before_half_a_call_are_there(client: Any) -> None:
    choice = {"type": "any"}
    fields: Any = {"tools": [NOW], "tool_choice": choice, "temperature": 1.5, "max_tokens": 40}
    answers = [create(client, seed=seed, **fields) for seed in range(8)]
    cut = [answer for answer in answers if answer.stop_reason == "max_tokens" and answer.content]
    assert cut
    assert all(block.type == "tool_use" and block.input == {} for answer in answers for block in answer.content)


def test_tool_results_are_turns_of_their_own(client: Any, llm: LLM) -> None:
    call = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rome", "days": 1}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "sunny"}]}
    messages = [
        *USER,
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": ""}, call]},
        {"role": "user", "content": [result, {"type": "text", "text": "go on"}]},
    ]
    chat = [
        *USER,
        {"role": "assistant", "content": ""},
        {"role": "tool", "content": "sunny"},
        {"role": "user", "content": "go on"},
    ]
    assert create(client, messages=messages).content[0].text == chat_text(llm, chat)


def test_stop_sequences(client: Any) -> None:
    text = create(client).content[0].text
    stop = text.split()[3][:4]
    answer = create(client, stop_sequences=[stop])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    assert answer.content[0].text == text[: text.index(stop)]


@pytest.mark.parametrize("system", ["write Python", [{"type": "text", "text": "write Python"}]], ids=["text", "blocks"])
def test_system_stands_before_the_messages(client: Any, llm: LLM, system: Any) -> None:
    chat = [{"role": "system", "content": "write Python"}, *USER]
    assert create(client, system=system).content[0].text == chat_text(llm, chat)


def test_json_of_a_schema(client: Any) -> None:
    schema = {"enum": ["yes", "no"]}
    answer = create(client, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert answer.content[0].text in ('"yes"', '"no"')
    assert answer.stop_reason == "end_turn"


@pytest.mark.parametrize(
    ("field", "value", "parameter", "ours"),
    [
        ("temperature", 1.3, "temperature", 1.3),
        ("top_k", 2, "top_k", 2),
        ("top_p", 0.3, "top_p", 0.3),
        ("seed", 5, "seed", 5),
        ("max_tokens", 7, "max_tokens", 7),
    ],
)
def test_sampling_fields_act(client: Any, llm: LLM, field: str, value: Any, parameter: str, ours: Any) -> None:
    base: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 24}
    answer = create(client, **base | {field: value}).content[0].text
    assert answer == chat_text(llm, USER, **base | {parameter: ours})
    assert answer != chat_text(llm, USER, **base)


def refused(server: ServerProcess, path: str = "/v1/messages", **fields: Any) -> str:
    answer = server.post(path, {"messages": USER, "max_tokens": 4, **fields})
    assert answer.status_code == 400, answer.text
    body = answer.json()
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    return body["error"]["message"]


@pytest.mark.parametrize("kind", ["image", "document", "search_result", "server_tool_use"])
def test_blocks_that_are_no_text_are_refused_by_name(server: ServerProcess, kind: str) -> None:
    block = {"type": kind, "source": {"type": "url", "url": "http://example.com"}}
    assert f"'{kind}'" in refused(server, messages=[{"role": "user", "content": [block]}])
    inner = {"type": "tool_result", "tool_use_id": "1", "content": [block]}
    assert kind in refused(server, messages=[{"role": "user", "content": [inner]}])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("container", "c_1"),
        ("context_management", {"edits": []}),
        ("mcp_servers", [{"name": "x"}]),
        ("diagnostics", {"previous_message_id": "x"}),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(server: ServerProcess, field: str, value: Any) -> None:
    assert field in refused(server, **{field: value})
    assert field in refused(server, "/v1/messages/count_tokens", **{field: value})


@pytest.mark.parametrize("field", ["defer_loading", "input_examples", "allowed_callers"])
def test_refusals_reach_into_tools(server: ServerProcess, field: str) -> None:
    value: Any = True if field == "defer_loading" else [{}] if field == "input_examples" else ["x"]
    message = refused(server, tools=[{**NOW, field: value}], tool_choice={"type": "any"})
    assert f"tools.{field}" in message


def test_a_tool_by_its_name_needs_one(server: ServerProcess) -> None:
    assert "tool_choice.name" in refused(server, tools=[NOW], tool_choice={"type": "tool"})
    assert "tool_choice" in refused(server, tools=[NOW], tool_choice={"type": "tool", "name": "other"})
    assert "--tool-call-parser" in refused(server, tools=[NOW])


def test_bookkeeping_changes_nothing(server: ServerProcess) -> None:
    plain = {"messages": USER, "max_tokens": 8, "temperature": 0}
    noted = {
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "inference_geo": "eu",
        "speed": "fast",
        "cache_control": {"type": "ephemeral"},
        "system": [],
    }
    expected, found = server.post("/v1/messages", plain), server.post("/v1/messages", plain | noted)
    assert found.json()["content"] == expected.json()["content"]
    assert "x-ignored-params" not in found.headers


def test_unknown_fields_are_named(server: ServerProcess) -> None:
    block = {"type": "text", "text": "hello", "colour": "red"}
    body = {"messages": [{"role": "user", "content": [block]}], "max_tokens": 2, "wish": 1}
    answer = server.post("/v1/messages", body)
    assert answer.headers["x-ignored-params"] == "messages.content.colour, wish"


def test_errors_have_anthropics_shape(client: Any, server: ServerProcess) -> None:
    with pytest.raises(anthropic.NotFoundError) as found:
        client.messages.create(model="other", max_tokens=1, messages=USER)
    assert found.value.body == {
        "type": "error",
        "error": {
            "type": "not_found_error",
            "message": "the model 'other' does not exist; this server has 'embedded'.",
        },
    }
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(model="embedded", max_tokens=0, messages=USER)
    assert "error" in server.http.get("/v1/messages").json()
    assert server.http.get("/v1/messages").status_code == 405
    assert refused(server, max_tokens="many").startswith("the request is not valid: max_tokens='many'")


def test_priority_and_salt_reach_the_engine(server: ServerProcess) -> None:
    long = [{"role": "user", "content": "name the months of a year " * 40}]
    usages = [
        server.post("/v1/messages", {"messages": long, "max_tokens": 1, "cache_salt": salt}).json()["usage"]
        for salt in ("a", "a", "b")
    ]
    assert [usage["cache_read_input_tokens"] > 0 for usage in usages] == [False, True, False]


def test_reasoning_is_a_block_of_thinking(reasoning_server: ServerProcess) -> None:
    """The reasoning parser deepseek_r1 takes all for reasoning until a tag that this model never writes."""
    client: Any = anthropic.Anthropic(base_url=reasoning_server.url, api_key="none")
    answer = create(client)
    (block,) = answer.content
    assert (block.type, block.signature) == ("thinking", "")
    with client.messages.stream(
        model="embedded", max_tokens=24, messages=USER, extra_body={"temperature": 0}
    ) as stream:
        final = stream.get_final_message()
    assert final.content[0].thinking == block.thinking != ""
    omitted = create(client, thinking={"type": "adaptive", "display": "omitted"})
    assert omitted.content == []
    assert omitted.usage.output_tokens == answer.usage.output_tokens


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinks"),
        ({"thinking": {"type": "disabled"}}, "thinks not"),
        ({"thinking": {"type": "adaptive"}}, "undecided"),
        ({"output_config": {"effort": "high"}}, "undecided high"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "thinks"),
    ],
    ids=str,
)
def test_thinking_and_effort_reach_the_template(fields: dict[str, Any], shown: str) -> None:
    request = chat_from_messages(MessagesRequest.model_validate({"messages": USER, "max_tokens": 4, **fields}))
    template = ChatTemplate(
        {
            "default": "{{ 'undecided' if enable_thinking is not defined else 'thinks' if enable_thinking else "
            "'thinks not' }}{{ ' ' + reasoning_effort if reasoning_effort }}"
        },
        {},
    )
    variables = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort:
        variables["reasoning_effort"] = request.reasoning_effort
    assert template.render(request.messages, template_kwargs=variables) == shown


def test_history_of_calls_becomes_a_chat() -> None:
    blocks = [
        {"type": "thinking", "thinking": "Hm.", "signature": "s"},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "t1", "name": "now", "input": {"zone": "ä"}},
    ]
    messages = [{"role": "assistant", "content": blocks}]
    (turn,) = chat_from_messages(CountTokensRequest.model_validate({"messages": messages})).messages
    assert turn == {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "Hm.",
        "tool_calls": [
            {"id": "t1", "type": "function", "function": {"name": "now", "arguments": '{"zone": "ä"}'}},
        ],
    }


@pytest.mark.parametrize("role", ["user", "system"])
def test_blocks_belong_to_roles(server: ServerProcess, role: str) -> None:
    assert "'thinking'" in refused(
        server, messages=[{"role": role, "content": [{"type": "thinking", "thinking": "Hm."}]}]
    )
