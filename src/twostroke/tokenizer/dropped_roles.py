"""Finds messages that a chat template would leave out because of their role.

A template writes the roles that it knows; many write nothing for any other, and the model never sees the message. To
find out, the template renders a conversation of the same roles in which every message is a mark, and the marks are
looked for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from twostroke.errors import InvalidPrompt, shown
from twostroke.tokenizer.messages import CallArguments, with_joined_content
from twostroke.tokenizer.plain_json import JSON
from twostroke.tokenizer.template_process import TemplateStopped

_ALWAYS_WRITTEN = frozenset({"user", "assistant"})
_MAX_KNOWN = 256
"""Conversations whose roles are remembered."""
_MAX_REMEMBERED = 256
"""Messages of one of them."""
_MAX_ROLE = 64
"""Characters of one role there."""

_Pattern = tuple[tuple[str, bool], ...]
"""For each message its role, and whether it calls tools."""


class DroppedRoles:
    """Which messages one template leaves out.

    Args:
        render: the template; it takes its variables, and raises InvalidPrompt where it refuses, and TemplateStopped
            where it takes too long.
        fitted: puts a message into the form that the template writes.
    """

    def __init__(self, render: Callable[[JSON], str], fitted: Callable[[JSON], JSON]) -> None:
        self._render = render
        self._fitted = fitted
        self._known: dict[tuple[_Pattern, bytes], frozenset[int]] = {}
        """Indices of messages that are left out."""

    def check(self, messages: Sequence[JSON], variables: Mapping[str, Any]) -> None:
        """Refuse a conversation with a message that the template leaves out.

        Raises:
            InvalidPrompt: names the message and its role.
        """
        pattern = _pattern(messages)
        if all(role in _ALWAYS_WRITTEN for role, _ in pattern):
            return
        key = pattern, _switches(variables)
        dropped = self._known.get(key)
        if dropped is None:
            try:
                dropped = self._dropped(pattern, variables)
            except TemplateStopped:  # nothing is known of a template that takes so long
                return
            if len(pattern) <= _MAX_REMEMBERED and all(len(role) <= _MAX_ROLE for role, _ in pattern):
                if len(self._known) >= _MAX_KNOWN:
                    self._known.clear()
                self._known[key] = dropped
        for index in sorted(dropped):
            if with_joined_content(messages[index])["content"]:
                role = messages[index]["role"]
                raise InvalidPrompt(
                    f"messages[{index}] has the role {shown(role)}, which this model's chat template leaves out: the "
                    "model would never see it. Use a role that the template writes, such as 'user'."
                )

    def _dropped(self, pattern: _Pattern, variables: Mapping[str, Any]) -> frozenset[int]:
        marks = [f"mark{index}of{len(pattern)}" for index in range(len(pattern))]
        plain = [_marked(role, mark, calls=calls) for (role, calls), mark in zip(pattern, marks, strict=True)]
        messages = [self._fitted(message) for message in plain]
        try:
            text = self._render({**variables, "messages": messages}).casefold()
        except TemplateStopped:
            raise
        except InvalidPrompt:  # it refuses these roles, or a mark where it expects something else: it speaks for itself
            return frozenset()
        return frozenset(
            index
            for index, ((role, _), mark) in enumerate(zip(pattern, marks, strict=True))
            if role not in _ALWAYS_WRITTEN and mark not in text
        )


def _pattern(messages: Sequence[JSON]) -> _Pattern:
    """Return roles and calls; of the usual conversation, a system message before turns, its beginning says enough."""
    pattern = tuple((message["role"], "tool_calls" in message) for message in messages)
    rest = pattern[1:]
    if pattern[0] == ("system", False) and all(role in _ALWAYS_WRITTEN and not calls for role, calls in rest):
        return pattern[:2]
    return pattern


def _switches(variables: Mapping[str, Any]) -> bytes:
    """Return a digest of what may decide which roles are written: of tools and documents, whether there are any."""
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
