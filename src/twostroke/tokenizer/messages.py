"""Conversion of messages from any API into the form that chat templates expect, as copies with plain JSON types.

    content       a string, or a list of text parts; missing beside tool calls only if the template tests for that
    tool calls    arguments are an object, although OpenAI's clients send its JSON text
    roles         developer becomes system, unless the template knows developer

Every API renders through ChatTemplate. So a conversation means the same in each of them, and a server's answer can
always be sent back to it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any, cast

from twostroke.errors import InvalidPrompt, shown
from twostroke.plain_words import kind_of

JSON = dict[str, Any]

MAX_DEPTH = 64
"""Levels of lists and objects within messages and tools."""
_PLAIN = frozenset({str, int, float, bool, NoneType})
_MAX_KEY = 64
"""Characters of a key shown in an error message."""


class _NotPlainJson(Exception):
    """A value that cannot be copied; each enclosing list or object adds its key to `place`.

    Args:
        told: description of the fault.
    """

    def __init__(self, told: str) -> None:
        super().__init__(told)
        self.told = told
        self.place: list[str] = []
        """Keys and indices that lead to the value, innermost first."""


def plain_json(value: Any, where: str, depth: int = 0) -> Any:
    """Return a copy made of plain JSON types; methods of other objects could get around the sandbox.

    Raises:
        InvalidPrompt: a value has another type or is nested too deep; the error begins with `where` and the path to it.
    """
    try:
        return _copied(value, depth)
    except _NotPlainJson as error:
        raise InvalidPrompt(f"{where}{''.join(reversed(error.place))} {error.told}") from None


def _copied(value: Any, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise _NotPlainJson(f"is nested more than {MAX_DEPTH} levels deep.")
    if type(value) in _PLAIN:
        return value
    for kind, copy in ((str, str.__str__), (int, int.__int__), (float, float.__float__)):
        if isinstance(value, kind):
            return cast(Any, copy)(value)
    if isinstance(value, Mapping):
        return _copied_object(cast(Mapping[Any, Any], value), depth)
    if isinstance(value, (list, tuple)):
        return _copied_list(cast(Sequence[Any], value), depth)
    raise _NotPlainJson("is not a JSON value; nothing else can be put into a prompt.")


def _copied_object(given: Mapping[Any, Any], depth: int) -> JSON:
    copy: JSON = {}
    for key, item in given.items():
        if not isinstance(key, str):
            raise _NotPlainJson(f"has the key {shown(key)}; keys must be strings.")
        try:
            copy[str.__str__(key)] = _copied(item, depth + 1)
        except _NotPlainJson as error:
            error.place.append(f".{key[:_MAX_KEY]}")
            raise
    return copy


def _copied_list(given: Sequence[Any], depth: int) -> list[Any]:
    copy: list[Any] = []
    for index, item in enumerate(given):
        try:
            copy.append(_copied(item, depth + 1))
        except _NotPlainJson as error:
            error.place.append(f"[{index}]")
            raise
    return copy


REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names under which clients send a message's reasoning; templates read the first, some older ones the second."""
_MEDIA = ("image", "audio", "video", "file", "document")
"""Substrings in the type of a part (image_url, input_image, input_audio, …) that mark media no model here reads."""
_TEXT_FIELDS = ("text", "refusal")
"""Fields of a part that hold its text."""
NO_ARGUMENTS = frozenset({"", "null"})
"""Texts that clients and models write for the arguments of a call without arguments."""
MAX_PARTS = 65536
"""Parts of one message."""
_ROLES_WITHOUT_CONTENT = frozenset({"assistant", "tool"})
"""Roles whose content may be empty: an assistant turn that only calls tools, or the empty result of a tool."""
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
"""Roles defined by OpenAI; templates may know others."""
_TEXTS = ("name", "tool_call_id", "refusal", *REASONING_FIELDS)
"""Fields of a message that must be strings; a template would write other values in Python's notation."""


class CallArguments(dict[str, Any]):
    """The arguments of a tool call: a dict to templates that read fields, its JSON text to templates that write it.

    The text is the model's own output. So the next turn's prompt has exactly the tokens of the answer, and the
    prefix cache finds them. A text that is not a JSON object (for example a truncated answer) has no fields.

    Fields are parsed only in the process where templates run, whose time and memory are limited: a text of a few
    megabytes may hold a million lists. In other processes the dict is empty.
    """

    __slots__ = ("_json",)

    def __init__(self, fields: Mapping[str, Any], text: str) -> None:
        super().__init__(fields)
        self._json = text

    @classmethod
    def read(cls, text: str, where: str) -> CallArguments:
        """Return the arguments with their fields parsed.

        Raises:
            InvalidPrompt: the arguments are nested too deeply; the error says where.
        """
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = None
        return cls(plain_json(found, where) if isinstance(found, dict) else {}, text)

    def __str__(self) -> str:
        return self._json

    def __add__(self, other: object) -> str:
        return self._json + other if isinstance(other, str) else NotImplemented

    def __radd__(self, other: object) -> str:
        return other + self._json if isinstance(other, str) else NotImplemented


