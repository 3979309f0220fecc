"""Tool calls as JSON, `{"name": ..., "arguments": {...}}`: alone, in a list, in sequence, or with the name apart.

DeepSeek, Kimi and Mistral write the name and the JSON arguments between markup of their own (`CallSection`).
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace

from twostroke.api.parsers.json_text import JsonScanner, decoded_string, read_short_string, read_value
from twostroke.api.parsers.output import Output
from twostroke.api.parsers.source import MAX_HEAD_CHARS, Reading, Source
from twostroke.tokenizer.messages import NO_ARGUMENTS

ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
OTHER_KEYS = frozenset({"type", "id"})
"""Keys beside the name and the arguments; an object with any other key before them is not a call."""

_FUNCTION_NAME = re.compile(r"[^\s<>\[\]{}()\"'`|,;=]{1,128}")
_WORD = re.compile(r"[A-Za-z0-9_.+-]*")
_DIGITS = re.compile(r"[0-9]*")
_CLOSERS = re.compile(r"[\s}\]]*")


def is_function_name(name: str) -> bool:
    """Return whether a string can be a function's name."""
    return _FUNCTION_NAME.fullmatch(name) is not None


def read_arguments(source: Source, output: Output, name: str) -> Reading[bool]:
    """Read a call's arguments, an object, and emit them as they come; emit nothing if no object begins here.

    Returns:
        Whether the call has begun. Its arguments have then been read as far as they go, complete or not.
    """
    start = source.position
    if not (yield from source.literal("{")):
        return False
    yield from source.space()
    if not (yield from source.literal('"', "}")):
        return False
    source.position = start
    output.begin_tool_call(name)
    value = JsonScanner()
    while not value.has_ended and (yield from source.more()):
        output.arguments(value.take(source))
        source.forget()
    return True


def read_json_calls(
    source: Source, output: Output, *, names: Collection[str] | None = None, end: str = ""
) -> Reading[bool]:
    """Read one or more calls, in a list or not, with or without commas or semicolons between them.

    Args:
        source: source, positioned at the first call.
        output: receives the calls.
        names: names of the known functions, if only the name distinguishes a call from text; None to accept any.
        end: the markup that follows.

    Returns:
        Whether there was a call. The source is then after the last call; text that does not fit stays unread.
    """
    yield from source.space()
    is_list = bool((yield from source.literal("[")))
    yield from source.space()
    if not (yield from _read_call(source, output, names)):
        return False
    while True:
        end_of_call = source.position
        yield from source.space()
        yield from source.literal(",", ";")
        yield from source.space()
        if not (yield from _read_call(source, output, names)):
            source.position = end_of_call
            break
    if end:
        yield from _read_end(source, end)
    elif is_list:
        yield from source.closing("]")
    return True


def _read_end(source: Source, end: str) -> Reading[None]:
    """Read the markup after the calls, and any number of closing brackets before it."""
    end_of_calls = source.position
    yield from source.every(_CLOSERS)
    if source.num_unread and not (yield from source.closing(end)) and source.num_unread:
        source.position = end_of_calls


def _read_call(source: Source, output: Output, names: Collection[str] | None) -> Reading[bool]:
    """Read one object if it is a call; its members may come in any order."""
    if not (yield from source.literal("{")):
        return False
    name = arguments = None
    while name is None:
        key = yield from _read_key(source)
        if key == "name":
            name = yield from read_short_string(source, _longest(names))
            if name is None or not (is_function_name(name) if names is None else name in names):
                return False
        elif key in ARGUMENT_KEYS and arguments is None:
            arguments = yield from _read_whole_arguments(source)
            if arguments is None:
                return False
        elif key not in OTHER_KEYS or not (yield from _read_scalar(source)):
            return False
        yield from source.space()
        if name is None and not (yield from source.literal(",")):
            return False
    if arguments is None:
        return (yield from _read_rest_of_call(source, output, name))
    output.begin_tool_call(name)
    output.arguments(arguments)
    yield from _read_other_members(source)
    return True


def _longest(names: Collection[str] | None) -> int:
    """Return the maximum length of a quoted function name: two quotation marks, and six characters per escape."""
    return max([MAX_HEAD_CHARS, *(2 + 6 * len(name) for name in names or ())])


def _read_rest_of_call(source: Source, output: Output, name: str) -> Reading[bool]:
    """Read the members after the name, if the arguments did not precede it."""
    while (yield from source.literal(",")):
        key = yield from _read_key(source)
        if key in ARGUMENT_KEYS:
            if not (yield from _read_arguments_of_any_kind(source, output, name)):
                return False
            yield from _read_other_members(source)
            return True
        if key not in OTHER_KEYS or not (yield from _read_scalar(source)):
            return False
        yield from source.space()
    if not (yield from source.literal("}")):
        return False
    output.begin_tool_call(name)
    output.arguments("{}")
    return True


def _read_arguments_of_any_kind(source: Source, output: Output, name: str) -> Reading[bool]:
    """Read arguments: an object, emitted as it comes, or null, or a string that contains an object."""
    start = source.position
    if (yield from read_arguments(source, output, name)):
        return True
    source.position = start
    arguments = yield from _read_whole_arguments(source)
    if arguments is None:
        return False
    output.begin_tool_call(name)
    output.arguments(arguments)
    return True


