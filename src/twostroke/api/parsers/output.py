"""What a parser has found out, as deltas in their order: reasoning, content and calls, without layout beside markup."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from twostroke.api.parsers.json_text import is_whole_value
from twostroke.api.parsers.reasoning_tokens import ReasoningTokens


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the reasoning, its tags taken off."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallBegin:
    """A tool call begins; what follows of its index are its arguments."""

    index: int
    """0 for the first call of the message."""
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of the JSON text of a call's arguments.

    It is the model's own wherever its family writes JSON: whether it is valid and fits the schema is for the client to
    check, as with OpenAI. A generation that was cut off (`finish_reason` "length") leaves it open.
    """

    index: int
    text: str


Delta = ReasoningDelta | ContentDelta | ToolCallBegin | ToolCallArguments


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One whole call."""

    name: str
    arguments: str
    """JSON text."""


@dataclass(frozen=True, slots=True)
class ParsedMessage:
    """A whole generation."""

    reasoning: str
    content: str
    tool_calls: tuple[ToolCall, ...]


def join_deltas(deltas: list[Delta]) -> ParsedMessage:
    """The message that the deltas of one generation add up to.

    >>> join_deltas([ToolCallBegin(0, "now"), ToolCallArguments(0, "{"), ToolCallArguments(0, "}")]).tool_calls
    (ToolCall(name='now', arguments='{}'),)
    """
    names = [delta.name for delta in deltas if isinstance(delta, ToolCallBegin)]
    arguments: list[list[str]] = [[] for _ in names]
    for delta in deltas:
        if isinstance(delta, ToolCallArguments):
            arguments[delta.index].append(delta.text)
    return ParsedMessage(
        reasoning="".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta)),
        content="".join(delta.text for delta in deltas if isinstance(delta, ContentDelta)),
        tool_calls=tuple(ToolCall(name, "".join(text)) for name, text in zip(names, arguments, strict=True)),
    )


def append_joined(deltas: list[Delta], delta: Delta) -> None:
    """Append a delta, as part of the last one where both are of one kind.

    >>> deltas: list[Delta] = [ContentDelta("It")]
    >>> append_joined(deltas, ContentDelta(" is"))
    >>> deltas
    [ContentDelta(text='It is')]
    """
    match deltas[-1:], delta:
        case [ReasoningDelta(before)], ReasoningDelta(text):
            deltas[-1] = ReasoningDelta(before + text)
        case [ContentDelta(before)], ContentDelta(text):
            deltas[-1] = ContentDelta(before + text)
        case [ToolCallArguments(index, before)], ToolCallArguments(same, text) if index == same:
            deltas[-1] = ToolCallArguments(index, before + text)
        case _:
            deltas.append(delta)


HearContent = Callable[[str, int], object]
"""Hears a piece of content, and how many characters at its beginning may be layout."""


class _Margin:
    """Whitespace that is kept back until it is known to stand between text and text."""

    def __init__(self, stripped: str | None) -> None:
        self._stripped = stripped
        """The characters in question; None for all whitespace."""
        self._kept: list[str] = []
        self._begins_line = False
        """Whether the next text has to stand on a line of its own."""
        self.has_text = False
        """Whether anything else has come."""

    def pass_on(self, text: str, *, drop_before: bool) -> str:
        """What is certain to be text now.

        Args:
            text: what comes next.
            drop_before: whether the whitespace before the first text is layout.
        """
        body = text.rstrip(self._stripped)
        if not body:
            self._kept.append(text)
            return ""
        certain = "".join(self._kept) + body
        self._kept = [text[len(body) :]]
        if self._begins_line or (drop_before and not self.has_text):
            certain = certain.lstrip(self._stripped)
        if self._begins_line:
            certain = f"\n{certain}"
        self._begins_line, self.has_text = False, True
        return certain

    def begin_line(self) -> None:
        """Put a line end between the text so far, if there is any, and the next."""
        self._begins_line = self.has_text

    def rest(self) -> str:
        """What was kept back, given up."""
        rest, self._kept = "".join(self._kept), []
        return rest


class Output:
    """Collects the deltas of one generation.

    Newlines just within the tags of reasoning, and after them, belong to the tags: chat templates write them there.
    Whitespace beside a tool call is layout where there is no text on the other side of it.

        <think>\\n Hm. \\n</think>\\n\\n Sure: \\n<tool_call>...</tool_call>\\n
              [-]     [----------------]     [-]                          [-]   dropped

    Args:
        max_tool_calls: further calls are dropped (`parallel_tool_calls` false); None for no limit.
        hear_content: is told each piece of content as it stands in the text, and how many of its first characters may
            be layout beside a call.
    """

    def __init__(self, max_tool_calls: int | None = None, hear_content: HearContent | None = None) -> None:
        self._hear_content = hear_content
        self._max_tool_calls = max_tool_calls
        self._deltas: list[Delta] = []
        self._num_tool_calls = 0
        self._reasoning = _Margin("\n")
        self._content = _Margin(None)
        self.reasoning_tokens = ReasoningTokens()
        self._last_arguments: list[str] = []
        self._call_is_last = False
        """Whether a call came after the last content."""

    @property
    def has_half_call(self) -> bool:
        """Whether the last call has begun and its arguments are not whole."""
        return self._num_tool_calls > 0 and not is_whole_value("".join(self._last_arguments))

    def reasoning(self, text: str) -> None:
        """More reasoning."""
        if certain := self._reasoning.pass_on(text, drop_before=True):
            append_joined(self._deltas, ReasoningDelta(certain))

    def end_reasoning(self) -> None:
        """Its closing tag has come."""
        self._reasoning.rest()

    def begin_message(self) -> None:
        """A further message of the same turn begins; texts of several messages are lines of one."""
        self._reasoning.begin_line()
        self._content.begin_line()

    def content(self, text: str) -> None:
        """More content, which begins at the source's position."""
        if self._hear_content is not None:
            may_be_layout = self._call_is_last or not self._content.has_text
            self._hear_content(text, len(text) - len(text.lstrip()) if may_be_layout else 0)
        if certain := self._content.pass_on(text, drop_before=self._call_is_last):
            append_joined(self._deltas, ContentDelta(certain))
            self._call_is_last = False

    def verbatim_content(self, text: str) -> None:
        """Content of a generation that can hold no call: nothing is kept back."""
        if self._hear_content is not None:
            self._hear_content(text, 0)
        append_joined(self._deltas, ContentDelta(text))

    def begin_tool_call(self, name: str) -> None:
        """A call begins; the arguments that follow are its own."""
        self._num_tool_calls += 1
        self._call_is_last = True
        if not self._is_dropped:
            self._last_arguments = []
            self._deltas.append(ToolCallBegin(self._num_tool_calls - 1, name))

    def arguments(self, text: str) -> None:
        """More of the arguments of the call that began last."""
        if text and not self._is_dropped:
            self._last_arguments.append(text)
            append_joined(self._deltas, ToolCallArguments(self._num_tool_calls - 1, text))

    def finish(self) -> None:
        """The generation has ended."""
        if rest := self._reasoning.rest():
            append_joined(self._deltas, ReasoningDelta(rest))
        rest = self._content.rest()
        if rest and not self._call_is_last:
            append_joined(self._deltas, ContentDelta(rest))

    def drain(self) -> list[Delta]:
        """The deltas since the last time."""
        drained, self._deltas = self._deltas, []
        return drained

    @property
    def _is_dropped(self) -> bool:
        return self._max_tool_calls is not None and self._num_tool_calls > self._max_tool_calls
