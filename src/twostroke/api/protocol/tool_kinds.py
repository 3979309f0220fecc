"""Kinds of tools: functions are the only one; the others are refused by name, with what to send instead."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

STRICT = "Required calls always fit the schema; others are for the client to check."
"""The description of a tool's `strict`, which changes nothing here."""
_INSTEAD = {
    "custom": "custom tools are not supported; offer a function whose parameters have one text",
    "allowed_tools": "a choice of tools is not supported; send those alone in tools, and its mode as tool_choice",
}


def _check_kind(kind: Any) -> Any:
    if not isinstance(kind, str) or kind == "function":
        return kind
    told = _INSTEAD.get(kind, "functions are the only kind of tool, and the client runs them; send type 'function'")
    raise PydanticCustomError("tool_kind", "{told}", {"told": told})


def _check_own(kind: Any) -> Any:
    if not isinstance(kind, str) or kind == "custom":
        return kind
    told = "no tools are run here; send a tool with an input_schema, and without a type, which the client runs"
    raise PydanticCustomError("tool_kind", "{told}", {"told": told})


FunctionKind = Annotated[Literal["function"], BeforeValidator(_check_kind)]
"""The type of a tool, or of the one that is chosen."""
ToolKind = Annotated[Literal["custom"], BeforeValidator(_check_own)]
"""The same in Anthropic's words."""
