"""Messages mean what clients say, whatever a template does with them."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest

from twostroke.errors import InvalidPrompt
from twostroke.tokenizer.chat_template import ChatTemplate
from twostroke.tokenizer.messages import checked_messages
from twostroke.tokenizer.template_wire import packed

KNOWS_TEXTS = "{% for message in messages %}{{ message.content }}{% endfor %}"
KNOWS_PARTS = "{% for part in messages[0].content %}{{ part.text or '<|' + part.type + '|>' }}{% endfor %}"

CALLS = """{%- for message in messages -%}
<|{{ message.role }}|>{{ message.content + '' }}
{%- for call in message.tool_calls or [] -%}
<call>{"name": "{{ call.function.name }}", "arguments": WRITTEN}</call>
{%- endfor -%}
<|end|>
{%- endfor -%}
{%- if add_generation_prompt %}<|assistant|>{% endif -%}
"""


def with_calls(written: str) -> str:
    return CALLS.replace("WRITTEN", written)


WRITES_JSON = {
    "tojson": with_calls("{{ call.function.arguments | tojson }}"),
    "tests for a text": with_calls(
        "{% if call.function.arguments is string %}{{ call.function.arguments }}"
        "{% else %}{{ call.function.arguments | tojson }}{% endif %}"
    ),
    "tests a variable": with_calls(
        "{% set given = call.function['arguments'] %}{{ given if given is string else given | tojson }}"
    ),
    "tests for an object": with_calls(
        "{% if call.function.arguments is mapping %}{{ call.function.arguments | tojson }}"
        "{% else %}{{ call.function.arguments }}{% endif %}"
    ),
    "prints": with_calls("{{ call.function.arguments }}"),
    "joins with a plus": with_calls("{{ '' + call.function.arguments + '' }}"),
    "joins with a tilde": with_calls("{{ '' ~ call.function.arguments ~ '' }}"),
    "the whole function": CALLS.replace(
        '{"name": "{{ call.function.name }}", "arguments": WRITTEN}', "{{ call.function | tojson }}"
    ),
    "the list of calls": CALLS.replace(
        '{"name": "{{ call.function.name }}", "arguments": WRITTEN}',
        "{{ (message.tool_calls | map(attribute='function') | list | tojson)[1:-1] }}",
    ),
}
READS_FIELDS = with_calls("{% for key, value in call.function.arguments | items %}{{ key }}={{ value }};{% endfor %}")

WRITTEN_BY_MODELS = {
    "compact": '{"a":1,"b":[1,2]}',
    "spaced": '{ "a" : 1,\n  "b": [ 1, 2 ] }',
    "escaped": '{"a": "\\u00fc\\/", "b": "ü"}',
    "numbers": '{"a": 1.0, "b": 1e3, "c": -0}',
    "twice the same key": '{"a": 1, "a": 2}',
    "no field": "{}",
    "cut off": '{"a": 1, "b": [1',
    "a list": "[1, 2]",
    "deep": '{"a": ' * 40 + "1" + "}" * 40,
}


def called(arguments: Any, **fields: Any) -> list[dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [{"role": "user", "content": "go"}, {"role": "assistant", "tool_calls": [call], **fields}]


def rendered(source: str, messages: Any, **switches: Any) -> str:
    return ChatTemplate({"default": source}, {}).render(messages, **switches)


@pytest.mark.parametrize("source", WRITES_JSON)
@pytest.mark.parametrize("written", WRITTEN_BY_MODELS)
def test_a_call_that_is_sent_back_has_the_models_own_bytes(source: str, written: str) -> None:
    """The next turn's prompt then begins with this prompt and answer, and the cache finds both."""
    text = WRITTEN_BY_MODELS[written]
    prompt = rendered(WRITES_JSON[source], [{"role": "user", "content": "go"}])
    answer = f'<call>{{"name": "f", "arguments": {text}}}</call><|end|>'
    back = [*called(text, content=None), {"role": "tool", "tool_call_id": "1", "content": "done"}]
    assert rendered(WRITES_JSON[source], back).startswith(prompt + answer)


@pytest.mark.parametrize("arguments", ['{"path": "a", "n": 2}', {"path": "a", "n": 2}], ids=["text", "object"])
def test_templates_read_the_fields_of_arguments(arguments: Any) -> None:
    assert "path=a;n=2;" in rendered(READS_FIELDS, called(arguments))


