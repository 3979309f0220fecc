"""What a chat parser says about a generation: pieces of reasoning, of content and of tool calls, in their order."""

from __future__ import annotations

from dataclasses import dataclass


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
