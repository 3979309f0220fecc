"""Probes: small conversations with marks, rendered to find out what a chat template writes and what it leaves out.

ContentForms    Templates that iterate over content parts seldom do so everywhere. Some take the first part of a system
                message, or write a tool result's list in Python's notation; some templates of models that read
                images write no plain text. Marks are rendered once as texts and once as parts.
DroppedRoles    A template writes the roles that it knows. Many write nothing for any other role, and the model never
                sees the message. Each message of a conversation with the same roles is a mark.
UnwrittenParts  Many models' templates write no tools, no calls, or no text beside calls. The same conversation is
                rendered with two different values; if the output is equal, the template writes neither.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from twostroke.errors import InvalidPrompt, shown
from twostroke.tokenizer.messages import JSON, CallArguments, with_content_in_parts, with_joined_content
from twostroke.tokenizer.template_process import TemplateStopped

_USER: JSON = {"role": "user", "content": "hi"}
_FUNCTION: JSON = {"name": "f", "arguments": CallArguments({}, "{}")}
_CALLS: list[JSON] = [{"id": "callmark0", "type": "function", "function": _FUNCTION}]
_CALLED: JSON = {"role": "assistant", "content": "hi", "tool_calls": _CALLS}
_CONTEXT_OF_ROLE: Mapping[str, tuple[list[JSON], list[JSON]]] = {
    "system": ([], [_USER]),
    "developer": ([], [_USER]),
    "user": ([], []),
    "assistant": ([_USER], [_USER]),
    "tool": ([_USER, _CALLED], []),
    "function": ([_USER, _CALLED], []),
}
"""Messages before and after a message of each role."""
_MARKS = ("markone", "marktwo")


@dataclass(frozen=True, slots=True)
class _WrittenForms:
    """Forms of a role's content that a template writes."""

    text: bool
    parts: bool


class ContentForms:
    """The content forms (text or parts) that one template writes, by role.

    Args:
        render: renders the template with its variables; raises InvalidPrompt if the template refuses, and
            TemplateStopped if it takes too long.
        named_tokens: variables that every rendering has.
        reads_parts: whether the template may iterate over parts at all.
    """

    def __init__(self, render: Callable[[JSON], str], named_tokens: Mapping[str, str], *, reads_parts: bool) -> None:
        self._render = render
        self._named_tokens = named_tokens
        self._reads_parts = reads_parts
        self._known: dict[str, _WrittenForms] = {}

    def fitted(self, message: JSON) -> JSON:
        """Return a checked message in a form that the template writes, or unchanged if the form cannot be found out."""
        content, role = message["content"], message["role"]
        if not self._reads_parts:
            return with_joined_content(message)
        if role not in _CONTEXT_OF_ROLE or content is None:
            return message
        written = self._known.get(role)
        if written is None:
            written = self._known[role] = self._look(role)
        if written.text and not written.parts:
            return with_joined_content(message)
        return with_content_in_parts(message) if written.parts and not written.text else message

    def _look(self, role: str) -> _WrittenForms:
        before, behind = _CONTEXT_OF_ROLE[role]
        given: dict[str, Any] = {"role": role, "tool_call_id": "callmark0", "name": "f"}
        parts = [part for mark in _MARKS for part in with_content_in_parts({"content": mark})["content"]]
        chat: list[JSON] = [*before, {**given, "content": parts}, *behind]
        return _WrittenForms(
            text=self._writes([with_joined_content(message) for message in chat], may_quote=True),
            parts=self._writes([with_content_in_parts(message) for message in chat], may_quote=False),
        )

    def _writes(self, messages: list[JSON], *, may_quote: bool) -> bool:
        """Return whether all marks are written, outside of an object in Python's or JSON's notation."""
        given = {**self._named_tokens, "tools": None, "documents": None, "add_generation_prompt": True}
        try:
            text = self._render({**given, "messages": messages}).casefold()
        except (InvalidPrompt, TemplateStopped):
            return False
        quoted = any(f"{quote}{mark}{quote}" in text for mark in _MARKS for quote in "'\"")
        return all(mark in text for mark in _MARKS) and (may_quote or not quoted)