@pytest.mark.parametrize("arguments", ["", " ", None, {}, "{}"], ids=repr)
@pytest.mark.parametrize("source", WRITES_JSON)
def test_no_arguments_are_an_empty_object(source: str, arguments: Any) -> None:
    assert '"arguments": {}}</call>' in rendered(WRITES_JSON[source], called(arguments))


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("m.content.nothing.more", "a string has no field 'nothing'"),
        ("m.tool_calls[0].function.arguments.a.b.c", "a number has no field 'b'"),
        ("m.tool_calls[0].function.arguments.one.two", "an object has no field 'one'"),
        ("m.tool_calls[7].function", "a list has no field 7"),
        ("nobody.knows", "'nobody' is undefined"),
    ],
)
def test_what_a_template_misses_is_told_in_plain_words(asked: str, told: str) -> None:
    with pytest.raises(InvalidPrompt, match=told) as refused:
        rendered("{% for m in messages if m.tool_calls %}{{ " + asked + " }}{% endfor %}", called('{"a": 1}'))
    assert "twostroke" not in str(refused.value)
    assert "dict" not in str(refused.value)


def test_arguments_that_are_left_out_are_an_empty_object() -> None:
    messages = called("")
    del messages[1]["tool_calls"][0]["function"]["arguments"]
    assert '"arguments": {}}</call>' in rendered(WRITES_JSON["tojson"], messages)


def test_a_template_that_asks_for_a_form_of_json_gets_it() -> None:
    source = with_calls("{{ call.function.arguments | tojson(separators=(',', ':')) }}")
    assert '"arguments": {"a":1}}' in rendered(source, called('{ "a": 1 }'))


@pytest.mark.parametrize("fields", [{"content": None}, {}, {"content": ""}, {"content": []}], ids=repr)
def test_a_turn_that_only_calls_has_an_empty_text(fields: dict[str, Any]) -> None:
    assert "<|assistant|><call>" in rendered(WRITES_JSON["tojson"], called("{}", **fields))


def test_an_empty_list_of_calls_is_none() -> None:
    source = "{% for m in messages %}{{ 'calls' if 'tool_calls' in m else m.content }}{% endfor %}"
    assert rendered(source, [{"role": "assistant", "content": "text", "tool_calls": []}]) == "text"


def test_a_tool_may_return_nothing() -> None:
    messages = [*called("{}"), {"role": "tool", "tool_call_id": "1", "content": None}]
    assert rendered(WRITES_JSON["tojson"], messages).endswith("<|tool|><|end|><|assistant|>")


