"""A conversation with the inputs of its chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict


class TemplateOptions(TypedDict, total=False):
    """Keyword arguments of `chat` that go to the chat template."""

    tools: Sequence[Mapping[str, Any]] | None
    """JSON schemas of functions the model may call."""
    documents: Sequence[Mapping[str, Any]] | None
    """Documents for templates that support retrieval."""
    add_generation_prompt: bool
    """Whether to open the assistant's turn; True by default."""
    continue_final_message: bool
    """Whether the model continues the last message, and outputs the rest; needs add_generation_prompt=False."""
    chat_template_kwargs: Mapping[str, Any] | None
    """Further variables for the template, for example enable_thinking."""


@dataclass(frozen=True, slots=True)
class ChatInputs:
    """A conversation to be rendered by the model's chat template; the fields are those of ChatTemplate.render."""

    messages: Sequence[Mapping[str, Any]]
    """Messages: objects with a role and usually a content."""
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: Mapping[str, Any] | None = None