ALWAYS_WRITTEN = frozenset({"user", "assistant"})
"""Roles that every template writes."""
_MAX_CACHED_CONVERSATIONS = 256
"""Maximum number of conversations whose roles are cached."""
_MAX_CACHED_MESSAGES = 256
"""Maximum number of messages of a cached conversation."""
_MAX_ROLE = 64
"""Maximum characters of a role in a cached conversation."""

_Pattern = tuple[tuple[str, bool], ...]
"""For each message its role, and whether it calls tools."""


class DroppedRoles:
    """Detection of messages that one template leaves out.

    Args:
        render: renders the template with its variables; raises InvalidPrompt if the template refuses, and
            TemplateStopped if it takes too long.
        fitted: converts a message into the form that the template writes.
    """

    def __init__(self, render: Callable[[JSON], str], fitted: Callable[[JSON], JSON]) -> None:
        self._render = render
        self._fitted = fitted
        self._known: dict[tuple[_Pattern, bytes], frozenset[int]] = {}
        """Indices of the messages that are left out."""

    def check(self, messages: Sequence[JSON], variables: Mapping[str, Any]) -> None:
        """Refuse a conversation with a message that the template leaves out, unless its role is in ALWAYS_WRITTEN.

        Raises:
            InvalidPrompt: a message is left out; the error names it and its role.
        """
        pattern = _pattern(messages)
        key = pattern, _switches(variables)
        dropped = self._known.get(key)
        if dropped is None:
            try:
                dropped = self._dropped(pattern, variables)
            except TemplateStopped:  # a template that takes so long cannot be probed
                return
            if len(pattern) <= _MAX_CACHED_MESSAGES and all(len(role) <= _MAX_ROLE for role, _ in pattern):
                if len(self._known) >= _MAX_CACHED_CONVERSATIONS:
                    self._known.clear()
                self._known[key] = dropped
        for index in sorted(dropped):
            if with_joined_content(messages[index])["content"]:
                role = messages[index]["role"]
                raise InvalidPrompt(
                    f"messages[{index}] has the role {shown(role)}, which this model's chat template leaves out, so "
                    "the model would never see it. Use a role that the template writes, such as 'user'."
                )

    def _dropped(self, pattern: _Pattern, variables: Mapping[str, Any]) -> frozenset[int]:
        marks = [f"mark{index}of{len(pattern)}" for index in range(len(pattern))]
        plain = [_marked(role, mark, calls=calls) for (role, calls), mark in zip(pattern, marks, strict=True)]
        messages = [self._fitted(message) for message in plain]
        try:
            text = self._render({**variables, "messages": messages}).casefold()
        except TemplateStopped:
            raise
        except InvalidPrompt:  # it refuses these roles or a mark; rendering the conversation will report that
            return frozenset()
        return frozenset(
            index
            for index, ((role, _), mark) in enumerate(zip(pattern, marks, strict=True))
            if role not in ALWAYS_WRITTEN and mark not in text
        )


def _pattern(messages: Sequence[JSON]) -> _Pattern:
    """Return roles and calls of the messages.

    If the conversation is a system message and turns without calls, the first two messages represent all.
    """
    pattern = tuple((message["role"], "tool_calls" in message) for message in messages)
    rest = pattern[1:]
    if pattern[0] == ("system", False) and all(role in ALWAYS_WRITTEN and not calls for role, calls in rest):
        return pattern[:2]
    return pattern


def _switches(variables: Mapping[str, Any]) -> bytes:
    """Return a digest of the variables that may decide which roles are written.

    For tools and documents only their presence counts.
    """
    lists = {name: variables.get(name) is not None for name in ("tools", "documents")}
    told = json.dumps({**variables, **lists}, sort_keys=True)
    return hashlib.blake2b(told.encode(), digest_size=16).digest()


