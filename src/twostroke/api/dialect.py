"""How the served model writes reasoning and tool calls, and what that asks of a chat's prompt and tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from twostroke.api.parsers.chat_parser import ChatParser, make_parser
from twostroke.api.parsers.families import TOOL_CALL_FAMILIES, free_calls
from twostroke.api.parsers.output import HearContent
from twostroke.api.parsers.tool_choice import NamedTool, Tool, ToolChoice, checked_tool_choice, tool_choice_schema
from twostroke.api.protocol.chat import ChatRequest
from twostroke.api.protocol.chat import NamedTool as WireNamedTool
from twostroke.config.server import ServerConfig
from twostroke.errors import InvalidParameter
from twostroke.grammar.backend import FreeCalls

PROMPT_TAIL_TOKENS = 16
"""Of the prompt's end, for the parser to see whether the template has opened the reasoning."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """The parsers of one server.

    Raises:
        InvalidParameter: there is no parser of that name.
    """

    tool_call_parser: str | None = None
    reasoning_parser: str | None = None

    def __post_init__(self) -> None:
        """Looks the names up."""
        make_parser(self.tool_call_parser, self.reasoning_parser)

    def parser(
        self,
        tools: ChatTools,
        prompt_tail: str,
        said: str = "",
        *,
        is_constrained: bool,
        calls_come_first: bool = False,
        hear_content: HearContent | None = None,
    ) -> ChatParser:
        """For one choice; in an output that has a form only what the form writes as reasoning is reasoning.

        Args:
            tools: of the request.
            prompt_tail: the end of the prompt, which may have opened the reasoning.
            said: what the turn says already that is continued.
            is_constrained: whether the output has a form.
            calls_come_first: whether `free_calls` may be made in place of the form, and nowhere else.
            hear_content: as in Output.
        """
        return make_parser(
            self.tool_call_parser,
            self.reasoning_parser,
            tools=tools.tools,
            tool_choice=tools.choice,
            parallel_tool_calls=tools.parallel,
            prompt=None if is_constrained else prompt_tail,
            said=said,
            calls_come_first=calls_come_first,
            hear_content=hear_content,
        )

    def free_calls(self, tools: ChatTools) -> FreeCalls | None:
        """How the model writes the calls that it is free to make; None where there are none."""
        if tools.choice != "auto" or self.tool_call_parser is None:
            return None
        return free_calls(TOOL_CALL_FAMILIES[self.tool_call_parser], [tool.name for tool in tools.tools])

    def tools_of(self, request: ChatRequest) -> ChatTools:
        """The tools of a chat.

        Raises:
            InvalidParameter: a choice that the tools do not leave, or calls that nobody here could recognise.
        """
        tools = tuple(
            Tool(tool.function.name, tool.function.parameters)
            if tool.function.parameters is not None
            else Tool(tool.function.name)
            for tool in request.tools or ()
        )
        given = request.tool_choice
        choice: ToolChoice = "auto" if tools else "none"
        if isinstance(given, WireNamedTool):
            choice = NamedTool(given.function.name)
        elif given is not None and (tools or given != "auto"):
            choice = given
        checked_tool_choice(tools, choice)
        if choice == "auto" and self.tool_call_parser is None:
            remedy = "Start the server with --tool-call-parser, or require a call (tool_choice required or a function)."
            raise InvalidParameter(
                "tools", f"{len(tools)} tools", "tool calls of this model are not recognised", remedy
            )
        return ChatTools(tools, choice, request.parallel_tool_calls is not False)


@dataclass(frozen=True, slots=True)
class ChatTools:
    """What the model may call, and whether it has to."""

    tools: tuple[Tool, ...]
    choice: ToolChoice
    parallel: bool

    @property
    def schema(self) -> dict[str, Any] | None:
        """What the output has to be where a call is required."""
        return tool_choice_schema(self.tools, self.choice, parallel_tool_calls=self.parallel)

    @property
    def names_one(self) -> bool:
        """Whether the client named the tool to call."""
        return isinstance(self.choice, NamedTool)


def check_parsers(config: ServerConfig) -> None:
    """Refuse names of parsers that there are not, before a model is loaded.

    Raises:
        InvalidParameter: names the setting and the parsers there are.
    """
    Dialect(config.tool_call_parser, config.reasoning_parser)