def test_a_call_may_be_its_function() -> None:
    """Templates of many models take this form, beside OpenAI's."""
    source = "{% for call in messages[0].tool_calls %}{{ call.name }} {{ call.arguments | tojson }}{% endfor %}"
    messages = [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": '{"a":1}'}]}]
    assert rendered(source, messages) == 'f {"a":1}'


ROLES = "{% for m in messages %}{% if m.role in KNOWN %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"


def test_developer_is_system_where_the_template_does_not_know_it() -> None:
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hi"}]
    known = ROLES.replace("KNOWN", "['system', 'user']")
    assert rendered(known, messages) == "<system>be brief<user>hi"
    assert rendered(ROLES.replace("KNOWN", "['developer', 'user']"), messages) == "<developer>be brief<user>hi"
    assert rendered(KNOWS_TEXTS.replace("{{ m", "{{ message.role ~ m"), messages) == "systembe briefuserhi"


@pytest.mark.parametrize("role", ["System", "USER", "Assistant"])
@pytest.mark.parametrize("known", ["['system', 'user', 'assistant']", "[message.role]"])
def test_a_role_in_capitals_is_refused_whatever_the_template_knows(role: str, known: str) -> None:
    with pytest.raises(InvalidPrompt, match=rf"messages\[0\] has the role '{role}'; .* lower case: '{role.lower()}'"):
        rendered(ROLES.replace("KNOWN", known), [{"role": role, "content": "see this"}])


@pytest.mark.parametrize("role", ["critic", "function", "tool", "ipython", "system "])
def test_a_role_that_the_template_leaves_out_is_refused(role: str) -> None:
    source = ROLES.replace("KNOWN", "['system', 'user', 'assistant']")
    messages = [{"role": "user", "content": "hi"}, {"role": role, "content": "see this"}]
    for _ in range(2):  # what was found out is remembered
        with pytest.raises(InvalidPrompt, match=rf"messages\[1\] has the role '{role}', which .* leaves out"):
            rendered(source, messages)


def test_a_message_that_is_left_out_for_its_place_is_refused() -> None:
    first_only = (
        "{% for m in messages %}{% if m.role != 'system' or loop.first %}{{ m.content }}{% endif %}{% endfor %}"
    )
    system, user = {"role": "system", "content": "rule "}, {"role": "user", "content": "hi "}
    assert rendered(first_only, [system, user]) == "rule hi "
    with pytest.raises(InvalidPrompt, match=r"messages\[2\] has the role 'system'"):
        rendered(first_only, [system, user, system, user])


def test_what_is_left_out_may_depend_on_a_variable_of_the_template() -> None:
    source = "{% for m in messages %}{% if m.role == 'user' or shows %}{{ m.content }}{% endif %}{% endfor %}"
    messages = [{"role": "user", "content": "a"}, {"role": "critic", "content": "b"}]
    template = ChatTemplate({"default": source}, {})
    for _ in range(2):  # what was found out is remembered
        assert template.render(messages, template_kwargs={"shows": True}) == "ab"
        with pytest.raises(InvalidPrompt, match=r"messages\[1\] has the role 'critic'"):
            template.render(messages, template_kwargs={"shows": False})


def test_a_message_without_text_is_not_missed() -> None:
    source = ROLES.replace("KNOWN", "['user']")
    assert rendered(source, [{"role": "system", "content": ""}, {"role": "user", "content": "hi"}]) == "<user>hi"


def test_a_template_that_refuses_a_role_speaks_for_itself() -> None:
    source = "{% for m in messages %}{% if m.role == 'x' %}{{ raise_exception('no x here') }}{% endif %}{% endfor %}"
    with pytest.raises(InvalidPrompt, match="no x here"):
        rendered(source, [{"role": "x", "content": "a"}])


def test_templates_may_change_what_they_write() -> None:
    source = "{% for m in messages %}{{ m.content | upper | trim }}{% endfor %}"
    assert rendered(source, [{"role": "system", "content": " a "}, {"role": "user", "content": "b"}]) == "AB"


@pytest.mark.parametrize("source", [KNOWS_TEXTS, KNOWS_PARTS], ids=["texts", "parts"])
@pytest.mark.parametrize("kind", ["image_url", "input_image", "input_audio", "video_url", "file", "document"])
def test_media_are_refused_by_name(source: str, kind: str) -> None:
    parts = [{"type": "text", "text": "what is this?"}, {"type": kind, "text": "a text beside it"}]
    with pytest.raises(InvalidPrompt, match=rf"messages\[0\]\.content\[1\] is of type '{kind}'"):
        rendered(source, [{"role": "user", "content": parts}])


@pytest.mark.parametrize("source", [KNOWS_TEXTS, KNOWS_PARTS], ids=["texts", "parts"])
def test_text_parts_of_every_api_pass(source: str) -> None:
    parts = [
        {"type": "text", "text": "a "},
        {"type": "input_text", "text": "b "},
        {"type": "output_text", "text": "c "},
        {"type": "refusal", "refusal": "d "},
        "e ",
        {"text": "f"},
    ]
    assert rendered(source, [{"role": "assistant", "content": parts}]).split() == ["a", "b", "c", "d", "e", "f"]


@pytest.mark.parametrize("content", [{"content": None}, {"content": ""}, {"content": []}, {}], ids=repr)
def test_a_refusal_is_what_was_said(content: dict[str, Any]) -> None:
    assert rendered(KNOWS_TEXTS, [{"role": "assistant", "refusal": "I will not.", **content}]) == "I will not."


def test_a_refusal_beside_a_text_changes_nothing() -> None:
    assert rendered(KNOWS_TEXTS, [{"role": "assistant", "content": "Yes.", "refusal": ""}]) == "Yes."


def test_a_turn_that_ends_with_calls_is_not_continued() -> None:
    """Calls stand behind the text, and would be cut off."""
    for content in ("Well.", None, ""):
        with pytest.raises(InvalidPrompt, match="cannot be continued: it ends with tool calls"):
            rendered(
                WRITES_JSON["tojson"],
                called("{}", content=content),
                continue_final_message=True,
                add_generation_prompt=False,
            )


@pytest.mark.parametrize("call", [{"function": None, "name": "f", "arguments": None}, {"id": None, "name": "f"}])
def test_null_in_a_call_is_not_given(call: dict[str, Any]) -> None:
    source = "{% for call in messages[0].tool_calls %}{{ call.name }} {{ call.arguments | tojson }}{% endfor %}"
    assert rendered(source, [{"role": "assistant", "tool_calls": [call]}]) == "f {}"


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (
            {"role": "user", "content": {"text": "hi"}},
            r"\.content must be a string or a list of text parts, not an object",
        ),
        ({"role": "user", "content": 5}, r"\.content must be a string or a list of text parts, not a number"),
        ({"role": "user", "content": True}, r"\.content must be a string or a list of text parts, not a boolean"),
        ({"role": "user"}, "of role 'user', has no content"),
        ({"role": "system", "content": None}, "of role 'system', has no content"),
        ({"role": "user", "content": [5]}, r"\.content\[0\] must be an object"),
        ({"role": "user", "content": [["a"]]}, r"\.content\[0\] must be an object"),
        ({"role": "user", "content": [{"type": "text"}]}, r"\.content\[0\], of type 'text', has no text"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, r"\.content\[0\], of type 'text', has no text"),
        (
            {"role": "user", "content": [{"type": "custom", "value": 5}]},
            r"\.content\[0\], of type 'custom', has no text",
        ),
        ({"role": "user", "content": "a", "name": {"first": "b"}}, r"\.name must be a string, not an object"),
        ({"role": "tool", "content": "a", "tool_call_id": ["b"]}, r"\.tool_call_id must be a string, not a list"),
        ({"role": "assistant", "content": "a", "reasoning_content": {"text": "b"}}, r"\.reasoning_content must be a"),
        ({"role": "assistant", "content": "a", "thinking": ["b"]}, r"\.thinking must be a string, not a list"),
        ({"role": "assistant", "content": "a", "reasoning": True}, r"\.reasoning must be a string, not a boolean"),
        ({"role": "assistant", "refusal": {"why": "b"}}, r"\.refusal must be a string, not an object"),
        (
            {"role": "assistant", "tool_calls": [{"id": {"n": 1}, "function": {"name": "f"}}]},
            r"\.tool_calls\[0\]\.id must be a string, not an object",
        ),
        ({"role": "assistant", "tool_calls": "f()"}, r"\.tool_calls must be a list of calls, not a string"),
        ({"role": "assistant", "tool_calls": ["f()"]}, r"\.tool_calls\[0\] must be an object"),
        ({"role": "assistant", "tool_calls": [{}]}, r"\.tool_calls\[0\] has no name"),
        ({"role": "assistant", "tool_calls": [{"function": "f"}]}, r"\.tool_calls\[0\]\.function must be an object"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, r"\.tool_calls\[0\]\.function has no name"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]},
            r"function\.arguments must be a JSON object or the text of one, not a list",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]},
            r"function\.arguments must be a JSON object or the text of one, not a number",
        ),
        (
            {
                "role": "assistant",
                "tool_calls": [{"function": {"name": "f", "arguments": '{"a":' * 99 + "1" + "}" * 99}}],
            },
            "nested more than 64 levels",
        ),
    ],
    ids=lambda given: json.dumps(given)[:60] if isinstance(given, dict) else "",
)
def test_what_is_no_message_is_refused_by_its_place(message: dict[str, Any], error: str) -> None:
    for source in (KNOWS_TEXTS, KNOWS_PARTS):
        with pytest.raises(InvalidPrompt, match=r"^messages\[0\].*" + error):
            rendered(source, [message])


