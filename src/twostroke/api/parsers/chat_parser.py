"""Streaming parser of one choice's text into reasoning, content and tool calls, and stop strings in its content.

A stop string applies to content only:

    <think>Question: 6*7?</think>42 Question: x          stop string "Question:"
           [- ignored  -]        [-------] found here

A second parser reads the text, and stop strings are searched in what it finds to be content. A match is cut from
the raw text, so that all readers of the text see the same answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from twostroke.api.parsers.families import (
    CHANNELS_WITHOUT_CALLS,
    REQUIRED,
    TOOL_CALL_FAMILIES,
    ToolCallFamily,
    named_tool,
    read_content,
    read_plain_content,
)
from twostroke.api.parsers.harmony import ANALYSIS_HEADER, TURN_ENDS, read_analysis
from twostroke.api.parsers.output import Delta, OnContent, Output, ParsedMessage, join_deltas
from twostroke.api.parsers.source import Reading, Source, Stops
from twostroke.api.parsers.tool_choice import NO_TOOLS, ChatTools, NamedTool, Tool, checked_tool_choice
from twostroke.client.stop_strings import StopFinder, StopMatch, StopStrings
from twostroke.errors import InvalidParameter


@dataclass(frozen=True, slots=True)
class ReasoningFamily:
    """Reasoning at the beginning of a generation, up to the first closing tag, or to the end if none comes.

    Tool calls within reasoning are part of it, and later tags are text.
    """

    opens: tuple[str, ...]
    closes: tuple[str, ...]
    starts_open: bool = False
    """Whether the generation begins within reasoning even if neither the prompt nor the model has opened it."""
    has_channels: bool = False
    """Whether each message of a turn is marked as reasoning by its channel; reasoning may then follow content."""
    turn_ends: tuple[str, ...] = ()
    """Tokens that end the model's turn, whether or not its settings list them as end-of-text tokens."""

    def is_open_after(self, prompt: str, said: str = "") -> bool:
        """Return whether the generation begins within reasoning, which many templates open, or close at once.

        Args:
            prompt: the rendered chat, or the end of it.
            said: text of the turn that is continued; content, unless its last tag opens the reasoning.
        """
        said = said.strip()
        end = prompt.rstrip().removesuffix(said).rstrip()
        opened, closed = (max(map(said.rfind, tags)) for tags in (self.opens, self.closes))
        if opened != closed:
            return opened > closed
        if end.endswith(self.opens):
            return True
        return self.starts_open and not said and not end.endswith(self.closes)

    @property
    def markup(self) -> tuple[str, ...]:
        """Texts that may be single tokens of the model."""
        return self.opens + self.closes


THINK = ReasoningFamily(("<think>",), ("</think>",))

REASONING_FAMILIES: dict[str, ReasoningFamily] = {
    "deepseek_r1": ReasoningFamily(("<think>",), ("</think>",), starts_open=True),
    "deepseek_v3": THINK,
    "glm45": THINK,
    "granite": ReasoningFamily(
        ("Here is my thought process:", "Here's my thought process:"), ("Here is my response:", "Here's my response:")
    ),
    "mistral": ReasoningFamily(("[THINK]",), ("[/THINK]",)),
    "openai_gptoss": ReasoningFamily((ANALYSIS_HEADER,), ("<|end|>",), has_channels=True, turn_ends=TURN_ENDS),
    "qwen3": THINK,
    "seed_oss": ReasoningFamily(("<seed:think>",), ("</seed:think>",)),
}
"""Reasoning families by vLLM's names."""


def read_reasoning(source: Source, output: Output, family: ReasoningFamily, *, is_open: bool) -> Reading[bool]:
    """Read the reasoning with its tags; return whether there was any."""
    start = source.position
    yield from source.space()
    has_tag = bool((yield from source.literal(*family.opens)))
    if not has_tag:
        source.position = start
    if not (has_tag or is_open):
        return False
    if not is_open:
        output.reasoning_tokens.begin(0)
    closing = yield from source.copy_until(Stops(*family.closes), output.reasoning)
    source.position += len(closing)
    if closing:
        output.end_reasoning()
        output.reasoning_tokens.end(source.place)
    return True


Family = TypeVar("Family")

_NEWLINES = re.compile(r"\n*")


