"""Calls as a name and JSON arguments between markup of their own: DeepSeek, Kimi and Mistral."""

from __future__ import annotations

import re
from dataclasses import dataclass

from twostroke.api.parsers.json_calls import is_function_name, read_arguments, read_json_calls
from twostroke.api.parsers.output import Output
from twostroke.api.parsers.source import Reading, Source


@dataclass(frozen=True, slots=True)
class CallSection:
    """How a family writes its calls.

        <begin> <call_begin> name <after_name> {...} <call_end> <call_begin> ... <call_end> <end>

    The name is group 1 of `name`, which has to match everything between the markup around it.
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
        """What may be single tokens of the model."""
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
DEEPSEEK_V31 = CallSection(
    begin=DEEPSEEK_V3.begin,
    end=DEEPSEEK_V3.end,
    call_begin=DEEPSEEK_V3.call_begin,
    name=re.compile(r"\s*(\S+)\s*"),
    after_name=DEEPSEEK_SEPARATOR,
    after_arguments="",
    call_end=DEEPSEEK_V3.call_end,
)
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
    """The calls of a section, behind its `begin`; False if there is none."""
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
    """What follows [TOOL_CALLS]: a JSON list up to tokenizer version 7, then `name{...}`, `name[ARGS]{...}` or
    `name[CALL_ID]id[ARGS]{...}` with a [TOOL_CALLS] for each call.
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