def test_messages_of_the_caller_are_not_changed() -> None:
    messages = [
        {"role": "developer", "content": [{"type": "input_text", "text": "a"}]},
        *called('{"a":1}', content=None, thinking="hm"),
    ]
    before = json.dumps(messages)
    checked_messages(messages)
    assert json.dumps(messages) == before


@pytest.mark.parametrize("text", ['{"a":[' + ",".join(["[]"] * 200_000) + "]}", "[" * 200_000, '{"a":' * 100_000])
def test_the_text_of_arguments_is_read_where_templates_run_and_not_here(text: str) -> None:
    tracemalloc.start()
    try:
        checked = checked_messages(called(text))
        content = packed({"messages": checked})
        made = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert made < 6 * len(text), "copies of the text, and not of what it holds"
    (call,) = next(message for message in checked if "tool_calls" in message)["tool_calls"]
    assert (dict(call["function"]["arguments"]), str(call["function"]["arguments"])) == ({}, text)
    source = "{% for m in messages if m.tool_calls %}{{ m.tool_calls[0].function.arguments.a | length }}{% endfor %}"
    assert rendered(source, called(text)) == ("200000" if text.endswith("]}") else "0")
    assert len(content) < 2 * len(text)


def test_arguments_that_come_as_an_object_are_the_same_where_templates_run() -> None:
    given = {"a": [1.5, -0.0, True, None, {"ü": "\ud83d"}], "b": {}, "c": 2**80}
    source = (
        "{% for m in messages if m.tool_calls %}{{ m.tool_calls[0].function.arguments.items() | list }}{% endfor %}"
    )
    assert rendered(source, called(given)) == str(list(given.items()))
