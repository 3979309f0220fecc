"""Numbers on the command line as one writes them: `--kv-cache-memory 4GiB`, `--max-model-len 32k`, `--ageing-s 2m`."""

from __future__ import annotations

from types import NoneType
from typing import get_args

from cyclopts import App
from cyclopts.argument import ArgumentCollection

from twostroke.config.sizes import byte_count, count, seconds

_SIZES = ("memory", "bytes", "offloading_size")
"""Ends of the names of settings that are numbers of bytes."""
_TIMES = "_s"
_RATES = "bytes_per_s"
_LONGEST_S = 1e9
"""More than any setting takes; each has a limit of its own."""


def read_numbers(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Write numbers as the parser reads them: whole ones, and those of seconds and bytes a second.

    Args:
        app: as the parser hands it over.
        commands: likewise.
        arguments: with the words that were given for them.

    Raises:
        InvalidParameter: a value that is no size of memory, no whole number, or no time.
    """
    del app, commands
    for argument in arguments:
        name, kinds = argument.field_info.name, set(get_args(argument.hint) or (argument.hint,)) - {NoneType}
        if kinds == {int}:
            read, needs_reading = byte_count if name.endswith(_SIZES) else count, _is_no_whole_number
        elif kinds == {float} and name.endswith(_TIMES):
            read, needs_reading = _rate if name.endswith(_RATES) else _seconds, _is_no_number
        else:
            continue
        argument.tokens = [
            token.evolve(value=str(read(name, token.value))) if needs_reading(token.value) else token
            for token in argument.tokens
        ]


def _rate(name: str, text: str) -> int:
    """Read 10GB or 10GB/s."""
    return byte_count(name, text.removesuffix("/s"))


def _seconds(name: str, text: str) -> float:
    return seconds(name, text, most_s=_LONGEST_S)


def _is_no_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return bool(value)
    return False


def _is_no_whole_number(value: str) -> bool:
    """Whether the parser would not read it as it is meant, or would read another number: it rounds 1.5 to 2."""
    return bool(value) and not value.lstrip("+-").isdecimal()
