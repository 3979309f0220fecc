"""Tools and calls that a chat template never writes are found out, surely."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from twostroke.tokenizer.chat_template import CALL_TEXTS, CALLS, TOOLS, ChatTemplate

PLAIN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
FULL = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}"
    "{% endfor %}"
)
ALTERNATING = (
    "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('no ' + m.role) }}"
    "{% endif %}{{ m.content }}{% endfor %}"
)
BEHIND_A_SYSTEM_MESSAGE = (
    "{% for m in messages %}{{ m.content }}{% if m.role == 'system' %}{{ tools | tojson }}{% endif %}{% endfor %}"
)
ASKS_FOR_RESULTS = (
    "{% for m in messages %}{% if m.tool_calls and (loop.last or messages[loop.index0 + 1].role != 'tool') %}"
    "{{ raise_exception('a result is missing') }}{% endif %}{{ m.content }}{{ m.tool_calls or '' }}{% endfor %}"
)
TEMPLATES = {
    "writes neither": (PLAIN, [TOOLS, CALLS]),
    "writes both": (FULL, []),
    "refuses other roles": (ALTERNATING, [TOOLS, CALLS]),
    "writes tools behind a system message": (BEHIND_A_SYSTEM_MESSAGE, [CALLS]),
    "refuses calls without results": (ASKS_FOR_RESULTS, [TOOLS]),
    "writes whole messages": ("{{ messages | tojson }}", [TOOLS]),
    "writes calls where there are tools": (FULL.replace("m.tool_calls or []", "m.tool_calls if tools else []"), []),
    "only says that there are tools": ("{{ 'TOOLS ' if tools }}" + PLAIN, [TOOLS, CALLS]),
    "refuses everything": ("{{ raise_exception('no') }}", []),
    "has no end": ("{{ ((((9**64)**64)**64)**64) % 7 }}", []),
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "user", "content": "and?"},
]


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_is_never_written_is_found(name: str) -> None:
    source, expected = TEMPLATES[name]
    template = ChatTemplate({"default": source}, {})
    for _ in range(2):
        assert template.unwritten(MESSAGES, has_tools=True) == expected
    assert template.unwritten(MESSAGES[:1], has_tools=False) == []


def test_tools_have_a_template_of_their_own() -> None:
    template = ChatTemplate({"default": PLAIN, "tool_use": FULL}, {})
    assert template.unwritten(MESSAGES, has_tools=True) == []
    assert template.unwritten(MESSAGES, has_tools=False) == [CALLS]
    assert ChatTemplate({"other": PLAIN}, {}).unwritten(MESSAGES, has_tools=True) == []


def test_the_log_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    template = ChatTemplate({"default": PLAIN}, {})
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert template.render(MESSAGES, tools=[TOOL]) == "<|user|>hi<|assistant|><|user|>and?"
    told = [record.message for record in caplog.records if "does not write" in record.message]
    assert told == [
        f"this model's chat template does not write {name}: the model does not see them" for name in (TOOLS, CALLS)
    ]


def test_nothing_is_told_of_what_is_written(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        ChatTemplate({"default": FULL}, {}).render(MESSAGES, tools=[TOOL])
        ChatTemplate({"default": PLAIN}, {}).render(MESSAGES[:1])
    assert not caplog.records


LLAMA_3 = """{{- bos_token }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" + message.content + "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}"""
MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{% elif m.tool_calls is defined and m.tool_calls is not none %}[TOOL_CALLS] ["
    "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}]</s>"
    "{% elif m.role == 'assistant' %} {{ m.content }}</s>{% else %}[TOOL_RESULTS]{{ m.content }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(("source", "hides"), [(LLAMA_3, True), (MISTRAL, True), (FULL, False), (PLAIN, False)])
@pytest.mark.parametrize("content", ["Let me look.", [{"type": "text", "text": "Let me look."}], ["Let me", " look."]])
def test_text_beside_calls_that_is_never_written_is_told(source: str, hides: bool, content: Any) -> None:
    template = ChatTemplate({"default": source}, {"bos_token": "<s>"})
    asked = [MESSAGES[0], {**MESSAGES[1], "content": content}, MESSAGES[2]]
    assert (CALL_TEXTS in template.unwritten(asked, has_tools=False)) == hides
    assert ("Let me" not in template.render(asked)) == hides
    for nothing in ("", None, [], [{"type": "text", "text": ""}], [""]):
        assert CALL_TEXTS not in template.unwritten([{**MESSAGES[1], "content": nothing}], has_tools=False)
    assert CALL_TEXTS not in template.unwritten([MESSAGES[0]], has_tools=True)
