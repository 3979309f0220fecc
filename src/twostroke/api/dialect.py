"""Syntax of the served model's reasoning and tool calls, and the form that a chat requires of its answer."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from dataclasses import dataclass

from twostroke.api.parsers.chat_parser import REASONING_FAMILIES, make_parser
from twostroke.api.parsers.families import TOOL_CALL_FAMILIES, optional_call_syntax, required_call_syntax
from twostroke.api.parsers.tool_choice import ChatTools, NamedTool, Tool, ToolChoice, checked_tool_choice
from twostroke.api.protocol.chat import ChatNamedTool, ChatRequest, ResponseFormat
from twostroke.api.protocol.sampling import StructuredOutputsField
from twostroke.config.server import ServerConfig
from twostroke.errors import InvalidParameter
from twostroke.grammar.backend import OptionalCallSyntax, RequiredCallSyntax
from twostroke.sampling_params import StructuredOutputs


@dataclass(frozen=True, slots=True)
class Dialect:
    """Parsers of one server.

    Raises:
        InvalidParameter: there is no parser of that name.
    """

    tool_call_parser: str | None = None
    reasoning_parser: str | None = None

    def __post_init__(self) -> None:
        """Check that the parsers exist and read the same format."""
        make_parser(self.tool_call_parser, self.reasoning_parser)
        calls = TOOL_CALL_FAMILIES.get(self.tool_call_parser or "")
        reasoning = REASONING_FAMILIES.get(self.reasoning_parser or "")
        if calls is not None and calls.reasoning_parser not in ("", self.reasoning_parser):
            raise InvalidParameter(
                "tool_call_parser",
                self.tool_call_parser,
                f"needs the reasoning parser {calls.reasoning_parser}: one format has both calls and reasoning",
                f"Add --reasoning-parser {calls.reasoning_parser}.",
            )
        if calls is not None and reasoning is not None and reasoning.has_channels and not calls.reasoning_parser:
            raise InvalidParameter(
                "reasoning_parser",
                self.reasoning_parser,
                f"cannot be combined with the tool call parser {self.tool_call_parser}: its format includes calls",
                "Use --tool-call-parser openai.",
            )

    @property
    def turn_ends(self) -> tuple[str, ...]:
        """Texts of the tokens that end the model's turn."""
        reasoning = REASONING_FAMILIES.get(self.reasoning_parser or "")
        return reasoning.turn_ends if reasoning is not None else ()

    def calls(self, tools: ChatTools) -> OptionalCallSyntax | RequiredCallSyntax | None:
        """Return the syntax of the calls that are allowed beside a form, or of the required one; None for JSON or no
        call.

        Raises:
            InvalidParameter: the model cannot write the required call.
        """
        if tools.choice == "none" or self.tool_call_parser is None:
            return None
        family = TOOL_CALL_FAMILIES[self.tool_call_parser]
        if tools.choice == "auto":
            return optional_call_syntax(family, [tool.name for tool in tools.tools])
        return required_call_syntax(family, tools.required)

    def tools_of(self, request: ChatRequest) -> ChatTools:
        """Return the tools of a chat.

        Raises:
            InvalidParameter: the tool choice does not match the tools, or no parser could recognise the calls.
        """
        tools = tuple(
            Tool(tool.function.name, tool.function.parameters)
            if tool.function.parameters is not None
            else Tool(tool.function.name)
            for tool in request.tools or ()
        )
        given = request.tool_choice
        choice: ToolChoice = "auto" if tools else "none"
        if isinstance(given, ChatNamedTool):
            choice = NamedTool(given.function.name)
        elif given is not None and (tools or given != "auto"):
            choice = given
        checked_tool_choice(tools, choice)
        if choice == "auto" and self.tool_call_parser is None:
            remedy = "Start the server with --tool-call-parser, or require a call (tool_choice required or a function)."
            raise InvalidParameter(
                "tools", f"{len(tools)} tools", "no parser for this model's tool calls is set", remedy
            )
        return ChatTools(tools, choice, request.parallel_tool_calls is not False)


def check_parsers(config: ServerConfig) -> None:
    """Refuse unknown names of parsers before a model is loaded.

    Raises:
        InvalidParameter: names the setting and the known parsers.
    """
    Dialect(config.tool_call_parser, config.reasoning_parser)


STRUCTURED_OUTPUTS_FIELD = "structured_outputs"
"""Name of the request field whose meaning is the engine's own parameter."""


@dataclass(frozen=True, slots=True)
class FormSource:
    """Request field that asks for a form, for error messages.

    Attributes:
        field: name of the request field.
        told: the value to show, if the engine's form was derived from it and would not be recognised.
    """

    field: str
    told: str = ""

    @contextlib.contextmanager
    def named(self) -> Generator[None]:
        """Raise errors about the engine's form under the name of the field that asked for it."""
        try:
            yield
        except InvalidParameter as error:
            if self.field == STRUCTURED_OUTPUTS_FIELD or not error.name.startswith(STRUCTURED_OUTPUTS_FIELD):
                raise
            raise InvalidParameter(self.field, self.told or error.value, error.limit, error.remedy) from error


@dataclass(frozen=True, slots=True)
class Form:
    """Required form of an output, and the field that asks for it."""

    wanted: StructuredOutputs
    asker: FormSource


def form_of(
    field: StructuredOutputsField | None, response_format: ResponseFormat | None, tools: ChatTools
) -> Form | None:
    """Return the form that the output of a chat must have, if any.

    A required call takes precedence over `response_format`, which describes an answer in text.

    Args:
        field: `structured_outputs` of the request.
        response_format: `response_format` of the request.
        tools: tools of the request.

    Raises:
        InvalidParameter: several fields ask for a form, or one is not supported.
    """
    found: list[Form] = []
    if field is not None:
        found.append(Form(structured_outputs(field), FormSource(STRUCTURED_OUTPUTS_FIELD)))
    schema = tools.schema
    if schema is not None:
        asker = FormSource("tools", ", ".join(tool.name for tool in tools.tools))
        with asker.named():
            found.append(Form(StructuredOutputs(json=schema), asker))
    elif response_format is not None and response_format.type != "text":
        asker = FormSource("response_format")
        with asker.named():
            found.append(Form(_of_format(response_format), asker))
    if len(found) > 1:
        asked = " and ".join(form.asker.field for form in found)
        raise InvalidParameter(asked, "...", "each constrains the output", "Use only one of them.")
    return found[0] if found else None


def structured_outputs(field: StructuredOutputsField) -> StructuredOutputs:
    """Return the form of a `structured_outputs` field.

    Raises:
        InvalidParameter: the form is not supported.
    """
    # JSON null means "not given"; unknown kinds were refused before
    given = {"json" if name == "json_" else name: getattr(field, name) for name in type(field).model_fields}
    return StructuredOutputs(**{kind: value for kind, value in given.items() if value is not None})


def _of_format(response_format: ResponseFormat) -> StructuredOutputs:
    if response_format.type == "json_object":
        return StructuredOutputs(json_object=True)
    wanted = response_format.json_schema
    if wanted is None or wanted.schema_ is None:
        raise InvalidParameter(
            "response_format", response_format.type, "needs a schema", "Send it in the field schema."
        )
    return StructuredOutputs(json=wanted.schema_)