def template_json(value: Any) -> str:
    """Return JSON in the format of templates; the arguments of calls, at any depth, keep the model's own text.

    Raises:
        TypeError: a value that is not JSON, such as an undefined variable of the template.
    """
    match value:
        case CallArguments():
            return str(value)
        case dict() if _holds_arguments(value):
            items = cast(Mapping[Any, Any], value).items()
            return (
                "{" + ", ".join(f"{json.dumps(str(k), ensure_ascii=False)}: {template_json(v)}" for k, v in items) + "}"
            )
        case list() | tuple() if _holds_arguments(value):
            return "[" + ", ".join(template_json(item) for item in cast(Sequence[Any], value)) + "]"
        case _:
            return json.dumps(value, ensure_ascii=False)


def _holds_arguments(value: Any) -> bool:
    if isinstance(value, CallArguments):
        return True
    if isinstance(value, dict):
        return any(_holds_arguments(item) for item in cast(Mapping[Any, Any], value).values())
    return isinstance(value, (list, tuple)) and any(_holds_arguments(item) for item in cast(Sequence[Any], value))


def checked_messages(
    messages: Any,
    *,
    knows_developer: bool = False,
    reads_argument_text: bool = False,
    tests_missing_content: bool = False,
) -> list[JSON]:
    """Return the messages of a conversation in the form that templates expect.

    Args:
        messages: objects with a role and, usually, a content, from any client.
        knows_developer: whether the template reads the role developer; otherwise that role becomes system.
        reads_argument_text: whether the template tests for arguments that are a string; arguments then stay a string.
        tests_missing_content: whether the template detects a turn that only calls tools by content being none;
            otherwise the content of such a turn is an empty text.

    Raises:
        InvalidPrompt: a message is malformed; the error says where.
    """
    if not isinstance(messages, (list, tuple)):
        raise InvalidPrompt(f"messages must be a list of objects, not {kind_of(messages)}.")
    if not messages:
        raise InvalidPrompt("messages is empty; give at least one message, like {'role': 'user', 'content': '...'}.")
    found: list[JSON] = []
    for index, message in enumerate(cast(Sequence[Any], messages)):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise InvalidPrompt(f"{where} must be an object with role and content, not {kind_of(message)}.")
        given = _given(cast(Mapping[Any, Any], message), where)
        checked = _checked(given, where, knows_developer, reads_argument_text)
        if tests_missing_content and "tool_calls" in checked:
            checked["content"] = checked["content"] or None
        found.append(checked)
    return found


_LISTS = frozenset({"content", "tool_calls"})
"""Fields whose elements are copied one by one, each only after those before it were checked."""
_PART_LEVEL = 2
"""Nesting level of these elements within the message."""


def _given(message: Mapping[Any, Any], where: str) -> JSON:
    """Return a copy of a message without its null fields; clients send null for absent fields."""
    given: JSON = {}
    for key, value in message.items():
        if value is None:
            continue
        if key in _LISTS and isinstance(value, (list, tuple)):
            given[str(key)] = list(cast(Sequence[Any], value))
        elif type(key) is str and type(value) is str:
            given[key] = value
        else:
            given |= plain_json({key: value}, where)
    return given


def _checked(message: JSON, where: str, knows_developer: bool, reads_argument_text: bool) -> JSON:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidPrompt(f"{where} has no role; use for example 'system', 'user' or 'assistant'.")
    if role not in _ROLES and role.lower() in _ROLES:
        raise InvalidPrompt(f"{where} has the role {shown(role)}; roles are in lower case: {role.lower()!r}.")
    if role == "developer" and not knows_developer:
        message["role"] = role = "system"
    _check_texts(message, _TEXTS, where)
    message["content"] = _content(message, role, where)
    calls = message.pop("tool_calls", None)
    older = message.pop("function_call", None)  # OpenAI's older form, for a single call
    if older is not None and calls in (None, []):
        calls = [{"type": "function", "function": older}]
    if calls is not None and not isinstance(calls, list):
        raise InvalidPrompt(f"{where}.tool_calls must be a list of calls, not {kind_of(calls)}.")
    if calls:  # leave an empty list out: a template that only tests whether the field exists would open a call
        message["tool_calls"] = [
            _call(call, f"{where}.tool_calls[{index}]", reads_argument_text)
            for index, call in enumerate(cast(list[Any], calls))
        ]
    return _with_reasoning(message)


def _check_texts(given: Mapping[str, Any], names: Sequence[str], where: str) -> None:
    """Raise InvalidPrompt if one of these fields is present and not a string."""
    for name in names:
        if name in given and not isinstance(given[name], str):
            raise InvalidPrompt(f"{where}.{name} must be a string, not {kind_of(given[name])}.")


