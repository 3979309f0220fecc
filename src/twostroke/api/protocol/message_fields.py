"""The fields of a chat's messages. They go to the model's template as they came, and it may read more than these.

So messages have no schema that refuses: a key beyond the published ones is named as unknown where it comes, unless the
template knows its name (ServerContext.unknown_fields).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from twostroke.tokenizer.messages import REASONING_FIELDS

MESSAGES = "messages."
"""What the paths found here begin with."""

# Beside those that act: what OpenAI's own clients send back of an answer, and Anthropic's mark of what to cache.
_MESSAGE = {"role", "content", "name", "tool_calls", "tool_call_id", *REASONING_FIELDS, "refusal", "annotations"}
_PART = {"type", "text", "refusal", "cache_control"}
_CALL = {"id", "type", "function", "index"}
_FUNCTION = {"name", "arguments"}


def unknown_in_messages(messages: list[dict[str, Any]]) -> Iterator[str]:
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
        yield from _beyond(_PART, part, f"{MESSAGES}content.")
    for call in _objects(message.get("tool_calls")):
        yield from _beyond(_CALL, call, f"{MESSAGES}tool_calls.")
        function = call.get("function")
        if isinstance(function, dict):
            yield from _beyond(_FUNCTION, cast(dict[str, Any], function), f"{MESSAGES}tool_calls.function.")


def _beyond(known: set[str], given: Mapping[str, Any], path: str) -> Iterator[str]:
    return (path + key for key, value in given.items() if key not in known and value is not None)


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    items = cast(list[Any], value) if isinstance(value, list) else ()
    return (cast(dict[str, Any], item) for item in items if isinstance(item, dict))