def _marked(role: str, mark: str, *, calls: bool) -> JSON:
    message: JSON = {"role": role, "content": mark}
    if calls:
        function = {"name": "f", "arguments": CallArguments({}, "{}")}
        message["tool_calls"] = [{"id": "callmark0", "type": "function", "function": function}]
    if role == "tool":
        message |= {"tool_call_id": "callmark0", "name": "f"}
    return message


class UnwrittenParts:
    """The conversation parts that one template never writes, each found out at first access.

    Args:
        render: renders the template with its variables; raises InvalidPrompt if the template refuses.
        named_tokens: variables that every rendering has.
        call_content: content of a turn that only calls tools.
    """

    def __init__(
        self, render: Callable[[JSON], str], named_tokens: Mapping[str, str], call_content: str | None = ""
    ) -> None:
        self._render = render
        self._named_tokens = named_tokens
        self._call_content = call_content

    @cached_property
    def tools(self) -> bool:
        """Whether tools are never written."""
        return self._never_differ(
            [[(chat, _tools(name)) for name in ("f", "g")] for chat in ([_ASKED], [_SYSTEM, _ASKED])]
        )

    @cached_property
    def calls(self) -> bool:
        """Whether calls of earlier turns without text are never written."""
        return self._hides_calls(self._call_content)

    @cached_property
    def calls_beside_text(self) -> bool:
        """Whether the template omits the tool calls of earlier turns that also have text."""
        return self._hides_calls("mark")

    @cached_property
    def text_beside_calls(self) -> bool:
        """Whether the template omits the text of earlier turns that also call tools."""
        return self._never_differ(
            [
                [([_ASKED, _called("f", text), next_turn], tools) for text in ("markone", "marktwo")]
                for next_turn in (_RESULT, _ASKED)
                for tools in (None, _tools("f"))
            ]
        )

    @cached_property
    def takes_reasoning_or_text(self) -> bool:
        """Whether a turn with tool calls is refused with both reasoning and text, but accepted with one (gpt-oss)."""
        both = _called("f", "mark") | {"thinking": "mark", "reasoning_content": "mark"}
        return not self._takes(both) and self._takes({**both, "content": self._call_content})

    def _takes(self, turn: JSON) -> bool:
        try:
            self._text([_ASKED, turn, _RESULT], None)
        except TemplateStopped:
            return True
        except InvalidPrompt:
            return False
        return True

    def _hides_calls(self, content: str | None) -> bool:
        return self._never_differ(
            [
                [([_ASKED, _called(name, content), next_turn], tools) for name in ("f", "g")]
                for next_turn in (_RESULT, _ASKED)
                for tools in (None, _tools("f"))
            ]
        )

    def _never_differ(self, pairs: Sequence[Sequence[_Chat]]) -> bool:
        """Return whether both conversations of each pair render equally, among the pairs that the template accepts."""
        found: list[bool] = []
        for pair in pairs:
            try:
                first, second = (self._text(messages, tools) for messages, tools in pair)
            except TemplateStopped:
                return False
            except InvalidPrompt:  # it refuses such conversations; rendering one will report that
                continue
            found.append(first == second)
        return bool(found) and all(found)

    def _text(self, messages: list[JSON], tools: list[JSON] | None) -> str:
        given: dict[str, Any] = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": True}
        return self._render({**self._named_tokens, **given})


_Chat = tuple[list[JSON], list[JSON] | None]
"""Messages and tools."""
_ASKED: JSON = {"role": "user", "content": "mark"}
_SYSTEM: JSON = {"role": "system", "content": "mark"}
_RESULT: JSON = {"role": "tool", "tool_call_id": "callmark0", "content": "mark"}


def _tools(name: str) -> list[JSON]:
    parameters: JSON = {"type": "object", "properties": {name: {"type": "string"}}}
    return [{"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}]


def _called(name: str, content: str | None) -> JSON:
    arguments = CallArguments({name: name}, f'{{"{name}": "{name}"}}')
    call: JSON = {"id": "callmark0", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}
