"""Content reaches templates in a form that they write, whichever form a client sends."""

from __future__ import annotations

from typing import Any

import pytest

from twostroke.errors import InvalidPrompt
from twostroke.tokenizer.chat_template import CALLS, ChatTemplate
from twostroke.tokenizer.messages import text_of

WALKS = (
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}"
)
USERS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'user' %}" + WALKS + "{% else %}OTHERS{% endif %}{% endfor %}"
)
"""In the manner of templates that walk through the parts of a user's message."""
TEMPLATES = {
    "the first part only": USERS.replace(
        "OTHERS", "{% if m.content is string %}{{ m.content }}{% else %}{{ m.content[0].text }}{% endif %}"
    ),
    "as Python prints it": USERS.replace("OTHERS", "{{ m.content }}"),
    "as a text of Python's": USERS.replace("OTHERS", "{{ m.content | string }}"),
    "parts as Python prints them": USERS.replace(
        "OTHERS",
        "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p }}{% endfor %}{% endif %}",
    ),
    "joined with a plus": USERS.replace("OTHERS", "{{ m.content + '' }}"),
    "by a method of texts": USERS.replace("OTHERS", "{{ m.content.strip() }}"),
    "everywhere": "{% for m in messages %}<{{ m.role }}>" + WALKS + "{% endfor %}",
    "by a macro": "{% macro told(content) %}"
    + WALKS.replace("m.content", "content")
    + "{% endmacro %}{% for m in messages %}<{{ m.role }}>{{ told(m.content) }}{% endfor %}",
}
CALL = {"id": "call12345", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHATS: dict[str, list[dict[str, Any]]] = {
    "system": [{"role": "system"}, {"role": "user", "content": "hi"}],
    "developer": [{"role": "developer"}, {"role": "user", "content": "hi"}],
    "user": [{"role": "user"}],
    "assistant": [{"role": "user", "content": "hi"}, {"role": "assistant"}, {"role": "user", "content": "hi"}],
    "tool": [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call12345"},
    ],
}


def rendered(source: str, messages: Any, **switches: Any) -> str:
    return ChatTemplate({"default": source}, {}).render(messages, **switches)


def saying(role: str, content: Any) -> list[dict[str, Any]]:
    return [{**message, "content": content} if message["role"] == role else message for message in CHATS[role]]


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize("role", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_no_part_is_lost_or_written_as_an_object(name: str, role: str) -> None:
    text = rendered(TEMPLATES[name], saying(role, parts("one", "two")))
    assert "one" in text
    assert "two" in text
    assert "'" not in text
    assert rendered(TEMPLATES[name], saying(role, parts("one"))) == rendered(TEMPLATES[name], saying(role, "one"))


PARTS_ONLY = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content[0].type == 'image' %}!{% endif %}"
    "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize("role", CHATS)
def test_a_text_becomes_a_part_where_a_template_knows_parts_only(role: str) -> None:
    """Templates of models that read images are like this: they write nothing of a plain string."""
    assert "see this" in rendered(PARTS_ONLY, saying(role, "see this"))
    assert "see that" in rendered(PARTS_ONLY, saying(role, parts("see ", "that")))


def test_an_empty_text_and_a_continued_one_become_parts_as_well() -> None:
    system, user = {"role": "system", "content": ""}, {"role": "user", "content": "hi"}
    assert rendered(PARTS_ONLY, [system, user]) == "<system><user>hi"
    chat = [user, {"role": "assistant", "content": "Well,"}]
    assert rendered(PARTS_ONLY, chat, continue_final_message=True, add_generation_prompt=False).endswith("Well,")
    with pytest.raises(InvalidPrompt, match="leaves out"):
        rendered(PARTS_ONLY.replace("m.content %}", "m.content if m.role != 'system' %}"), [{**system, "content": "a"}])


CALLED_IF = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and CALLS %}"
    "{% for c in m.tool_calls %}({{ c.function.name }}){% endfor %}{% endif %}"
    "{% if m.content is not none %}{{ m.content + '' }}<end>{% endif %}{% endfor %}"
)
FINDS_CALLS_BY_NONE = CALLED_IF.replace("CALLS", "m.content is none")
WRITES_TEXT_UNLESS_NONE = CALLED_IF.replace("CALLS", "m.tool_calls")


@pytest.mark.parametrize("content", [{"content": None}, {"content": ""}, {"content": []}, {}], ids=repr)
@pytest.mark.parametrize("source", [FINDS_CALLS_BY_NONE, WRITES_TEXT_UNLESS_NONE], ids=["finds calls", "writes text"])
def test_a_turn_that_only_calls_has_no_content_where_a_template_tests_for_that(
    source: str, content: dict[str, Any]
) -> None:
    """An empty text would hide the calls, or open a turn that says nothing."""
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [CALL], **content}]
    assert rendered(source, chat) == "<user>hi<end><assistant>(f)"


@pytest.mark.parametrize(
    "test",
    [
        "m.content == none",
        "not (m.content != none)",
        "m['content'] is none",
        "(m.content | default(none)) is none",
        "{% set said = m.content %}said is none",
    ],
)
def test_the_test_may_be_written_in_several_ways(test: str) -> None:
    assignment, _, asked = test.rpartition("%}")
    source = "{% for m in messages %}SET{% if ASKED %}({{ m.tool_calls[0].function.name }}){% endif %}{% endfor %}"
    source = source.replace("SET", assignment and assignment + "%}").replace("ASKED", asked)
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [CALL]}]
    assert rendered(source, chat) == "(f)"


def test_calls_beside_a_text_that_are_not_written_are_told() -> None:
    template = ChatTemplate({"default": FINDS_CALLS_BY_NONE}, {})
    turn = {"role": "assistant", "tool_calls": [CALL]}
    assert template.unwritten([turn], has_tools=False) == []
    assert template.unwritten([{**turn, "content": "Well."}], has_tools=False) == [CALLS]
    other = ChatTemplate({"default": WRITES_TEXT_UNLESS_NONE}, {})
    assert other.unwritten([turn, {**turn, "content": "Well."}], has_tools=False) == []


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"role": "user", "content": "a"}, "a"),
        ({"role": "assistant", "content": ["a", {"type": "output_text", "text": "b"}]}, "a\nb"),
        ({"role": "assistant", "content": None}, ""),
        ({"role": "assistant", "refusal": "No."}, "No."),
    ],
)
def test_the_text_of_a_message(message: dict[str, Any], text: str) -> None:
    assert text_of(message) == text
