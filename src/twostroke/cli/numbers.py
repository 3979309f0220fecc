"""Numbers with units on the command line: `--kv-cache-memory 4GiB`, `--max-model-len 32k`, `--ageing-s 2m`.

Also applies `--preset`: it sets every setting of the preset whose own flag is not given.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType
from typing import Any, cast, get_args

from cyclopts import App, Token
from cyclopts.argument import ArgumentCollection

from twostroke.config.presets import PRESETS
from twostroke.config.sizes import byte_count, count, seconds

_SIZES = ("memory", "bytes", "offloading_size")
"""Endings of the names of settings that are numbers of bytes."""
_TIMES = "_s"
_RATES = "bytes_per_s"
_MAX_S = 1e9
"""Upper bound of a time in seconds; above the limit of every setting."""


def convert_numbers(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Convert numbers with units to plain ones, for integers, seconds and bytes per second.

    Args:
        app: unused; cyclopts passes it.
        commands: unused, like app.
        arguments: all arguments with the words that were given for them; changed in place.

    Raises:
        InvalidParameter: a value is not a memory size, an integer or a time.
    """
    del app, commands
    for argument in arguments:
        name, kinds = argument.field_info.name, set(get_args(argument.hint) or (argument.hint,)) - {NoneType}
        if kinds == {int}:
            read, needs_reading = byte_count if name.endswith(_SIZES) else count, _is_not_integer
        elif kinds == {float} and name.endswith(_TIMES):
            read, needs_reading = _rate if name.endswith(_RATES) else _seconds, _is_not_number
        else:
            continue
        argument.tokens = [
            token.evolve(value=str(read(name, token.value))) if needs_reading(token.value) else token
            for token in argument.tokens
        ]


def _rate(name: str, text: str) -> int:
    """Parse a rate such as 10GB or 10GB/s."""
    return byte_count(name, text.removesuffix("/s"))


def _seconds(name: str, text: str) -> float:
    return seconds(name, text, most_s=_MAX_S)


def _is_not_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return bool(value)
    return False


def _is_not_integer(value: str) -> bool:
    """Return whether a value needs conversion because the parser would refuse or change it: it rounds 1.5 to 2."""
    return bool(value) and not value.lstrip("+-").isdecimal()


_PRESET = "preset"


def preset_help() -> str:
    """Return the help text of --preset.

    >>> preset_help()[:100]
    'Group of settings; flags that are given override it. interactive: --itl-slo 100ms --ttft-slo 300ms. '
    """
    parts = (f"{preset}: {' '.join(_flags(settings))}." for preset, settings in PRESETS.items())
    return f"Group of settings; flags that are given override it. {' '.join(parts)}"


def apply_preset(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Set the values of a preset for flags that are not given; the parser refuses an unknown preset.

    Args:
        app: unused; cyclopts passes it.
        commands: unused, like app.
        arguments: all arguments with the words that were given for them; changed in place.
    """
    del app, commands
    by_name = {argument.field_info.name: argument for argument in arguments}
    given = by_name[_PRESET].tokens if _PRESET in by_name else []
    settings = cast(Mapping[str, Mapping[str, Any]], PRESETS).get(given[-1].value, {}) if given else {}
    for name, value in settings.items():
        if not by_name[name].tokens:
            by_name[name].append(Token(keyword=f"--{_PRESET}", value=str(value), source=_PRESET))


def _flags(settings: Mapping[str, Any]) -> list[str]:
    return [f"--{name.replace('_', '-')} {value}" for name, value in settings.items()]
