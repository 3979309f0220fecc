"""One generation's text taken apart into reasoning, content and tool calls while it comes; stop strings of its content.

A stop string stops the answer, and nothing else:

    <think>Question: 6*7?</think>42 Question: x          stop string "Question:"
           [- may hold it -]        [-------] found here

A parser reads the text beside the one that writes the answer, and stop strings are looked for in what it finds to be
content. What is found is cut from the raw text, so that everybody who reads it sees the same answer.
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
from twostroke.api.parsers.output import Delta, HearContent, Output, ParsedMessage, join_deltas
from twostroke.api.parsers.source import Reading, Source, Stops
from twostroke.api.parsers.tool_choice import NO_TOOLS, ChatTools, NamedTool, Tool, checked_tool_choice
from twostroke.client.stop_strings import StopFinder, StopMatch, StopStrings
from twostroke.errors import InvalidParameter


@dataclass(frozen=True, slots=True)
class ReasoningFamily:
    """Reasoning is what the generation begins with, up to the first closing tag, or to the end if none comes.

    A tool call within it is a thought, and tags after it are text.
    """

    opens: tuple[str, ...]
    closes: tuple[str, ...]
    starts_open: bool = False
    """Whether the generation begins within it even if neither the prompt nor the model has opened it."""
    has_channels: bool = False
    """Whether each message of a turn says by its channel whether it is reasoning; it may come after content then."""
    turn_ends: tuple[str, ...] = ()
    """Tokens with which the model ends its turn, whether or not its settings have them among the end-of-text tokens."""

    def is_open_after(self, prompt: str, said: str = "") -> bool:
        """Whether the generation begins within the reasoning, which many templates open, or close at once.

        Args:
            prompt: the rendered chat, or the end of it.
            said: what the turn says already that is continued; an answer, unless its last tag opens the reasoning.
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
        """What may be single tokens of the model."""
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
"""By vLLM's names."""


