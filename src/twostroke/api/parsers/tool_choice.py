"""Tools that a model may or must call, and the JSON schema of a required call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast
from urllib.parse import urljoin

from twostroke.errors import InvalidParameter
from twostroke.grammar.json_schema import SCHEMAS_BY_NAME

JsonSchema = dict[str, Any]

MAX_SCHEMA_DEPTH = 64
"""Maximum nesting of lists and objects in a tool's parameters; chat templates have the same limit."""


@dataclass(frozen=True, slots=True)
class Tool:
    """Function that the client offers."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    """JSON schema of its arguments, an object."""

    @property
    def properties(self) -> Mapping[str, Any]:
        """Schemas of the arguments that the schema names, by name."""
        properties = self.parameters.get("properties")
        return properties if isinstance(properties, Mapping) else {}


@dataclass(frozen=True, slots=True)
class NamedTool:
    """Choice that the model must call this function, once."""

    name: str


ToolChoice = Literal["none", "auto", "required"] | NamedTool


def checked_tool_choice(tools: Sequence[Tool], tool_choice: ToolChoice) -> ToolChoice:
    """Return the choice after checking it against the tools.

    Raises:
        InvalidParameter: a required call has no tools, the named tool is missing, or two tools have the same name.
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
    """Tools of a chat, and whether the model must call one."""

    tools: Sequence[Tool] = ()
    choice: ToolChoice = "auto"
    parallel: bool = True
    """Whether several calls are allowed; if not, only the first is delivered."""

    @property
    def schema(self) -> JsonSchema | None:
        """Schema of the output if a call is required; None otherwise."""
        return tool_choice_schema(self.tools, self.choice, parallel_tool_calls=self.parallel)

    @property
    def required(self) -> Sequence[Tool]:
        """Tools of which the model must call one; empty if it need not."""
        if isinstance(self.choice, NamedTool):
            return [tool for tool in self.tools if tool.name == self.choice.name]
        return self.tools if self.choice == "required" else ()


NO_TOOLS = ChatTools(choice="none")
"""Tools of a chat that offers none."""


def tool_choice_schema(
    tools: Sequence[Tool], tool_choice: ToolChoice, *, parallel_tool_calls: bool = True
) -> JsonSchema | None:
    """Return the schema of the model's output if a call is required; None if it is free.

    A named function: its arguments. "required": a list of `{"name": ..., "parameters": ...}`, as in vLLM. Each tool's
    schema stays a separate document in `$defs`, so that its references stay valid. Its key is a number, because a name
    may contain characters that references must escape. Arguments are an object even if a schema does not say so.

    Raises:
        InvalidParameter: as in `checked_tool_choice`, or parameters that are not an object's.
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
    """Return the schema of a tool's arguments as a separate document.

    Raises:
        InvalidParameter: the parameters are not an object's.
    """
    return _of_object(tool, "#")


_OF_DOCUMENTS = frozenset({"$schema", "$id"})
"""Keywords that make a schema a document, to whose root references would lead."""


def _of_object(tool: Tool, root: str) -> JsonSchema:
    """Return the schema of a tool's arguments, an object, as a document at this place."""
    kind = tool.parameters.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        limit = f"the parameters of {tool.name!r} are of type {kind!r}; they must be an object"
        raise InvalidParameter("tools", tool.name, limit, 'Set "type": "object".')
    given = {name: value for name, value in tool.parameters.items() if name not in _OF_DOCUMENTS}
    address = tool.parameters.get("$id")
    document = _Document(tool.name, root, address.partition("#")[0] if isinstance(address, str) else "")
    return {**_moved(given, document), "type": "object"}


@dataclass(frozen=True, slots=True)
class _Document:
    """Schema that is embedded in another."""

    name: str
    """Name of the tool."""
    root: str
    """Reference to the new place of its root."""
    address: str
    """The schema's `$id`, which references may also use."""

    def moved(self, reference: str) -> str:
        """Return a reference adapted to the new place; a reference by anchor works from anywhere."""
        address, _, fragment = reference.partition("#")
        if address and (not self.address or urljoin(self.address, address) != self.address):
            return reference
        return f"{self.root}{fragment}" if fragment[:1] in ("", "/") else f"#{fragment}"


_OF_VALUES = frozenset({"const", "enum", "default", "examples"})
"""Keywords whose values are arguments or parts of them, and contain no references."""
_FOR_READERS = frozenset({"title", "description", "$comment"})
"""Keywords that only the model reads, in its prompt. They are most of a tool's text, and grammars have a size limit."""


def _moved(schema: Any, document: _Document, depth: int = MAX_SCHEMA_DEPTH, *, is_named: bool = False) -> Any:
    """Return the constraining part of a schema, with references adapted to the new place of its document.

    Args:
        schema: schema, or a part of one.
        document: document of the schema.
        depth: remaining levels of nesting.
        is_named: whether the keys of the part are names and not keywords.
    """
    if depth == 0:
        raise InvalidParameter("tools", document.name, f"parameters are nested deeper than {MAX_SCHEMA_DEPTH}")
    if isinstance(schema, list):
        return [_moved(part, document, depth - 1) for part in cast(list[Any], schema)]
    if not isinstance(schema, Mapping):
        return schema
    given = cast(Mapping[str, Any], schema)
    if not is_named and isinstance(given.get("$id"), str):  # a nested document keeps its own root
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
