"""Deltas that a parser emits, in order: reasoning, content and calls, without layout beside markup."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from twostroke.api.parsers.json_text import is_complete_value
from twostroke.api.parsers.reasoning_tokens import ReasoningTokens


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More reasoning, without its tags."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More content of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallBegin:
    """Beginning of a tool call; deltas of its index that follow are its arguments."""

    index: int
    """Index of the call in the message, from 0."""
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More JSON text of a call's arguments.

    If the family writes JSON, it is the model's own text. The client must check that it is valid and matches the
    schema, as with OpenAI. It stays incomplete if the generation was cut off (`finish_reason` "length").
    """

    index: int
    text: str


Delta = ReasoningDelta | ContentDelta | ToolCallBegin | ToolCallArguments


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One whole call."""

    name: str
    arguments: str
    """JSON text of the arguments."""


@dataclass(frozen=True, slots=True)
class ParsedMessage:
    """A whole generation."""

    reasoning: str
    content: str
    tool_calls: tuple[ToolCall, ...]


def join_deltas(deltas: list[Delta]) -> ParsedMessage:
    """Return the message that the deltas of one generation add up to.

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
    """Append a delta, merged with the last one if both are of one kind.

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


OnContent = Callable[[str, int], object]
"""Callback for a piece of content, and the number of its first characters that may be layout."""


class _WhitespaceBuffer:
    """Filter that holds whitespace back until text follows it."""

    def __init__(self, stripped: str | None) -> None:
        self._stripped = stripped
        """Characters to hold back; None for all whitespace."""
        self._kept: list[str] = []
        self._begins_line = False
        """Whether the next text must begin on a new line."""
        self.has_text = False
        """Whether any other text has come."""

    def pass_on(self, text: str, *, drop_before: bool) -> str:
        """Return the text that is now certain.

        Args:
            text: the next text.
            drop_before: whether whitespace before the first text is layout.
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
        """Put a line break between the text so far, if any, and the next text."""
        self._begins_line = self.has_text

    def rest(self) -> str:
        """Return the whitespace that is held back, and forget it."""
        rest, self._kept = "".join(self._kept), []
        return rest


class Output:
    """Collector of the deltas of one generation.

    Newlines just within and after the tags of reasoning belong to the tags, because chat templates write them there.
    Whitespace beside a tool call is layout if there is no text on its other side.

        <think>\\n Hm. \\n</think>\\n\\n Sure: \\n<tool_call>...</tool_call>\\n
              [-]     [----------------]     [-]                          [-]   dropped

    Args:
        max_tool_calls: number of calls after which calls are dropped (`parallel_tool_calls` false); None for no limit.
        on_content: receives each piece of content as it is in the text, and the number of its first characters that
            may be layout beside a call.
    """

    def __init__(self, max_tool_calls: int | None = None, on_content: OnContent | None = None) -> None:
        self._on_content = on_content
        self._max_tool_calls = max_tool_calls
        self._deltas: list[Delta] = []
        self._num_tool_calls = 0
        self._reasoning = _WhitespaceBuffer("\n")
        self._content = _WhitespaceBuffer(None)
        self.reasoning_tokens = ReasoningTokens()
        self._last_arguments: list[str] = []
        self._call_is_last = False
        """Whether a call came after the last content."""

    @property
    def has_incomplete_call(self) -> bool:
        """Whether the last call has begun and its arguments are incomplete."""
        return self._num_tool_calls > 0 and not is_complete_value("".join(self._last_arguments))

    def reasoning(self, text: str) -> None:
        """Add text to the reasoning."""
        if certain := self._reasoning.pass_on(text, drop_before=True):
            append_joined(self._deltas, ReasoningDelta(certain))

    def end_reasoning(self) -> None:
        """End the reasoning at its closing tag."""
        self._reasoning.rest()

    def begin_message(self) -> None:
        """Begin a further message of the same turn; texts of several messages are joined by line breaks."""
        self._reasoning.begin_line()
        self._content.begin_line()

    def content(self, text: str) -> None:
        """Add content, which begins at the source's position."""
        if self._on_content is not None:
            may_be_layout = self._call_is_last or not self._content.has_text
            self._on_content(text, len(text) - len(text.lstrip()) if may_be_layout else 0)
        if certain := self._content.pass_on(text, drop_before=self._call_is_last):
            append_joined(self._deltas, ContentDelta(certain))
            self._call_is_last = False

    def plain_content(self, text: str) -> None:
        """Add content of a generation that can contain no call; nothing is held back."""
        if self._on_content is not None:
            self._on_content(text, 0)
        append_joined(self._deltas, ContentDelta(text))

    def begin_tool_call(self, name: str) -> None:
        """Begin a call; the arguments added next belong to it."""
        self._num_tool_calls += 1
        self._call_is_last = True
        if not self._is_dropped:
            self._last_arguments = []
            self._deltas.append(ToolCallBegin(self._num_tool_calls - 1, name))

    def arguments(self, text: str) -> None:
        """Add text to the arguments of the latest call."""
        if text and not self._is_dropped:
            self._last_arguments.append(text)
            append_joined(self._deltas, ToolCallArguments(self._num_tool_calls - 1, text))

    def finish(self) -> None:
        """Release held text at the end of the generation."""
        if rest := self._reasoning.rest():
            append_joined(self._deltas, ReasoningDelta(rest))
        rest = self._content.rest()
        if rest and not self._call_is_last:
            append_joined(self._deltas, ContentDelta(rest))

    def drain(self) -> list[Delta]:
        """Return and remove the deltas collected so far."""
        drained, self._deltas = self._deltas, []
        return drained

    @property
    def _is_dropped(self) -> bool:
        return self._max_tool_calls is not None and self._num_tool_calls > self._max_tool_calls
