"""What a line of `twostroke chat` means: a message, or one of the commands that begin with a slash."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from enum import StrEnum
from typing import Any

from twostroke.cli.flags import ChatSampling
from twostroke.errors import ClientError, InvalidParameter

HELP = """\
/new                  forget the conversation (also /clear)
/set NAME VALUE       a sampling setting from here on: /set max_tokens 1000, /set temperature 0
/bye                  end (also /exit, /quit, an empty line, Ctrl-D)
/help                 this (also /?)
Anything else is a message to the model; \"\"\" begins and ends one of several lines. A message that begins with a slash
goes behind a space. Ctrl-C stops an answer.
"""


class Command(StrEnum):
    """What a line asks of the chat itself."""

    NEW = "new"
    SET = "set"
    END = "end"
    HELP = "help"


_NAMES = {
    "/new": Command.NEW,
    "/clear": Command.NEW,
    "/reset": Command.NEW,
    "/set": Command.SET,
    "/bye": Command.END,
    "/exit": Command.END,
    "/quit": Command.END,
    "/q": Command.END,
    "/help": Command.HELP,
    "/?": Command.HELP,
    "/h": Command.HELP,
}
_COMMAND = re.compile(r"/[A-Za-z?][\w?-]*")
_OTHER_NAMES = {"num_predict": "max_tokens", "n_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
"""Of Ollama and llama.cpp."""
_NOT_SET = frozenset(
    {"structured_outputs", "logit_bias", "stop", "n", "allowed_token_ids", "bad_words", "stop_token_ids"}
)
"""Sampling settings that take more than a word."""


def command_of(line: str) -> tuple[Command, list[str]] | None:
    """Return the command that a line is, and the words behind it; None of a message.

    >>> command_of("/set max_tokens 9"), command_of("/etc/hosts is what?"), command_of(" /bye")
    ((<Command.SET: 'set'>, ['max_tokens', '9']), None, None)

    Raises:
        ClientError: it begins like a command, and there is none of this name.
    """
    first, *rest = line.split() or [""]
    if not line.startswith("/") or not _COMMAND.fullmatch(first):
        return None
    if first not in _NAMES:
        raise ClientError(
            f"there is no command {first}; /help lists those there are. A message that begins with a slash goes behind "
            "a space."
        )
    return _NAMES[first], rest


def changed(sampling: ChatSampling, words: list[str]) -> ChatSampling:
    """Return the sampling with the setting that /set names; Ollama's word `parameter` may stand before it.

    Raises:
        ClientError: no name and value, or a name that is none.
        InvalidParameter: a value that the setting does not take.
    """
    match words:
        case ["parameter", name, value] | [name, value]:
            pass
        case _:
            raise ClientError("/set takes a name and a value, such as /set max_tokens 1000.")
    name = name.lstrip("-").replace("-", "_")
    name = _OTHER_NAMES.get(name, name)
    known = sorted({field.name for field in fields(ChatSampling)} - _NOT_SET)
    if name not in known:
        raise ClientError(f"/set knows no {name!r}; it knows {', '.join(known)}.")
    return replace(sampling, **{name: _value(name, value)})


def _value(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidParameter(name, text, "must be a number, true, false or null") from None
