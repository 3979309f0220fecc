"""The command that a person types to get a result again, made from the options themselves: no flag is forgotten."""

from __future__ import annotations

import os
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

_NO_PART_OF_THE_RESULT = frozenset({"results", "gguf_folder", "api_key"})
"""Where files went, and what opens a server, is the affair of whoever ran it."""
_PLACE_OF_AN_ENVIRONMENT = "PYTHON"
"""Stands in a command for the interpreter of an environment: which engine has one counts, not where it lies."""


def command_line(words: str, *options: Any) -> str:
    """`words`, and a flag for each field of these dataclasses that is not at its default.

    Args:
        words: the command, "twostroke bench offline".
        options: dataclasses that the command line takes as flags, each of which can be built without arguments.
    """
    flags = [flag for given in options for flag in _flags(given)]
    return shlex.join([*words.split(), *flags])


def settings(options: Any) -> dict[str, Any]:
    """The fields of a dataclass of options, for a result: of paths the last part, which says what and not whose."""
    return {field.name: _named(field.name, getattr(options, field.name)) for field in fields(options)}


def model_name(model: str) -> str:
    """A hub id or "embedded" as it is, a folder or a GGUF file by its name.

    >>> model_name("Qwen/Qwen3-0.6B"), model_name("/usr/")
    ('Qwen/Qwen3-0.6B', 'usr')
    """
    path = Path(model).expanduser()
    return last_part(path) if os.path.exists(path) else model


def last_part(path: Path) -> str:
    """Its name, also of "."; of a link its own, which is why nothing is resolved."""
    return os.path.basename(os.path.abspath(path))


def _flags(options: Any) -> list[str]:
    given, defaults = settings(options), settings(type(options)())
    flags: list[str] = []
    for name, value in given.items():
        flag = name.replace("_", "-")
        if value == defaults[name] or value is None or name in _NO_PART_OF_THE_RESULT:
            continue
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif name == "env":
            pairs = cast(tuple[str, ...], value)
            flags += [part for pair in pairs for part in (f"--{flag}", _without_place(pair))]
        elif isinstance(value, tuple):
            flags += [part for item in cast(tuple[object, ...], value) for part in (f"--{flag}", str(item))]
        else:
            flags += [f"--{flag}", str(value)]
    return flags


def _without_place(pair: str) -> str:
    """Return NAME=INTERPRETER without the path.

    >>> _without_place("llama.cpp=/home/me/llama/bin/python")
    'llama.cpp=PYTHON'
    """
    return f"{pair.partition('=')[0]}={_PLACE_OF_AN_ENVIRONMENT}"


def _named(name: str, value: Any) -> Any:
    if isinstance(value, Path):
        return last_part(value)
    return model_name(value) if name in ("model", "tokenizer") and isinstance(value, str) else value
