"""A generation of a model, and what it means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from twostroke.api.parsers.output import ParsedMessage, ToolCall
from twostroke.api.parsers.tool_choice import Tool

TOOLS = (
    Tool(
        "get_weather",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "fresh": {"type": "boolean"},
                "options": {"type": "object"},
                "unit": {"type": ["string", "null"]},
                "anything": {},
            },
        },
    ),
    Tool("now"),
)

PARIS = ToolCall("get_weather", '{"city": "Paris"}')
NOW = ToolCall("now", "{}")


@dataclass(frozen=True)
class Output:
    """One generation."""

    name: str
    tool_call_parser: str | None
    text: str
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    reasoning_parser: str | None = None
    prompt: str = ""

    @property
    def message(self) -> ParsedMessage:
        return ParsedMessage(self.reasoning, self.content, self.tool_calls)

    def __str__(self) -> str:
        return f"{self.tool_call_parser or self.reasoning_parser}-{self.name}".replace(" ", "-")


def same_output(name: str, parser: str, text: str, **more: Any) -> Output:
    """Return a case whose output contains no call."""
    return Output(name, parser, text, content=text, **more)