def read_reasoning(source: Source, output: Output, family: ReasoningFamily, *, is_open: bool) -> Reading[bool]:
    """The reasoning with its tags, if there is any; whether there was."""
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
    """The text of one choice, in pieces, to deltas.

    However the text is cut, the deltas add up to the same message. No text is lost: what is not markup, or looks like a
    call and is none, comes out as it is; only layout beside markup goes (`Output`).

    Args:
        tool_calls: how calls are written; None if there can be none.
        reasoning: how reasoning is written; None if it is not told from content.
        tools: what may be called.
        starts_in_reasoning: whether the text begins within the reasoning.
        max_tool_calls: further calls are dropped.
        hear_content: see Output.
    """

    def __init__(
        self,
        tool_calls: ToolCallFamily | None,
        reasoning: ReasoningFamily | None,
        *,
        tools: Sequence[Tool] = (),
        starts_in_reasoning: bool = False,
        max_tool_calls: int | None = None,
        hear_content: HearContent | None = None,
    ) -> None:
        self._tool_calls = tool_calls
        self._reasoning = reasoning
        self._tools: Mapping[str, Tool] = {tool.name: tool for tool in tools}
        self._starts_in_reasoning = starts_in_reasoning
        self._source = Source()
        self._output = Output(max_tool_calls, hear_content)
        self._reading = self._read()

    @property
    def markup(self) -> frozenset[str]:
        """Texts that the parser has to see: those that are special tokens must not be skipped by the detokenizer."""
        calls = (*self._tool_calls.markers, *self._tool_calls.markup) if self._tool_calls else ()
        return frozenset(calls + (self._reasoning.markup if self._reasoning else ()))

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens up to the end of the reasoning, its tags among them (`completion_tokens_details.reasoning_tokens`).

        The same whether a generation is read at once or as it comes. 0 before it is known that there is reasoning.
        """
        return self._output.reasoning_tokens.num_tokens

    @property
    def has_half_call(self) -> bool:
        """Whether the text ends within a call, which nobody may take for one that the model has made."""
        return self._output.has_half_call

    @property
    def place(self) -> int:
        """Characters before what is read now."""
        return self._source.place

    @property
    def num_decided(self) -> int:
        """Characters of which it is certain what they are."""
        return self._source.num_forgotten

    def push(self, text: str, token_texts: Iterable[str] = ()) -> list[Delta]:
        """What is certain with the next text.

        Args:
            text: follows what was pushed before; it may lag behind the tokens.
            token_texts: what each new token adds to the text, for `num_reasoning_tokens`. Read as far as the reasoning
                goes.
        """
        assert not self._source.has_ended, "text after the end"
        self._source.append(text)
        next(self._reading, None)
        self._output.reasoning_tokens.take(token_texts)
        return self._output.drain()

    def finish(self, *, is_cut: bool = False) -> list[Delta]:
        """The generation has ended: what is left.

        Args:
            is_cut: whether the model would have gone on, as where max_tokens ends it. A call that is cut in its head is
                left out then; otherwise it is content, as nothing else is to come.
        """
        self._source.has_ended, self._source.is_cut = True, is_cut
        next(self._reading, None)
        self._output.finish()
        return self._output.drain()

    def parse(self, text: str, token_texts: Iterable[str] = (), *, is_cut: bool = False) -> ParsedMessage:
        """A whole generation as a message; the arguments are those of `push` and `finish`."""
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
            yield from read_plain_content(source, output.verbatim_content)
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
    hear_content: HearContent | None = None,
) -> ChatParser:
    """A parser for one choice of one request.

    Args:
        tool_call_parser: a name of TOOL_CALL_FAMILIES; None if the model's calls are not to be looked for.
        reasoning_parser: a name of REASONING_FAMILIES; None if reasoning is not to be told from content.
        asked: what the request offers; a required or named call is one of `tool_choice_schema`, or of `required_call`.
        prompt: the rendered chat, or the end of it, which may have opened the reasoning; None: nothing has opened it.
        said: what the turn says already that is continued, at the end of the prompt.
        calls_come_first: the text is an answer of some form, or calls as `free_calls` describes them.
        hear_content: see Output.

    Raises:
        InvalidParameter: there is no parser of that name, or the tools do not have what was chosen.
    """
    family = _looked_up("tool_call_parser", tool_call_parser, TOOL_CALL_FAMILIES)
    reasoning = _looked_up("reasoning_parser", reasoning_parser, REASONING_FAMILIES)
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
        hear_content=hear_content,
    )


def _looked_up(parameter: str, name: str | None, families: Mapping[str, Family]) -> Family | None:
    if name is not None and name not in families:
        raise InvalidParameter(parameter, name, f"must be one of {', '.join(sorted(families))}")
    return None if name is None else families[name]


class AnswerStops(StopFinder):
    """Looks for stop strings in the content of one generation.

    Places are characters of the raw text. Text is held while it may become content, or is content that may be the
    beginning of a stop string.

    Args:
        stops: the strings.
        make_parser: makes a parser of the text, which tells content to what it is given.
    """

    def __init__(self, stops: Sequence[str], make_parser: Callable[[HearContent], ChatParser]) -> None:
        self._strings = tuple(stops)
        self._parser = make_parser(self._hear)
        self._stops = StopStrings(stops)
        self._held = ""
        self._num_released = 0
        self._content_end = 0
        """Place behind the content that was heard last."""
        self._num_watched = 0
        """Characters at the end of that content which may be the beginning of a stop string."""
        self._may_stop = True
        self._found: StopMatch | None = None

    def push(self, text: str, may_stop: bool = True) -> tuple[str, StopMatch | None]:
        """Take the next text, as StopFinder.push."""
        self._held += text
        self._may_stop = may_stop
        self._parser.push(text)
        decided = self._parser.num_decided
        if decided <= self._content_end:
            decided = min(decided, self._content_end - self._num_watched)
        return self._taken(decided)

    def finish(self, may_stop: bool = True, *, is_cut: bool = False) -> tuple[str, StopMatch | None]:
        """Take the end of the text, as StopFinder.finish: what was undecided may turn out to be content."""
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
        if start != self._content_end:  # something else stands between this content and the last
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
