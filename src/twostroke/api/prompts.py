"""Prompts in the four forms that OpenAI takes them in, a text, token ids, or a list of either; how long they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from pydantic import BaseModel

from twostroke.client.input_processor import Prompt
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


MOST_COUNTED = 1 << 18
"""`amount_of` counts no further: it is long."""
_EACH = 16
"""What a value counts beside its characters: reading it takes as long as so many of them."""


def amount_of(*values: Any) -> int:
    """Return roughly how many characters of text these are, whatever they are made of; much is not read to its end.

    >>> amount_of("four", [1, 2, 3], {"role": "user", "content": ["a", "b"]})
    74
    """
    amount, waiting = 0, list(values)
    while waiting and amount <= MOST_COUNTED:
        value = waiting.pop()
        if isinstance(value, str):
            amount += len(value)
        elif isinstance(value, BaseModel):
            amount += _EACH
            waiting += [item for _, item in value]
        elif isinstance(value, dict):
            fields = cast(dict[str, Any], value)
            amount += _EACH + sum(map(len, fields))
            waiting += fields.values()
        elif isinstance(value, (list, tuple)):
            amount += _EACH + _amount_of_list(cast(Sequence[Any], value), waiting)
    return amount


def _amount_of_list(items: Sequence[Any], waiting: list[Any]) -> int:
    """Count a list by the kind of its first element; objects and lists are left to the caller."""
    first = items[0] if items else None
    if isinstance(first, str):
        return len(items) + sum(len(item) for item in items if isinstance(item, str))
    if isinstance(first, (list, dict, BaseModel)):
        waiting += items[:MOST_COUNTED]
        return 0
    return len(items)
