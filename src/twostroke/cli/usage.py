"""Commands that cannot be read, told in a sentence; and words that mean another command than they are."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from cyclopts import (
    App,
    CoercionError,
    CycloptsError,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)

from twostroke.cli.habits import COMMANDS, flag_here
from twostroke.errors import TwostrokeError, shown

STDIN = "-"
"""The prompt, or the file of it, that stands for the standard input."""
_END_OF_FLAGS = "--"
_FLAG = re.compile(r"--[A-Za-z][\w-]*")
_BELOW_ZERO = re.compile(r"-[\d.]+[A-Za-z%]\w*")
_KINDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "yes or no",
    str: "a text",
    Path: "a path",
}


def run_words(app: App, words: Sequence[str], program: str) -> None:
    """Run a command.

    Args:
        app: of the program's commands.
        words: the command and its flags.
        program: how the user calls it, which errors begin with.

    Raises:
        SystemExit: with 2 for a command that cannot be read, with 1 for one that is refused or fails, each told on
            stderr; otherwise as the command raises it.
    """
    try:
        app(spelt_out(words), exit_on_error=False, print_error=False)
    except CycloptsError as error:
        sys.stderr.write(f"{program}: {told(error, words)}\n")
        sys.exit(2)
    except TwostrokeError as error:
        sys.stderr.write(f"{program}: {error}\n")
        sys.exit(1)


def spelt_out(arguments: Sequence[str]) -> list[str]:
    """Return the words of a command as the parser takes them.

    >>> spelt_out(["generate", "-", "--seed", "1"]), spelt_out(["help", "chat"]), spelt_out(["version"])
    (['generate', '--prompt-file=-', '--seed', '1'], ['chat', '--help'], ['--version'])
    >>> spelt_out(["chat", "help"]), spelt_out(["generate", "--", "help"])
    (['chat', '--help'], ['generate', '--', 'help'])
    """
    match arguments:
        case ["help", *rest]:
            return [*rest, "--help"]
        case [command, "help"] | ["bench" as command, _, "help"] if not (command.startswith("-") or _is_here("help")):
            return [*arguments[:-1], "--help"]
        case ["version"] | ["-v"] | ["-V"]:
            return ["--version"]
        case ["generate", *rest]:
            return ["generate", *_with_stdin(_with_values(rest))]
        case _:
            return _with_values(arguments)


def _is_here(word: str) -> bool:
    """Return whether a word names a file or a folder, and so means that."""
    return os.path.exists(word)


def _with_values(words: Sequence[str]) -> list[str]:
    """Join a flag and a value such as -1GB, which the parser takes for flags."""
    joined: list[str] = []
    for index, word in enumerate(words):
        flag = joined[-1] if joined else ""
        if _END_OF_FLAGS in words[:index] or not (_BELOW_ZERO.fullmatch(word) and _FLAG.fullmatch(flag)):
            joined.append(word)
        else:
            joined[-1] = f"{flag}={word}"
    return joined


def _with_stdin(words: Sequence[str]) -> Iterator[str]:
    """Give the parser, to which a dash begins a flag, the flag that means the same."""
    flags = list(words[: words.index(_END_OF_FLAGS)]) if _END_OF_FLAGS in words else list(words)
    for index, word in enumerate(flags):
        is_value = index > 0 and flags[index - 1] == "--prompt-file"
        names_file = word == "--prompt-file" and flags[index + 1 : index + 2] == [STDIN]
        if word == STDIN:
            yield f"--prompt-file={STDIN}"
        elif is_value or not names_file:
            yield word
    yield from words[len(flags) :]


def told(error: CycloptsError, arguments: Sequence[str]) -> str:
    """Return what is wrong with a command, in one line."""
    match error:
        case UnknownCommandError(unused_tokens=[word, *_]) if not error.command_chain:
            return _unknown_command(word, error)
        case UnknownOptionError():
            unknown = (error.token.keyword or error.token.value).partition("=")[0]
            if unknown == STDIN:
                return f"{STDIN!r} is the prompt of generate that comes on stdin; chat reads stdin without it."
            here = flag_here(unknown, arguments)
            if here is not None:
                return f"Unknown option: {here}."
            is_prompt = "generate" in (error.command_chain or ())
            behind = ' A prompt that begins with "-" goes behind "--": twostroke generate [FLAGS] -- PROMPT'
            return _one_line(error) + (behind if is_prompt else "")
        case CoercionError(msg=None, target_type=kind, token=token) if kind is not None and token is not None:
            wanted = dict.fromkeys(_wanted(kind))
            if error.__cause__ is None and get_origin(kind) is not Literal and wanted:
                name = token.keyword or (error.argument.name.lstrip("-").upper() if error.argument else "the value")
                return f"{name}={shown(token.value)}: must be {' or '.join(wanted)}."
            return _one_line(error)
        case UnusedCliTokensError(unused_tokens=[*words]):
            more = "chat takes the model alone: a question is typed when it has started, or comes on stdin. "
            is_chat = (error.command_chain or ())[:1] == ("chat",)
            return f"{'' if not is_chat else more}Too many words: {' '.join(map(repr, words))}."
        case _:
            return _one_line(error)


def _unknown_command(word: str, error: CycloptsError) -> str:
    if word in COMMANDS:
        return f"there is no command {word!r} here: {COMMANDS[word]}."
    if "/" in word or word.endswith((".gguf", ".safetensors")) or os.path.exists(word):
        return f"{word!r} is no command; one comes before the model: twostroke chat {word}"
    return _one_line(error)


def _one_line(error: CycloptsError) -> str:
    return " ".join(str(error).split())


def _wanted(hint: Any) -> Iterator[str]:
    """What a value may be, in words."""
    if hint in _KINDS:
        yield _KINDS[hint]
    elif get_origin(hint) is Literal:
        yield from map(repr, get_args(hint))
    else:
        for part in get_args(hint):
            if part is not NoneType and part is not Ellipsis:
                yield from _wanted(part)
