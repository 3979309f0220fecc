"""A conversation in the form of three APIs gives the same prompt, whatever the template reads."""

from __future__ import annotations

import json
from typing import Any

import pytest

from twostroke.api.messages import chat_from_messages
from twostroke.api.protocol.chat import ChatRequest
from twostroke.api.protocol.fields import WireObject, as_sent
from twostroke.api.protocol.messages import CountTokensRequest, MessagesRequest
from twostroke.api.protocol.responses import ResponsesRequest
from twostroke.api.protocol.shapes import CHECKED_BYTES
from twostroke.api.responses import chat_from_response
from twostroke.api.routing import read_body
from twostroke.errors import InvalidParameter
from twostroke.tokenizer.chat_template import ChatTemplate

CALLS = "{% for c in m.tool_calls or [] %}({{ c.function.name }} {{ c.function.arguments | tojson }}){% endfor %}"
TEMPLATES = {
    "texts": "{% for m in messages %}<{{ m.role }}>{{ m.content + '' }}" + CALLS + "{% endfor %}",
    "parts": (
        "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %}" + CALLS + "{% endfor %}"
    ),
    "developers": (
        "{% for m in messages %}{% if m.role == 'developer' %}<dev>{% else %}<{{ m.role }}>{% endif %}"
        "{{ m.content }}" + CALLS + "{% endfor %}"
    ),
}
ARGUMENTS = '{"b": [1, {"ü": null}], "a": "x"}'
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
    {"role": "user", "content": [{"type": "text", "text": "three"}, {"type": "text", "text": "four"}]},
    {
        "role": "assistant",
        "content": [{"type": "text", "text": "five"}, {"type": "text", "text": "six"}],
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": ARGUMENTS}},
            {"id": "2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "7"}, {"type": "text", "text": "8"}]},
    {"role": "tool", "tool_call_id": "2", "content": None},
    {"role": "assistant", "content": "nine"},
    {"role": "user", "content": "ten"},
]


def texts(kind: str, *given: str) -> list[dict[str, str]]:
    return [{"type": kind, "text": text} for text in given]


ITEMS: list[dict[str, Any]] = [
    {"role": "system", "content": texts("input_text", "one", "two")},
    {"role": "user", "content": texts("input_text", "three", "four")},
    {"role": "assistant", "content": texts("output_text", "five", "six")},
    {"type": "function_call", "call_id": "1", "name": "f", "arguments": ARGUMENTS},
    {"type": "function_call", "call_id": "2", "name": "g", "arguments": ""},
    {"type": "function_call_output", "call_id": "1", "output": texts("input_text", "7", "8")},
    {"type": "function_call_output", "call_id": "2", "output": ""},
    {"role": "assistant", "content": texts("output_text", "nine")},
    {"role": "user", "content": "ten"},
]
TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": texts("text", "three", "four")},
    {
        "role": "assistant",
        "content": [
            *texts("text", "five", "six"),
            {"type": "tool_use", "id": "1", "name": "f", "input": json.loads(ARGUMENTS)},
            {"type": "tool_use", "id": "2", "name": "g", "input": {}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "1", "content": texts("text", "7", "8")},
            {"type": "tool_result", "tool_use_id": "2"},
        ],
    },
    {"role": "assistant", "content": texts("text", "nine")},
    {"role": "user", "content": "ten"},
]


def of_items(items: list[dict[str, Any]], **fields: Any) -> ChatRequest:
    return chat_from_response(ResponsesRequest.model_validate({"input": items, **fields}))


