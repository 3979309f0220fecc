"""Numbers on the command line as people write them: `--kv-cache-memory 4GiB`, `--max-model-len 32k`."""

from __future__ import annotations

from types import NoneType
from typing import Any, get_args

from cyclopts import App
from cyclopts.argument import ArgumentCollection

from twostroke.config.sizes import byte_count, count

_SIZES = ("memory", "bytes", "offloading_size")
"""Ends of the names of settings that are numbers of bytes."""


def read_numbers(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Write the values of whole numbers as the parser reads them; what is no number stays for the parser to refuse.

    Args:
        app: as the parser hands it over.
        commands: likewise.
        arguments: with the words that were given for them.

    Raises:
        InvalidParameter: a value that is no size of memory, or no whole number.
    """
    del app, commands
    for argument in arguments:
        if not _is_whole_number(argument.hint):
            continue
        name = argument.field_info.name
        read = byte_count if name.endswith(_SIZES) else count
        argument.tokens = [
            token.evolve(value=str(read(name, token.value))) if _needs_reading(token.value) else token
            for token in argument.tokens
        ]


def _is_whole_number(hint: Any) -> bool:
    kinds = set(get_args(hint) or (hint,)) - {NoneType}
    return kinds == {int}


def _needs_reading(value: str) -> bool:
    """Whether the parser would not read it as it is meant, or would read another number: it rounds 1.5 to 2."""
    return bool(value) and not value.lstrip("+-").isdecimal() and not value.startswith("-")