def _content(message: JSON, role: str, where: str) -> str | list[JSON]:
    content = message.get("content")
    match content:
        case "" | [] | None if role in _ROLES_WITHOUT_CONTENT:
            return message.get("refusal", "")
        case str():
            return content
        case list():
            if len(content) > MAX_PARTS:
                raise InvalidPrompt(f"{where}.content has {len(content)} parts; at most {MAX_PARTS} can be sent.")
            return [_part(part, f"{where}.content[{i}]") for i, part in enumerate(cast(list[Any], content))]
        case None:
            raise InvalidPrompt(
                f"{where}, of role {shown(role)}, has no content; give a string, possibly an empty one."
            )
        case _:
            raise InvalidPrompt(f"{where}.content must be a string or a list of text parts, not {kind_of(content)}.")


def is_media_type(kind: Any) -> bool:
    """Return whether a part of this type is refused because no model here reads such media.

    >>> is_media_type("image_url"), is_media_type("text")
    (True, False)
    """
    return isinstance(kind, str) and any(medium in kind for medium in _MEDIA)


def _part(part: Any, where: str) -> JSON:
    """Return a part of type text; parts of the Responses API and refusals are converted."""
    part = plain_json(part, where, _PART_LEVEL)
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict):
        raise InvalidPrompt(f"{where} must be an object like {{'type': 'text', 'text': '...'}} or a string.")
    given = cast(JSON, part)
    kind = given.get("type", "text")
    if is_media_type(kind):
        raise InvalidPrompt(f"{where} is of type {shown(kind)}; models here take text only. Leave it out.")
    text = next((given[name] for name in _TEXT_FIELDS if name in given), None)
    if not isinstance(text, str):
        raise InvalidPrompt(f"{where}, of type {shown(kind)}, has no text; only text parts can be put into a prompt.")
    rest = {key: value for key, value in given.items() if key not in _TEXT_FIELDS}
    return {**rest, "type": "text", "text": text}


def _call(call: Any, where: str, reads_argument_text: bool) -> JSON:
    """Return a call whose arguments are an object.

    The function's fields may be in `function` or, as templates also accept, in the call itself.
    """
    call = plain_json(call, where, _PART_LEVEL)
    if not isinstance(call, dict):
        raise InvalidPrompt(f"{where} must be an object with a function, not {kind_of(call)}.")
    given = {name: value for name, value in cast(JSON, call).items() if value is not None}
    _check_texts(given, ("id",), where)
    if given.get("type") == "custom":
        raise InvalidPrompt(
            f"{where} is of type 'custom', which is not supported; send a call of type 'function' whose arguments have "
            "the input as a string."
        )
    if "function" not in given:
        return _function(given, where, reads_argument_text)
    if not isinstance(given["function"], dict):
        raise InvalidPrompt(f"{where}.function must be an object with a name and arguments.")
    return {**given, "function": _function(given["function"], f"{where}.function", reads_argument_text)}


def _function(function: JSON, where: str, reads_argument_text: bool) -> JSON:
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise InvalidPrompt(f"{where} has no name; give the name of the called function.")
    given = function.get("arguments")
    if isinstance(given, dict):
        return {**function, "arguments": CallArguments({}, json.dumps(given, ensure_ascii=False))}
    if given is not None and not isinstance(given, str):
        raise InvalidPrompt(f"{where}.arguments must be a JSON object or the text of one, not {kind_of(given)}.")
    text = (given or "").strip()
    text = "{}" if text in NO_ARGUMENTS else text
    if reads_argument_text:
        return {**function, "arguments": text}
    return {**function, "arguments": CallArguments({}, text)}


def _with_reasoning(message: JSON) -> JSON:
    reasoning = next((message[name] for name in REASONING_FIELDS if message.get(name) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def checked_tools(tools: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return tools in the form that templates expect; missing parameters become an empty object schema.

    Raises:
        InvalidPrompt: a tool contains a value that is not JSON.
    """
    checked: list[Any] = plain_json(list(tools), "tools")
    for tool in checked:
        function = cast(JSON, tool).get("function") if isinstance(tool, dict) else None
        if isinstance(function, dict) and cast(JSON, function).get("parameters") is None:
            function["parameters"] = {"type": "object", "properties": {}}
    return checked


def text_of(message: Mapping[str, Any]) -> str:
    """Return the text of a message, with its parts joined.

    Raises:
        InvalidPrompt: the message is malformed.
    """
    (checked,) = checked_messages([message])
    return cast(str, with_joined_content(checked)["content"])


def with_joined_content(message: JSON) -> JSON:
    """Return a checked message with its parts joined into one text, for a template that reads only texts."""
    content = message["content"]
    if not isinstance(content, list):
        return message
    return {**message, "content": "\n".join(part["text"] for part in cast(list[JSON], content))}


def with_content_in_parts(message: JSON) -> JSON:
    """Return a checked message with its text as one part, for a template that reads only parts."""
    content = message["content"]
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message
