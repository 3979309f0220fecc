"""Puts the content of messages into the form that a chat template writes: a text, or a list of parts.

Templates that walk through parts seldom do so everywhere. They take the first part of a system message, or write the
list of a tool's result as Python prints it; and some of models that read images write no plain text. To find out, the
template renders small conversations whose texts are marks, once as texts and once as parts, and the marks are looked
for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from twostroke.errors import InvalidPrompt
from twostroke.tokenizer.messages import CallArguments, with_content_in_parts, with_joined_content
from twostroke.tokenizer.plain_json import JSON
from twostroke.tokenizer.template_process import TemplateStopped

_USER: JSON = {"role": "user", "content": "hi"}
_FUNCTION: JSON = {"name": "f", "arguments": CallArguments({}, "{}")}
_CALLS: list[JSON] = [{"id": "callmark0", "type": "function", "function": _FUNCTION}]
_CALLED: JSON = {"role": "assistant", "content": "hi", "tool_calls": _CALLS}
_AROUND: Mapping[str, tuple[list[JSON], list[JSON]]] = {
    "system": ([], [_USER]),
    "developer": ([], [_USER]),
    "user": ([], []),
    "assistant": ([_USER], [_USER]),
    "tool": ([_USER, _CALLED], []),
    "function": ([_USER, _CALLED], []),
}
"""What stands before and behind a message of each role."""
_MARKS = ("markone", "marktwo")


@dataclass(frozen=True, slots=True)
class _Written:
    """Which forms of a role's content a template writes."""

    text: bool
    parts: bool


class ContentForms:
    """The forms that one template writes, by role.

    Args:
        render: the template; it takes its variables, and raises InvalidPrompt where it refuses, and TemplateStopped
            where it takes too long.
        named_tokens: variables that every rendering has.
        reads_parts: whether it may walk through parts at all.
    """

    def __init__(self, render: Callable[[JSON], str], named_tokens: Mapping[str, str], *, reads_parts: bool) -> None:
        self._render = render
        self._named_tokens = named_tokens
        self._reads_parts = reads_parts
        self._known: dict[str, _Written] = {}

    def fitted(self, message: JSON) -> JSON:
        """Return a checked message in a form that the template writes; as it is where that cannot be found out."""
        content, role = message["content"], message["role"]
        if not self._reads_parts:
            return with_joined_content(message)
        if role not in _AROUND or content is None:
            return message
        written = self._known.get(role)
        if written is None:
            written = self._known[role] = self._look(role)
        if written.text and not written.parts:
            return with_joined_content(message)
        return with_content_in_parts(message) if written.parts and not written.text else message

    def _look(self, role: str) -> _Written:
        before, behind = _AROUND[role]
        given: dict[str, Any] = {"role": role, "tool_call_id": "callmark0", "name": "f"}
        parts = [part for mark in _MARKS for part in with_content_in_parts({"content": mark})["content"]]
        chat: list[JSON] = [*before, {**given, "content": parts}, *behind]
        return _Written(
            text=self._writes([with_joined_content(message) for message in chat], may_quote=True),
            parts=self._writes([with_content_in_parts(message) for message in chat], may_quote=False),
        )

    def _writes(self, messages: list[JSON], *, may_quote: bool) -> bool:
        """Whether the marks are written, and not within an object, as Python or JSON has it."""
        given = {**self._named_tokens, "tools": None, "documents": None, "add_generation_prompt": True}
        try:
            text = self._render({**given, "messages": messages}).casefold()
        except (InvalidPrompt, TemplateStopped):
            return False
        quoted = any(f"{quote}{mark}{quote}" in text for mark in _MARKS for quote in "'\"")
        return all(mark in text for mark in _MARKS) and (may_quote or not quoted)