def of_turns(turns: list[dict[str, Any]], **fields: Any) -> ChatRequest:
    return chat_from_messages(CountTokensRequest.model_validate({"messages": turns, **fields}))


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_prompt_is_the_same(name: str) -> None:
    template = ChatTemplate({"default": TEMPLATES[name]}, {})
    expected = template.render(CHAT)
    assert ARGUMENTS in expected
    for chat in (of_items(ITEMS), of_turns(TURNS, system=texts("text", "one", "two"))):
        assert template.render(chat.messages) == expected


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_developer_is_the_same(name: str) -> None:
    template = ChatTemplate({"default": TEMPLATES[name]}, {})
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hi"}]
    expected = template.render(messages)
    assert ("<dev>" in expected) == (name == "developers")
    assert template.render(of_items(messages).messages) == expected


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_turn_that_is_continued_is_one_text_of_its_blocks(name: str) -> None:
    template = ChatTemplate({"default": TEMPLATES[name]}, {})
    user = {"role": "user", "content": "hi"}
    said = [*texts("text", "def ", "f("), {"type": "thinking", "thinking": "Hm."}, *texts("text", "x", "")]
    chat = of_turns([user, {"role": "assistant", "content": said}])
    assert chat.continue_final_message
    rendered = template.render(chat.messages, add_generation_prompt=False, continue_final_message=True)
    assert rendered == template.render([user, {"role": "assistant", "content": "def f(x"}])


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_part_may_be_a_plain_text_at_every_door(name: str) -> None:
    template = ChatTemplate({"default": TEMPLATES[name]}, {})
    said: list[Any] = ["a", "b"]
    call = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    chat = [
        *({"role": role, "content": said} for role in ("system", "user")),
        {"role": "assistant", "content": said, "tool_calls": [{"id": "1", "function": {"name": "f"}}]},
        {"role": "tool", "tool_call_id": "1", "content": said},
    ]
    turns = [
        {"role": "user", "content": said},
        {"role": "assistant", "content": [*said, call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": said}]},
    ]
    items = [
        *({"role": role, "content": said} for role in ("system", "user", "assistant")),
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": said},
    ]
    expected = template.render(chat)
    assert template.render(of_turns(turns, system=said).messages) == expected
    assert template.render(of_items(items).messages) == expected


@pytest.mark.parametrize("kind", [ChatRequest, MessagesRequest, ResponsesRequest])
def test_plain_texts_among_the_parts_of_a_large_body_are_taken(kind: type[WireObject]) -> None:
    messages = [{"role": "user", "content": ["a", "x" * CHECKED_BYTES]}]
    body = {"input": messages} if kind is ResponsesRequest else {"messages": messages, "max_tokens": 1}
    kind.model_validate(read_body(kind, json.dumps(body).encode()))


LENIENT: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"role": "user", "content": texts("text", "a", "b")}, {"role": "user", "content": texts("text", "a", "b")}),
    *(
        ({"type": "function_call", "call_id": "1", "name": "f", **given}, called)
        for given, called in (
            ({"arguments": {"a": 1}}, {"arguments": '{"a": 1}'}),
            ({"arguments": None}, {"arguments": "{}"}),
            ({"arguments": "null"}, {"arguments": "{}"}),
            ({}, {"arguments": "{}"}),
        )
    ),
    *(
        ({"type": "function_call_output", "call_id": "1", **given}, {"role": "tool", "content": content})
        for given, content in (
            ({"output": None}, ""),
            ({}, ""),
            ({"output": []}, ""),
            ({"output": texts("output_text", "a", "b")}, texts("text", "a", "b")),
            ({"output": [*texts("text", "a"), "b"]}, texts("text", "a", "b")),
        )
    ),
]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("size", [1, CHECKED_BYTES], ids=["small", "large"])
@pytest.mark.parametrize(("item", "said"), LENIENT, ids=lambda given: json.dumps(given)[:70])
def test_what_chats_take_responses_take(item: dict[str, Any], said: dict[str, Any], size: int, name: str) -> None:
    """A part of type text, arguments as an object or none, a tool that returns nothing."""
    if "arguments" in said:
        said = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", **said}}]}
    user = {"role": "user", "content": "x" * size}
    body = read_body(ResponsesRequest, json.dumps({"input": [user, item, user]}).encode())
    template = ChatTemplate({"default": TEMPLATES[name]}, {})
    found = template.render(chat_from_response(ResponsesRequest.model_validate(body)).messages)
    assert found == template.render([user, said, user])


@pytest.mark.parametrize(
    ("role", "block", "writer"),
    [
        ("user", {"type": "tool_use", "id": "1", "name": "f", "input": {}}, "assistant"),
        ("user", {"type": "thinking", "thinking": "Hm."}, "assistant"),
        ("assistant", {"type": "tool_result", "tool_use_id": "1"}, "user"),
        ("system", {"type": "redacted_thinking"}, "assistant"),
    ],
)
def test_a_block_of_another_role_is_refused_by_its_place(role: str, block: dict[str, Any], writer: str) -> None:
    told = rf"messages\.1\.content='{block['type']}': the role '{role}' cannot have .* Use '{writer}'\."
    with pytest.raises(InvalidParameter, match=told):
        of_turns([{"role": "user", "content": "hi"}, {"role": role, "content": [block]}])


WRITES_TOOLS = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
READS_PROPERTIES = (
    "{% for tool in tools %}{{ tool.function.name }}("
    "{% for name, kind in tool.function.parameters.properties.items() %}{{ name }}: {{ kind.type }};{% endfor %}"
    "){% endfor %}"
)
USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize("source", [WRITES_TOOLS, READS_PROPERTIES], ids=["writes tools", "reads properties"])
@pytest.mark.parametrize("fields", [{}, {"description": "d"}, {"description": None}, {"strict": True}], ids=str)
@pytest.mark.parametrize(
    "parameters", [{"properties": {"b": {"type": "string"}, "a": {"type": "null"}}}, None], ids=str
)
def test_a_tool_is_the_same(source: str, fields: dict[str, Any], parameters: dict[str, Any] | None) -> None:
    """Fields for clients only, such as `strict`, are not in the prompt; without parameters a tool has none."""
    template = ChatTemplate({"default": source}, {})

    def prompt(chat: ChatRequest) -> str:
        return template.render(chat.messages, tools=[as_sent(tool) for tool in chat.tools or ()])

    function = {"name": "f", **fields} | ({} if parameters is None else {"parameters": parameters})
    chat = ChatRequest.model_validate({"messages": [USER], "tools": [{"type": "function", "function": function}]})
    items = of_items([USER], tools=[{"type": "function", **function}])
    empty = {"type": "object", "properties": {}}
    turns = of_turns([USER], tools=[{"name": "f", **fields, "input_schema": parameters or empty}])
    offline = template.render([USER], tools=[{"type": "function", "function": {"parameters": None, **function}}])
    assert prompt(chat) == prompt(items) == prompt(turns)
    assert "strict" not in prompt(chat)
    if source is READS_PROPERTIES:
        assert prompt(chat) == offline == ("f()" if parameters is None else "f(b: string;a: null;)")
