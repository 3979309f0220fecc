"""Which tools a model may or must call, and the JSON schema that makes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast
from urllib.parse import urljoin

from twostroke.errors import InvalidParameter
from twostroke.grammar.json_schema import SCHEMAS_BY_NAME

JsonSchema = dict[str, Any]

MAX_SCHEMA_DEPTH = 64
"""Of lists and objects within a tool's parameters; chat templates take no more either."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the client offers."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    """JSON schema of its arguments, an object."""

    @property
    def properties(self) -> Mapping[str, Any]:
        """Name to schema of each argument that the schema names."""
        properties = self.parameters.get("properties")
        return properties if isinstance(properties, Mapping) else {}


@dataclass(frozen=True, slots=True)
class NamedTool:
    """The model must call this function, once."""

    name: str


ToolChoice = Literal["none", "auto", "required"] | NamedTool


def checked_tool_choice(tools: Sequence[Tool], tool_choice: ToolChoice) -> ToolChoice:
    """The choice, if these tools leave it.

    Raises:
        InvalidParameter: a call is required and there are no tools, or not that one; two tools have the same name.
    """
    names = [tool.name for tool in tools]
    for name in {name for name in names if names.count(name) > 1}:
        raise InvalidParameter("tools", name, "two tools have this name", "Rename one.")
    if isinstance(tool_choice, NamedTool) and tool_choice.name not in names:
        raise InvalidParameter("tool_choice", tool_choice.name, f"must be one of tools: {', '.join(names) or 'none'}")
    if tool_choice == "required" and not tools:
        raise InvalidParameter("tool_choice", tool_choice, "needs at least one of tools")
    return tool_choice


@dataclass(frozen=True, slots=True)
class ChatTools:
    """What the model may call, and whether it has to."""

    tools: Sequence[Tool] = ()
    choice: ToolChoice = "auto"
    parallel: bool = True
    """False: no more than the first call is delivered."""

    @property
    def schema(self) -> JsonSchema | None:
        """What the output has to be where a call is required."""
        return tool_choice_schema(self.tools, self.choice, parallel_tool_calls=self.parallel)

    @property
    def required(self) -> Sequence[Tool]:
        """The tools of which the model must call one; none where it need not."""
        if isinstance(self.choice, NamedTool):
            return [tool for tool in self.tools if tool.name == self.choice.name]
        return self.tools if self.choice == "required" else ()


NO_TOOLS = ChatTools(choice="none")
"""Of a chat that offers none."""


def tool_choice_schema(
    tools: Sequence[Tool], tool_choice: ToolChoice, *, parallel_tool_calls: bool = True
) -> JsonSchema | None:
    """What the model's answer has to be where a call is required; None where it is free.

    A named function: its arguments. "required": a list of `{"name": ..., "parameters": ...}`, as vLLM has it. Each
    tool's schema stays a document of its own, in `$defs` under its number (a name may hold what a reference has to
    escape), so that its references keep their meaning. Arguments are an object, also where a schema does not say so.

    Raises:
        InvalidParameter: as of `checked_tool_choice`, or parameters that describe no object.
    """
    tool_choice = checked_tool_choice(tools, tool_choice)
    if isinstance(tool_choice, NamedTool):
        return arguments_schema(next(tool for tool in tools if tool.name == tool_choice.name))
    if tool_choice != "required":
        return None
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.name}, "parameters": {"$ref": f"#/$defs/{number}"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for number, tool in enumerate(tools)
    ]
    schema: JsonSchema = {
        "type": "array",
        "minItems": 1,
        "items": {"anyOf": calls},
        "$defs": {str(number): _of_object(tool, f"#/$defs/{number}") for number, tool in enumerate(tools)},
    }
    return schema if parallel_tool_calls else {**schema, "maxItems": 1}


def arguments_schema(tool: Tool) -> JsonSchema:
    """Return the schema of a tool's arguments, as a document of its own.

    Raises:
        InvalidParameter: the parameters describe no object.
    """
    return _of_object(tool, "#")


_OF_DOCUMENTS = frozenset({"$schema", "$id"})
"""Keywords that make a schema a document, to whose root references would lead."""


def _of_object(tool: Tool, root: str) -> JsonSchema:
    """The schema of a tool's arguments, which are an object, as a document at this place."""
    kind = tool.parameters.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        limit = f"the parameters of {tool.name!r} are of type {kind!r}; arguments are an object"
        raise InvalidParameter("tools", tool.name, limit, 'Say "type": "object".')
    given = {name: value for name, value in tool.parameters.items() if name not in _OF_DOCUMENTS}
    address = tool.parameters.get("$id")
    document = _Document(tool.name, root, address.partition("#")[0] if isinstance(address, str) else "")
    return {**_moved(given, document), "type": "object"}


@dataclass(frozen=True, slots=True)
class _Document:
    """A schema that is moved into another."""

    name: str
    """The tool's name."""
    root: str
    """Where its root is now."""
    address: str
    """Its `$id`, by which references may lead to it as well."""

    def moved(self, reference: str) -> str:
        """Return where a reference leads now; one by an anchor leads there from anywhere."""
        address, _, fragment = reference.partition("#")
        if address and (not self.address or urljoin(self.address, address) != self.address):
            return reference
        return f"{self.root}{fragment}" if fragment[:1] in ("", "/") else f"#{fragment}"


_OF_VALUES = frozenset({"const", "enum", "default", "examples"})
"""Keywords that hold arguments, or parts of them: nothing in these is a reference."""
_FOR_READERS = frozenset({"title", "description", "$comment"})
"""Keywords that only the model reads, in its prompt. They are most of what tools have, and grammars have a limit."""


def _moved(schema: Any, document: _Document, depth: int = MAX_SCHEMA_DEPTH, *, is_named: bool = False) -> Any:
    """What constrains of a schema, or of a part of one, with the references of a document whose root is elsewhere now.

    Args:
        schema: the part.
        document: that it is of.
        depth: levels that may follow.
        is_named: whether the keys of the part are names and not keywords.
    """
    if depth == 0:
        raise InvalidParameter("tools", document.name, f"parameters are nested deeper than {MAX_SCHEMA_DEPTH}")
    if isinstance(schema, list):
        return [_moved(part, document, depth - 1) for part in cast(list[Any], schema)]
    if not isinstance(schema, Mapping):
        return schema
    given = cast(Mapping[str, Any], schema)
    if not is_named and isinstance(given.get("$id"), str):  # a document within, which keeps its own root
        document = _Document(document.name, "#", "")
    moved: JsonSchema = {}
    for key, value in given.items():
        if is_named:
            moved[key] = _moved(value, document, depth - 1)
        elif key == "$ref" and isinstance(value, str):
            moved[key] = document.moved(value)
        elif key in _OF_VALUES:
            moved[key] = value
        elif key not in _FOR_READERS:
            moved[key] = _moved(value, document, depth - 1, is_named=key in SCHEMAS_BY_NAME)
    return moved