class ChatParser:
    """Parser of one choice's text, in pieces, into deltas.

    The deltas add up to the same message for any split of the text. No text is lost: text that is not markup, or looks
    like a call and is none, is passed on unchanged. Only layout beside markup is dropped (`Output`).

    Args:
        tool_calls: syntax of calls; None if there can be none.
        reasoning: syntax of reasoning; None if it is not separated from content.
        tools: functions that may be called.
        starts_in_reasoning: whether the text begins within the reasoning.
        max_tool_calls: number of calls after which further calls are dropped.
        on_content: receives each piece of content, as in Output.
    """

    def __init__(
        self,
        tool_calls: ToolCallFamily | None,
        reasoning: ReasoningFamily | None,
        *,
        tools: Sequence[Tool] = (),
        starts_in_reasoning: bool = False,
        max_tool_calls: int | None = None,
        on_content: OnContent | None = None,
    ) -> None:
        self._tool_calls = tool_calls
        self._reasoning = reasoning
        self._tools: Mapping[str, Tool] = {tool.name: tool for tool in tools}
        self._starts_in_reasoning = starts_in_reasoning
        self._source = Source()
        self._output = Output(max_tool_calls, on_content)
        self._reading = self._read()

    @property
    def markup(self) -> frozenset[str]:
        """Texts that the parser must see; the detokenizer must not skip the special tokens among them."""
        calls = (*self._tool_calls.markers, *self._tool_calls.markup) if self._tool_calls else ()
        return frozenset(calls + (self._reasoning.markup if self._reasoning else ()))

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens up to the end of the reasoning, its tags included (`completion_tokens_details.reasoning_tokens`).

        The same whether a generation is read at once or streamed. 0 until it is known that there is reasoning.
        """
        return self._output.reasoning_tokens.num_tokens

    @property
    def has_incomplete_call(self) -> bool:
        """Whether the text ends within a call, which must not be treated as complete."""
        return self._output.has_incomplete_call

    @property
    def place(self) -> int:
        """Characters before the current read position."""
        return self._source.place

    @property
    def num_decided(self) -> int:
        """Characters whose role (reasoning, content, call) is certain."""
        return self._source.num_forgotten

    def push(self, text: str, token_texts: Iterable[str] = ()) -> list[Delta]:
        """Return the deltas that are certain with the next text.

        Args:
            text: continuation of the text; it may lag behind the tokens.
            token_texts: text that each new token adds, for `num_reasoning_tokens`; read only as far as the reasoning
            goes.
        """
        assert not self._source.has_ended, "text after the end"
        self._source.append(text)
        next(self._reading, None)
        self._output.reasoning_tokens.take(token_texts)
        return self._output.drain()

    def finish(self, *, is_cut: bool = False) -> list[Delta]:
        """Return the remaining deltas at the end of the generation.

        Args:
            is_cut: whether the model would have gone on, as with max_tokens. A call that is cut in its head is then
                dropped; otherwise it is content.
        """
        self._source.has_ended, self._source.is_cut = True, is_cut
        next(self._reading, None)
        self._output.finish()
        return self._output.drain()

    def parse(self, text: str, token_texts: Iterable[str] = (), *, is_cut: bool = False) -> ParsedMessage:
        """Return a whole generation as a message; the arguments are those of `push` and `finish`."""
        return join_deltas(self.push(text, token_texts) + self.finish(is_cut=is_cut))

    def _read(self) -> Reading[None]:
        source, output = self._source, self._output
        if self._starts_in_reasoning:
            output.reasoning_tokens.begin(0)
        if self._reasoning is None or not self._reasoning.has_channels:
            if self._reasoning is not None:
                yield from self._read_reasoning(self._reasoning)
            output.reasoning_tokens.close()
        elif self._starts_in_reasoning:
            yield from read_analysis(source, output)
        if self._tool_calls is None:
            yield from read_plain_content(source, output.plain_content)
        else:
            yield from read_content(source, output, self._tool_calls, self._tools)

    def _read_reasoning(self, family: ReasoningFamily) -> Reading[None]:
        source, output = self._source, self._output
        if (yield from read_reasoning(source, output, family, is_open=self._starts_in_reasoning)):
            yield from source.every(_NEWLINES)
            source.forget()


def make_parser(
    tool_call_parser: str | None,
    reasoning_parser: str | None,
    asked: ChatTools = NO_TOOLS,
    *,
    prompt: str | None = "",
    said: str = "",
    calls_come_first: bool = False,
    on_content: OnContent | None = None,
) -> ChatParser:
    """Return a parser for one choice of one request.

    Args:
        tool_call_parser: a name of TOOL_CALL_FAMILIES; None if calls are not parsed.
        reasoning_parser: a name of REASONING_FAMILIES; None if reasoning is not separated from content.
        asked: tools of the request; a required or named call follows `tool_choice_schema` or `required_call_syntax`.
        prompt: the rendered chat, or the end of it, which may have opened the reasoning; None: nothing has opened it.
        said: text of the turn that is continued, at the end of the prompt.
        calls_come_first: whether the text is an answer of some form, or calls in the syntax of `optional_call_syntax`.
        on_content: receives each piece of content, as in Output.

    Raises:
        InvalidParameter: there is no parser of that name, or the chosen tool is not among the tools.
    """
    family = _family_named("tool_call_parser", tool_call_parser, TOOL_CALL_FAMILIES)
    reasoning = _family_named("reasoning_parser", reasoning_parser, REASONING_FAMILIES)
    tool_choice = checked_tool_choice(asked.tools, asked.choice)
    if family is not None and family.required_header and asked.required:
        family = replace(family, comes_first=True, has_content=False)
    elif isinstance(tool_choice, NamedTool):
        family = named_tool(tool_choice.name)
    elif tool_choice == "required":
        family = REQUIRED
    elif tool_choice == "none" or not asked.tools:
        family = None
    elif family is not None and calls_come_first:
        family = replace(family, comes_first=True)
    if family is None and reasoning is not None and reasoning.has_channels:
        family = CHANNELS_WITHOUT_CALLS
    return ChatParser(
        family,
        reasoning,
        tools=asked.tools,
        starts_in_reasoning=reasoning is not None and prompt is not None and reasoning.is_open_after(prompt, said),
        max_tool_calls=None if asked.parallel else 1,
        on_content=on_content,
    )


def _family_named(parameter: str, name: str | None, families: Mapping[str, Family]) -> Family | None:
    if name is not None and name not in families:
        raise InvalidParameter(parameter, name, f"must be one of {', '.join(sorted(families))}")
    return None if name is None else families[name]


class ContentStopFinder(StopFinder):
    """Search for stop strings in the content of one generation.

    Positions are characters of the raw text. Text is held back while it may become content, and content while it may be
    the beginning of a stop string.

    Args:
        stops: stop strings.
        make_parser: makes a parser of the text that passes content to the given function.
    """

    def __init__(self, stops: Sequence[str], make_parser: Callable[[OnContent], ChatParser]) -> None:
        self._strings = tuple(stops)
        self._parser = make_parser(self._hear)
        self._stops = StopStrings(stops)
        self._held = ""
        self._num_released = 0
        self._content_end = 0
        """Position after the latest content."""
        self._num_watched = 0
        """Characters at the end of that content that may be the beginning of a stop string."""
        self._may_stop = True
        self._found: StopMatch | None = None

    def push(self, text: str, may_stop: bool = True) -> tuple[str, StopMatch | None]:
        self._held += text
        self._may_stop = may_stop
        self._parser.push(text)
        decided = self._parser.num_decided
        if decided <= self._content_end:
            decided = min(decided, self._content_end - self._num_watched)
        return self._taken(decided)

    def finish(self, may_stop: bool = True, *, is_cut: bool = False) -> tuple[str, StopMatch | None]:
        """Take the end of the text, as in StopFinder.finish; undecided text may turn out to be content."""
        self._may_stop = may_stop
        self._parser.finish(is_cut=is_cut)
        return self._taken(self._num_released + len(self._held))

    def _taken(self, until: int) -> tuple[str, StopMatch | None]:
        start = self._num_released
        if self._found is not None:
            text, self._held = self._held, ""
            return text, StopMatch(self._found.stop, self._found.start - start, self._found.end - start)
        text = self._held[: until - start]
        self._held = self._held[len(text) :]
        self._num_released += len(text)
        return text, None

    def _hear(self, content: str, num_layout: int) -> None:
        if self._found is not None:
            return
        start = self._parser.place
        if start != self._content_end:  # other text separates this content from the last
            self._stops, self._num_watched = StopStrings(self._strings), 0
            self._content_end = start
        self._search(content[:num_layout], may_stop=False)
        self._search(content[num_layout:], may_stop=self._may_stop)

    def _search(self, content: str, *, may_stop: bool) -> None:
        if not content:
            return
        first = self._content_end - self._num_watched
        self._content_end += len(content)
        released, match = self._stops.push(content, may_stop)
        self._num_watched = self._content_end - first - len(released)
        if match is not None:
            self._found = StopMatch(match.stop, first + match.start, first + match.end)
