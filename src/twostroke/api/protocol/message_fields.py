"""The fields of a chat's messages. They go to the model's template as they came, and it may read more than these.

So messages have no schema that refuses: a key beyond the published ones is named as unknown where it comes, unless the
template knows its name (ServerContext.unknown_fields).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, cast

import msgspec

from twostroke.api.protocol.lists import MAX_OBJECTS, AtMost
from twostroke.api.protocol.shapes import AnyObject, LooksLike
from twostroke.tokenizer.messages import REASONING_FIELDS, is_medium

MESSAGES = "messages."
"""What the paths found here begin with."""


class _Part(msgspec.Struct, gc=False):
    type: str | None = None
    text: str | None = None
    refusal: str | None = None

    def __post_init__(self) -> None:
        if self.type is self.text is self.refusal is None:
            raise ValueError("A part of a message needs a type and a text")


class _Function(msgspec.Struct, gc=False):
    name: str
    arguments: str | AnyObject | None = None


class _Call(msgspec.Struct, gc=False):
    id: str | None = None
    function: _Function | None = None
    name: str | None = None
    arguments: str | AnyObject | None = None

    type: str | None = None

    def __post_init__(self) -> None:
        if self.function is self.name is None and self.type != "custom":  # those are refused by name
            raise ValueError("A call needs a function")


class MessageShape(msgspec.Struct, gc=False):
    """What every template wants of a message, for large bodies; see shapes.py."""

    role: str
    content: str | list[str | _Part] | None = None
    name: str | None = None
    tool_calls: list[_Call] | None = None
    function_call: _Function | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    thinking: str | None = None
    reasoning: str | None = None


Messages = list[Annotated[dict[str, Any], LooksLike(MessageShape)]]
Conversation = Annotated[Messages, AtMost(MAX_OBJECTS, at_least=1)]

# Beside those that act: what OpenAI's own clients send back of an answer, and Anthropic's mark of what to cache.
_MESSAGE = {
    "role",
    "content",
    "name",
    "tool_calls",
    "function_call",
    "tool_call_id",
    *REASONING_FIELDS,
    "refusal",
    "annotations",
}
_PART = {"type", "text", "refusal", "cache_control"}
_CALL = {"id", "type", "function", "index"}
_FUNCTION = {"name", "arguments"}


def content_of(texts: Sequence[str]) -> str | list[dict[str, str]]:
    """Return the content of a message that says these; how several are joined is the chat template's to say.

    >>> content_of(["a"]), content_of(["a", "b"])
    ('a', [{'type': 'text', 'text': 'a'}, {'type': 'text', 'text': 'b'}])
    """
    if len(texts) < 2:
        return texts[0] if texts else ""
    return [{"type": "text", "text": text} for text in texts]


def unknown_in_messages(messages: Messages) -> Iterator[str]:
    """Paths of the keys that no client is told to send, each once; a key with null asks for nothing."""
    told: set[str] = set()
    for message in messages:
        for path in _unknown_in_message(message):
            if path not in told:
                told.add(path)
                yield path


def _unknown_in_message(message: Mapping[str, Any]) -> Iterator[str]:
    yield from _beyond(_MESSAGE, message, MESSAGES)
    for part in _objects(message.get("content")):
        if not is_medium(part.get("type")):  # that is refused by name
            yield from _beyond(_PART, part, f"{MESSAGES}content.")
    for call in _objects(message.get("tool_calls")):
        yield from _beyond(_CALL, call, f"{MESSAGES}tool_calls.")
        function = call.get("function")
        if isinstance(function, dict):
            yield from _beyond(_FUNCTION, cast(dict[str, Any], function), f"{MESSAGES}tool_calls.function.")


def _beyond(known: set[str], given: Mapping[str, Any], path: str) -> Iterator[str]:
    if given.keys() <= known:  # as almost all of them are, and of very many this is quick
        return iter(())
    return (path + key for key, value in given.items() if key not in known and value is not None)


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    items = cast(list[Any], value) if isinstance(value, list) else ()
    return (cast(dict[str, Any], item) for item in items if isinstance(item, dict))
