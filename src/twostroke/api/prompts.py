"""Prompts in the four forms that OpenAI takes them in: a text, token ids, or a list of either."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from twostroke.engine.input_processor import Prompt
from twostroke.errors import InvalidPrompt


def prompts_of(given: str | list[Any], field: str) -> list[Prompt]:
    """Each prompt by itself.

    Args:
        given: checked against the schema.
        field: what the request calls it.

    Raises:
        InvalidPrompt: there is none.
    """
    if isinstance(given, str):
        return [given]
    if not given:
        raise InvalidPrompt(f"{field} is an empty list; send at least one text, or one token id.")
    if isinstance(given[0], int):
        return [{"prompt_token_ids": given}]
    return [item if isinstance(item, str) else {"prompt_token_ids": cast(list[int], item)} for item in given]


def length_of(prompts: Sequence[Prompt]) -> int:
    """Characters and token ids of all of them: what preparing them costs, roughly."""
    return sum(len(prompt if isinstance(prompt, str) else prompt.get("prompt_token_ids", ())) for prompt in prompts)


def length_of_messages(messages: Sequence[Mapping[str, Any]]) -> int:
    """Characters of a conversation's contents, roughly."""
    return sum(len(str(message.get("content"))) for message in messages)
