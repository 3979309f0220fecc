"""Families of tool call syntax, by vLLM's parser names, and the reading that is common to all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from twostroke.api.parsers import beginnings
from twostroke.api.parsers.beginnings import text
from twostroke.api.parsers.glm45 import MARKERS as GLM45_MARKERS
from twostroke.api.parsers.glm45 import MARKUP as GLM45_MARKUP
from twostroke.api.parsers.glm45 import read_glm45_call
from twostroke.api.parsers.harmony import CALL_END, CALL_HEADER, read_message
from twostroke.api.parsers.harmony import MARKERS as HARMONY_MARKERS
from twostroke.api.parsers.harmony import MARKUP as HARMONY_MARKUP
from twostroke.api.parsers.json_calls import (
    DEEPSEEK_SEPARATOR,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    KIMI_K2,
    MISTRAL_MARKUP,
    CallSection,
    is_function_name,
    read_arguments,
    read_json_calls,
    read_mistral_calls,
    read_section,
)
from twostroke.api.parsers.output import Output
from twostroke.api.parsers.python_calls import is_python_name, read_python_calls
from twostroke.api.parsers.qwen3_coder import MARKERS as QWEN3_CODER_MARKERS
from twostroke.api.parsers.qwen3_coder import read_qwen3_coder_call
from twostroke.api.parsers.source import Reading, Source, Stops
from twostroke.api.parsers.tool_choice import Tool, arguments_schema
from twostroke.errors import InvalidParameter
from twostroke.grammar.backend import OptionalCallSyntax, RequiredCallSyntax

Tools = Mapping[str, Tool]
"""Tools by name."""
ReadCalls = Callable[[Source, Output, Tools, str], Reading[bool]]
"""Function that reads the calls after a marker, its last argument; if there is none it emits nothing, returns False."""


@dataclass(frozen=True, slots=True)
class ToolCallFamily:
    """Tool call syntax of a family: where calls may begin, and how they are read."""

    markers: tuple[str, ...]
    """Texts that precede calls, anywhere in the content. None is a prefix of another."""
    read_calls: ReadCalls
    bare: str = ""
    """First character of calls without a marker; such calls must be at the beginning of the content."""
    markup: tuple[str, ...] = ()
    """Further texts that may be single tokens of the model."""
    heads: tuple[str, ...] = ()
    """Lark rules of the text after each marker, then of the text without a marker, until this is certainly a call.

    Calls as JSON without a marker have a schema instead.
    """
    is_name: Callable[[str], bool] = is_function_name
    """Function that tells whether a name after a marker can be a function's name."""
    comes_first: bool = False
    """Whether a marker at the beginning of the text is certainly that of a call, and no calls follow content."""
    has_content: bool = True
    """Whether text outside of calls is content; otherwise it is part of a call that was cut, and is dropped."""
    reasoning_parser: str = ""
    """The only reasoning parser that this family works with; empty for any, or none."""
    required_header: str = ""
    """Text before the arguments of a required call, with `{name}` for the function's name; `required_end` follows them.

    Empty if such a call is JSON alone.
    """
    required_end: str = ""


def read_content(source: Source, output: Output, family: ToolCallFamily, tools: Tools) -> Reading[None]:
    """Read content and calls to the end of the text; the source must begin at its position.

    A marker without a call after it is content, unless the text was cut before it could be one.
    """
    has_called = False
    if family.bare:
        yield from source.space()
        if (yield from source.literal(family.bare)):
            source.position -= 1
            has_called = yield from _read_calls(source, output, family, tools, "")
        if not has_called:
            source.position = 0
    if family.comes_first and not has_called and not (yield from _read_first_calls(source, output, family, tools)):
        return
    emit = output.content if family.has_content else _drop
    if not family.markers:
        yield from read_plain_content(source, emit)
        return
    markers = Stops(*family.markers)
    while marker := (yield from source.copy_until(markers, emit, drops_partial_stop=True)):
        source.position = len(marker)
        if not (yield from _read_calls(source, output, family, tools, marker)):
            source.position = 0
            emit(marker)
            source.position = len(marker)


