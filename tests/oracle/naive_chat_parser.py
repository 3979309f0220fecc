"""Reasoning and tool calls of a whole generation, a regular expression or a library call at a time.

It says what the incremental parsers of `twostroke.api.parsers` have to find, and shares nothing with them but the types
of the result: it has the whole text, so it searches where they wait.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from oracle import naive_harmony
from oracle.naive_json_calls import arguments_call, bare, json_calls, json_family
from oracle.naive_tagged_calls import glm45, mistral, python_family, qwen3_coder, section_family
from twostroke.api.parsers.output import ParsedMessage, ToolCall
from twostroke.api.parsers.tool_choice import NamedTool, Tool, ToolChoice

REASONING_TAGS = {
    "deepseek_r1": ("<think>", "</think>"),
    "glm45": ("<think>", "</think>"),
    "qwen3": ("<think>", "</think>"),
    "granite": (r"Here(?: i|')s my thought process:", r"Here(?: i|')s my response:"),
    "mistral": (r"\[THINK\]", r"\[/THINK\]"),
}


def parse(
    tool_call_parser: str | None,
    reasoning_parser: str | None,
    text: str,
    tools: Sequence[Tool],
    *,
    tool_choice: ToolChoice = "auto",
    starts_in_reasoning: bool = False,
) -> ParsedMessage:
    has_channels = reasoning_parser == "openai_gptoss"
    if has_channels:
        reasoning = ""
    else:
        reasoning, text = split_reasoning(reasoning_parser, text, starts_in_reasoning)
    if isinstance(tool_choice, NamedTool):
        pieces = bare(text, "{", lambda at: arguments_call(text, at, tool_choice.name))
    elif tool_choice == "required":
        pieces = bare(text, "[", lambda at: json_calls(text, at, [tool.name for tool in tools], ""))
    elif tool_call_parser == "openai" or has_channels:
        found = naive_harmony.pieces(
            text,
            tools,
            takes_calls=tool_call_parser is not None and tool_choice == "auto" and bool(tools),
            starts_inside=has_channels and starts_in_reasoning,
        )
        reasoning = naive_harmony.joined_thoughts(reasoning, found)
        pieces = [piece for piece in found if not isinstance(piece, naive_harmony.Thought)]
        content = naive_harmony.lines_of(content_of(pieces))
        return ParsedMessage(reasoning, content, tuple(p for p in pieces if isinstance(p, ToolCall)))
    elif tool_call_parser is None or tool_choice == "none" or not tools:
        return ParsedMessage(reasoning, text, ())
    else:
        pieces = PARSERS[tool_call_parser](text, tools)
    return ParsedMessage(reasoning, content_of(pieces), tuple(p for p in pieces if isinstance(p, ToolCall)))


def split_reasoning(parser: str | None, text: str, starts_inside: bool) -> tuple[str, str]:
    if parser is None:
        return "", text
    opening, closing = REASONING_TAGS[parser]
    opened = re.match(rf"\s*{opening}", text)
    if not opened and not starts_inside:
        return "", text
    inside = text[opened.end() if opened else 0 :]
    parts = re.split(closing, inside, maxsplit=1)
    if len(parts) == 1:
        return (inside.lstrip("\n") if inside.strip("\n") else inside), ""
    return parts[0].strip("\n"), parts[1].lstrip("\n")


def content_of(pieces: list[str | ToolCall]) -> str:
    """Text between calls, without the whitespace that has a call on one side and no text on the other."""
    gaps = [""]
    for piece in pieces:
        if isinstance(piece, ToolCall):
            gaps.append("")
        else:
            gaps[-1] += piece
    with_text = [i for i, gap in enumerate(gaps) if gap.strip()]
    content = "".join(gaps)
    if len(gaps) == 1:
        return content
    if not with_text:
        return ""
    content = content.lstrip() if with_text[0] > 0 else content
    return content.rstrip() if with_text[-1] < len(gaps) - 1 else content


PARSERS: dict[str, Callable[[str, Sequence[Tool]], list[str | ToolCall]]] = {
    "deepseek_v3": section_family(
        "<｜tool▁calls▁begin｜>",  # noqa: RUF001
        r"<｜tool▁call▁begin｜>(function<｜tool▁sep｜>(\S+?)\s*)```json",  # noqa: RUF001
        "``` <｜tool▁call▁end｜>",  # noqa: RUF001
        "<｜tool▁calls▁end｜>",  # noqa: RUF001
    ),
    "deepseek_v31": section_family(
        "<｜tool▁calls▁begin｜>",  # noqa: RUF001
        r"<｜tool▁call▁begin｜>(\s*(\S+?)\s*)<｜tool▁sep｜>",  # noqa: RUF001
        "<｜tool▁call▁end｜>",  # noqa: RUF001
        "<｜tool▁calls▁end｜>",  # noqa: RUF001
    ),
    "glm45": glm45,
    "glm47": glm45,
    "granite": json_family(r"<\|tool_call\|>|<tool_call>"),
    "hermes": json_family("<tool_call>", "</tool_call>"),
    "internlm": json_family(r"<\|action_start\|><\|plugin\|>", "<|action_end|>"),
    "jamba": json_family("<tool_calls>", "</tool_calls>"),
    "kimi_k2": section_family(
        "<|tool_calls_section_begin|>",
        r"<\|tool_call_begin\|>(\s*(?:functions\.)?([^\s:]+?)(?::[0-9]+)?\s*)<\|tool_call_argument_begin\|>",
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    ),
    "llama3_json": json_family(r"<\|python_tag\|>", first="{"),
    "llama4_pythonic": python_family("<|python_start|>", "<|python_end|>"),
    "mistral": mistral,
    "openai": lambda text, tools: [
        piece for piece in naive_harmony.pieces(text, tools) if not isinstance(piece, naive_harmony.Thought)
    ],
    "phi4_mini_json": json_family("functools"),
    "pythonic": python_family(),
    "qwen3_coder": qwen3_coder,
    "qwen3_xml": qwen3_coder,
}