def _read_whole_arguments(source: Source) -> Reading[str | None]:
    if (yield from source.literal("null")):
        return "{}"
    yield from source.more()
    first = source.text[source.position : source.position + 1]
    if first not in ("{", '"'):
        return None
    text = yield from read_value(source)
    if text is None or first == "{":
        return text
    decoded = decoded_string(text)
    if decoded is None:
        return None
    if decoded.strip() in NO_ARGUMENTS:
        return "{}"
    return decoded if decoded.strip()[:1] == "{" else None


def _read_key(source: Source) -> Reading[str | None]:
    """Read `"key": ` with the space around it."""
    yield from source.space()
    key = yield from read_short_string(source)
    yield from source.space()
    if not (yield from source.literal(":")):
        return None
    yield from source.space()
    return key


def _read_scalar(source: Source) -> Reading[bool]:
    """Read the value of an irrelevant member: a short string or a number."""
    if (yield from read_short_string(source)) is not None:
        return True
    start = source.position
    yield from source.every(_DIGITS)
    return source.position > start


def _read_any_value(source: Source) -> Reading[bool]:
    """Read and discard a value of any type."""
    yield from source.more()
    if source.text.startswith(("{", "[", '"'), source.position):
        return (yield from read_value(source)) is not None
    start = source.position
    yield from source.every(_WORD)
    return source.position > start


def _read_other_members(source: Source) -> Reading[None]:
    """Read and discard the rest of an object after its name and arguments; read nothing if it is not JSON."""
    start = source.position
    yield from source.space()
    while (yield from source.literal(",")):
        key = yield from _read_key(source)
        if key is None or not (yield from _read_any_value(source)):
            source.position = start
            return
        yield from source.space()
    if not (yield from source.literal("}")) and source.num_unread:
        source.position = start


@dataclass(frozen=True, slots=True)
class CallSection:
    """Markup of a family that writes calls in a section.

        <begin> <call_begin> name <after_name> {...} <call_end> <call_begin> ... <call_end> <end>

    The name is group 1 of `name`, which must match everything between the markup around it.
    """

    begin: str
    end: str
    call_begin: str
    name: re.Pattern[str]
    after_name: str
    after_arguments: str
    call_end: str

    @property
    def markup(self) -> tuple[str, ...]:
        """Texts that may be single tokens of the model."""
        return (self.begin, self.end, self.call_begin, self.after_name, self.call_end)


DEEPSEEK_V3 = CallSection(
    begin="<｜tool▁calls▁begin｜>",  # noqa: RUF001 (they are written so)
    end="<｜tool▁calls▁end｜>",  # noqa: RUF001
    call_begin="<｜tool▁call▁begin｜>",  # noqa: RUF001
    name=re.compile(r"function<｜tool▁sep｜>(\S+)\s*"),  # noqa: RUF001
    after_name="```json",
    after_arguments="```",
    call_end="<｜tool▁call▁end｜>",  # noqa: RUF001
)
DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"  # noqa: RUF001
DEEPSEEK_V31 = replace(DEEPSEEK_V3, name=re.compile(r"\s*(\S+)\s*"), after_name=DEEPSEEK_SEPARATOR, after_arguments="")
KIMI_K2 = CallSection(
    begin="<|tool_calls_section_begin|>",
    end="<|tool_calls_section_end|>",
    call_begin="<|tool_call_begin|>",
    name=re.compile(r"\s*(?:functions\.)?([^\s:]+)(?::[0-9]+)?\s*"),
    after_name="<|tool_call_argument_begin|>",
    after_arguments="",
    call_end="<|tool_call_end|>",
)


def read_section(source: Source, output: Output, section: CallSection) -> Reading[bool]:
    """Read the calls of a section, after its `begin`; return False if there is none."""
    if not (yield from _read_section_call(source, output, section)):
        return False
    end_of_call = source.position
    while (yield from _read_section_call(source, output, section)):
        end_of_call = source.position
    source.position = end_of_call
    yield from source.closing(section.end)
    return True


def _read_section_call(source: Source, output: Output, section: CallSection) -> Reading[bool]:
    yield from source.space()
    if not (yield from source.literal(section.call_begin)):
        return False
    head = yield from source.until(section.after_name)
    found = section.name.fullmatch(head) if head is not None else None
    if found is None or not is_function_name(found.group(1)):
        return False
    yield from source.literal(section.after_name)
    yield from source.space()
    if not (yield from read_arguments(source, output, found.group(1))):
        return False
    if section.after_arguments:
        yield from source.closing(section.after_arguments)
    yield from source.closing(section.call_end)
    return True


MISTRAL_MARKUP = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")


def read_mistral_calls(source: Source, output: Output) -> Reading[bool]:
    """Read the calls after [TOOL_CALLS].

    Up to tokenizer version 7 they are a JSON list, later `name{...}`, `name[ARGS]{...}` or `name[CALL_ID]id[ARGS]{...}`
    with a [TOOL_CALLS] for each call.
    """
    yield from source.space()
    if (yield from source.literal("[", "{")):
        source.position -= 1
        return (yield from read_json_calls(source, output))
    name = yield from source.until("[CALL_ID]", "[ARGS]", "{")
    if name is None or not is_function_name(name.strip()):
        return False
    if (yield from source.literal("[CALL_ID]")) and (yield from source.until("[ARGS]", "{")) is None:
        return False
    yield from source.literal("[ARGS]")
    yield from source.space()
    return (yield from read_arguments(source, output, name.strip()))