def _read_first_calls(source: Source, output: Output, family: ToolCallFamily, tools: Tools) -> Reading[bool]:
    """Read calls at the beginning of the text. Without any, read everything as content or as a call that was cut."""
    yield from source.space()
    marker = (yield from source.literal(*family.markers)) if family.markers else ""
    if marker and (yield from _read_calls(source, output, family, tools, marker)):
        return True
    unread = source.text[source.position :]
    is_cut = source.has_ended and unread and any(text.startswith(unread) for text in family.markers)
    if not marker and not is_cut:
        source.position = 0
    yield from read_plain_content(source, output.content if family.has_content and not marker and not is_cut else _drop)
    return False


def _read_calls(source: Source, output: Output, family: ToolCallFamily, tools: Tools, marker: str) -> Reading[bool]:
    """Read the calls after a marker; return False and emit nothing if there is none.

    Nothing is emitted for a call that was cut in its head, either. Without a marker, only a known function name
    distinguishes a call from content.
    """
    source.wanted_more_text = False
    is_call = yield from family.read_calls(source, output, tools, marker)
    names_function = marker != "" or any(name in source.text for name in tools)
    is_half = source.is_cut and source.wanted_more_text and (is_call or names_function)
    if is_half:
        source.position = len(source.text)
    return is_call or is_half


def _drop(_: str) -> None:
    """Discard text that must not reach the client."""


def read_plain_content(source: Source, emit: Callable[[str], None]) -> Reading[None]:
    """Read content that cannot contain a call."""
    while (yield from source.more()):
        emit(source.text[source.position :])
        source.position = len(source.text)
        source.forget()


def named_tool(name: str) -> ToolCallFamily:
    """Return the family for a named tool choice: the output is the arguments and nothing else."""

    def read(source: Source, output: Output, _tools: Tools, _marker: str) -> Reading[bool]:
        return read_arguments(source, output, name)

    return ToolCallFamily((), read, bare="{", has_content=False)


def optional_call_syntax(family: ToolCallFamily, names: Sequence[str]) -> OptionalCallSyntax:
    """Return the syntax of optional calls of these functions, for an answer that otherwise has a form."""
    bare = None
    if family.bare == "{":
        call = {"name": {"enum": list(names)}, "parameters": {"type": "object"}}
        bare = {"type": "object", "properties": call, "required": list(call), "additionalProperties": False}
    befores = [*(beginnings.of_pieces(marker, family.markup) for marker in family.markers), ""]
    ways = [f"{before} {head}" for before, head in zip(befores, family.heads, strict=False)]
    known = [name for name in names if family.is_name(name)]
    beginning = beginnings.rules(ways, known) if ways and known else ""
    return OptionalCallSyntax(
        markers=family.markers if beginning else (), markup=family.markup, bare=bare, beginning=beginning
    )


def required_call_syntax(family: ToolCallFamily, tools: Sequence[Tool]) -> RequiredCallSyntax | None:
    """Return the syntax of a required call of one of these functions; None for JSON alone.

    Raises:
        InvalidParameter: a name that this family's calls cannot contain, or parameters that are not an object's.
    """
    if not family.required_header or not tools:
        return None
    for tool in tools:
        if not family.is_name(tool.name):
            limit = "cannot be called: names in calls of this model have no spaces, quotes or brackets"
            raise InvalidParameter("tools", tool.name, limit, "Rename it, or leave tool_choice out.")
    markup = (*family.markers, *family.markup)
    ways = [
        f"{beginnings.of_pieces(family.required_header.format(name=tool.name), markup)} @arguments{number}"
        for number, tool in enumerate(tools)
    ]
    return RequiredCallSyntax(
        rules=f"start: ({' | '.join(ways)}) {text(family.required_end)}?",
        schemas={f"arguments{number}": arguments_schema(tool) for number, tool in enumerate(tools)},
        markup=markup,
    )


def _json(*markers: str, end: str = "", bare: str = "", markup: tuple[str, ...] = ()) -> ToolCallFamily:
    def read(source: Source, output: Output, tools: Tools, marker: str) -> Reading[bool]:
        return read_json_calls(source, output, names=None if marker else tools, end=end if marker else "")

    heads = (beginnings.JSON_HEAD,) * len(markers)
    return ToolCallFamily(markers, read, bare, markup or ((end,) if end else ()), heads)


def _python(*markers: str, end: str = "") -> ToolCallFamily:
    def read(source: Source, output: Output, tools: Tools, marker: str) -> Reading[bool]:
        return read_python_calls(source, output, tools, end if marker else "")

    head = f'"[" WS? {beginnings.PYTHON_CALL}'
    return ToolCallFamily(
        markers, read, "[", (end,) if end else (), (f"WS? {head}",) * len(markers) + (head,), is_python_name
    )


def _section(section: CallSection, head: str, *more_markup: str) -> ToolCallFamily:
    def read(source: Source, output: Output, _tools: Tools, _marker: str) -> Reading[bool]:
        return read_section(source, output, section)

    texts = {"call": text(section.call_begin), "after": text(section.after_name)}
    heads = (f"WS? {head.format(**texts)} WS? open",)
    return ToolCallFamily((section.begin,), read, markup=(*section.markup, *more_markup), heads=heads)


def _mistral(source: Source, output: Output, _tools: Tools, _marker: str) -> Reading[bool]:
    return read_mistral_calls(source, output)


REQUIRED = replace(_json(bare="["), has_content=False)
"""Family for a required call: the output is a list as described by `tool_choice_schema`."""

_QWEN3_CODER_BODY = 'WS? ("<parameter=" | "</function>" | open)'
QWEN3_CODER = ToolCallFamily(
    QWEN3_CODER_MARKERS,
    read_qwen3_coder_call,
    markup=("</tool_call>",),
    heads=(f'WS? "<function=" name ">" {_QWEN3_CODER_BODY}', f'name ">" {_QWEN3_CODER_BODY}'),
)
MISTRAL = ToolCallFamily(
    MISTRAL_MARKUP[:1],
    _mistral,
    markup=MISTRAL_MARKUP,
    heads=(f'({beginnings.JSON_HEAD} | WS? name ("[CALL_ID]" /[A-Za-z0-9]{{1,32}}/ "[ARGS]" | "[ARGS]"?) WS? open)',),
)
GLM45 = ToolCallFamily(
    GLM45_MARKERS,
    read_glm45_call,
    markup=GLM45_MARKUP,
    heads=('WS? name WS? ("<arg_key>" | "</tool_call>")',),
)
HARMONY = ToolCallFamily(
    HARMONY_MARKERS,
    read_message,
    markup=HARMONY_MARKUP,
    heads=('"commentary to=functions." name (" "? "<|constrain|>" "json" | " json")? "<|message|>" WS? open',),
    reasoning_parser="openai_gptoss",
    required_header=CALL_HEADER,
    required_end=CALL_END,
)
CHANNELS_WITHOUT_CALLS = replace(HARMONY, read_calls=partial(read_message, takes_calls=False))
"""Family for a model that writes channels, in a request without tools."""

TOOL_CALL_FAMILIES: dict[str, ToolCallFamily] = {
    "deepseek_v3": _section(DEEPSEEK_V3, f'{{call}} "function" {text(DEEPSEEK_SEPARATOR)} name WS? {{after}}',
                            DEEPSEEK_SEPARATOR),
    "deepseek_v31": _section(DEEPSEEK_V31, "{call} WS? name WS? {after}"),
    "glm45": GLM45,
    "glm47": GLM45,
    "granite": _json("<|tool_call|>", "<tool_call>"),
    "hermes": _json("<tool_call>", end="</tool_call>"),
    "internlm": _json("<|action_start|><|plugin|>", end="<|action_end|>",
                      markup=("<|action_start|>", "<|plugin|>", "<|action_end|>")),
    "jamba": _json("<tool_calls>", end="</tool_calls>"),
    "kimi_k2": _section(KIMI_K2, '{call} WS? "functions."? name (":" /[0-9]+/)? WS? {after}'),
    "llama3_json": _json("<|python_tag|>", bare="{"),
    "llama4_pythonic": _python("<|python_start|>", end="<|python_end|>"),
    "mistral": MISTRAL,
    "openai": HARMONY,
    "phi4_mini_json": _json("functools"),
    "pythonic": _python(),
    "qwen3_coder": QWEN3_CODER,
    "qwen3_xml": QWEN3_CODER,
}  # fmt: skip
