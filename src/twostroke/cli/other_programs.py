"""Commands and flags of Ollama, llama.cpp, vLLM, SGLang and TGI, each with its equivalent here.

Also runs command lines: rewrites some words for the parser, and explains its errors in one line.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from cyclopts import (
    App,
    CoercionError,
    CycloptsError,
    MissingArgumentError,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)

from twostroke.cli.short_help import HELP_ALL, help_of
from twostroke.errors import TwostrokeError, shown

_TALK = "`twostroke chat MODEL` talks to a model, `twostroke generate MODEL PROMPT` completes a text"
_FETCH = "a model that is named by a short name or hub id (OWNER/NAME) is fetched when it is first used, and kept"
_KEPT = (
    "`twostroke models` lists models with short names; others are where you put them, or in the cache of the "
    "Hugging Face hub (`hf cache ls` lists it)"
)
_SERVER = "`twostroke serve MODEL` serves one model until it is stopped with Ctrl-C"


def _by_alias(instead: Mapping[str, str]) -> dict[str, str]:
    """Return the text for each word; a key of the argument is several words with one text."""
    return {word: here for words, here in instead.items() for word in words.split()}


OTHER_COMMANDS = _by_alias(
    {
        "run complete cli llama-cli ask prompt": _TALK,
        "pull download install get fetch": _FETCH,
        "push": "twostroke uploads nothing; use `hf upload`",
        "search": "models are found at huggingface.co; `twostroke models` lists those with short names",
        "login": "`hf auth login` stores a token for the Hugging Face hub",
        "update upgrade": "`pip install --upgrade twostroke` installs the newest release",
        "list ls rm cp": _KEPT,
        "info inspect show": "`twostroke plan MODEL` prints a model's properties, memory and speed",
        "eval": "`twostroke bench quality` measures how well a model predicts a text",
        "benchmark": "`twostroke bench` lists what can be measured",
        "create": (
            "a model is a folder, a GGUF file or a hub id; a system message is given with `twostroke chat --system`"
        ),
        "ps stop start server llama-server api-server launch launch_server deploy up load kill": _SERVER,
        "web ui": f"{_SERVER}; its address shows a page to try it",
        "embed": f"{_SERVER}, and answers POST /v1/embeddings",
        "tokenize": f"{_SERVER}, and answers POST /tokenize",
        "batch": "`twostroke run-batch REQUESTS --output RESULTS` answers a file of requests",
        "convert": (
            "GGUF files and Hugging Face folders are read as they are; `twostroke quantize` makes a smaller copy"
        ),
    }
)
"""Commands of other programs, each with advice on what to do here."""

_NOT_NEEDED = "not needed"
OTHER_FLAGS = _by_alias(
    {
        "-help -?": "--help",
        "-m --model-path --model-id": "--model",
        "--tokenizer-path": "--tokenizer",
        "--tp --tp-size --num-shard": "--tensor-parallel-size",
        "--mem-fraction-static --cuda-memory-fraction": "--gpu-memory-utilization",
        "--max-running-requests --max-concurrent-requests --max-batch-size -np --parallel": "--max-num-seqs",
        "--chunked-prefill-size --max-batch-prefill-tokens": "--max-num-batched-tokens",
        "-b -ub --batch-size --ubatch-size": "--max-num-batched-tokens",
        "--max-total-tokens -c --ctx-size --num-ctx --context-length --max-seq-len": "--max-model-len",
        "--quantize": "--quantization",
        "--listen --hostname": "--host",
        "-p --prompt": "the prompt itself, after the model: twostroke generate MODEL PROMPT",
        "-f --file": "--prompt-file",
        "-n --predict --n-predict --num-predict --max-new-tokens": "--max-tokens",
        "-t": "--threads",
        "-C --cpu-mask": "--cpu-affinity, a list of CPUs such as 0,2 or 0-3",
        "-Cr --cpu-range": "--cpu-affinity",
        "-s": "--seed",
        "--temp": "--temperature",
        "--repeat-penalty": "--repetition-penalty",
        "-ngl --gpu-layers --n-gpu-layers --num-gpu": "--device cuda, which puts the whole model on the GPU",
        "-hf --hf-repo": "the hub id itself, in the model's place",
        "-ctk -ctv --cache-type-k --cache-type-v": "--kv-cache-dtype",
        "-md --model-draft --speculative-model": "--speculative-config",
        "-a --alias": "--served-model-name",
        "-i --input-file": "the file of requests itself: twostroke run-batch REQUESTS --output RESULTS",
        "--output-file": "--output",
        "-sys --system-prompt": "--system",
        "-cnv --conversation --interactive": "`twostroke chat MODEL`",
        "--jinja": f"{_NOT_NEEDED}; the model's chat template is always used",
        "--trust-remote-code": f"{_NOT_NEEDED}; no code of a model is ever run",
        "--enable-auto-tool-choice": f"{_NOT_NEEDED}; --tool-call-parser is enough",
        "--disable-log-requests": f"{_NOT_NEEDED}; requests are not logged",
        "--disable-log-stats": f"{_NOT_NEEDED}; figures are at /metrics",
        "--kv-cache-memory-bytes": "--kv-cache-memory",
        "--swap-space": "--kv-offloading-size",
        "--allowed-origins": "--cors-origins",
        "--guided-decoding-backend": f"{_NOT_NEEDED}; there is one backend",
        "--format --json-schema --grammar": "--structured-outputs",
    }
)
"""Flags of other programs, each with its equivalent here."""


def equivalent_flag(unknown: str, arguments: Sequence[str]) -> str | None:
    """Return a sentence with the equivalent of an unknown flag; None if the flag is not in `OTHER_FLAGS`.

    Args:
        unknown: the flag as the parser cut it; for -ngl it may be -n.
        arguments: the words as they were typed.
    """
    typed = [argument.partition("=")[0] for argument in arguments]
    whole = [word for word in typed if word in OTHER_FLAGS and word.startswith(unknown)]
    name = whole[0] if whole else unknown
    return f"{name}. In twostroke it is {OTHER_FLAGS[name]}" if name in OTHER_FLAGS else None


STDIN = "-"
"""Prompt, or prompt file, that means standard input."""
_END_OF_FLAGS = "--"
_FLAG = re.compile(r"--[A-Za-z][\w-]*")
_NEGATIVE = re.compile(r"-[\d.]+[A-Za-z%]\w*")
_TYPE_NAMES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "yes or no",
    str: "a string",
    Path: "a path",
}


def run_command_line(app: App, words: Sequence[str], program: str) -> None:
    """Run a command.

    Args:
        app: the program's commands.
        words: the command and its flags.
        program: name of the program, which errors begin with.

    Raises:
        SystemExit: with code 2 for a command that cannot be parsed, and code 1 for one that is refused or fails, each
            after a line on stderr; or as the command raises it.
    """
    try:
        with help_of(words) as known:
            app(parser_words(known), exit_on_error=False, print_error=False)
    except CycloptsError as error:
        sys.stderr.write(f"{program}: {error_message(error, words)}\n")
        sys.exit(2)
    except TwostrokeError as error:
        sys.stderr.write(f"{program}: {error}\n")
        sys.exit(1)


def parser_words(arguments: Sequence[str]) -> list[str]:
    """Return the words of a command in the form that the parser accepts.

    >>> parser_words(["generate", "-", "--seed", "1"]), parser_words(["help", "chat"]), parser_words(["version"])
    (['generate', '--prompt-file=-', '--seed', '1'], ['chat', '--help'], ['--version'])
    >>> parser_words(["chat", "help"]), parser_words(["generate", "--", "help"])
    (['chat', '--help'], ['generate', '--', 'help'])
    """
    match arguments:
        case ["help", *rest]:
            return [*rest, "--help"]
        case [command, "help"] | ["bench" as command, _, "help"] if not (
            command.startswith("-") or _path_exists("help")
        ):
            return [*arguments[:-1], "--help"]
        case ["version"] | ["-v"] | ["-V"]:
            return ["--version"]
        case ["generate", *rest]:
            return ["generate", *_replace_dash(_join_negative_values(rest))]
        case _:
            return _join_negative_values(arguments)


def _path_exists(word: str) -> bool:
    """Return whether a word names a file or a folder; it is then not a command."""
    return os.path.exists(word)


def _join_negative_values(words: Sequence[str]) -> list[str]:
    """Join a flag and its value such as -1GB, which the parser would take for flags."""
    joined: list[str] = []
    for index, word in enumerate(words):
        flag = joined[-1] if joined else ""
        if _END_OF_FLAGS in words[:index] or not (_NEGATIVE.fullmatch(word) and _FLAG.fullmatch(flag)):
            joined.append(word)
        else:
            joined[-1] = f"{flag}={word}"
    return joined


def _replace_dash(words: Sequence[str]) -> Iterator[str]:
    """Replace "-" by --prompt-file=-, because the parser reads a dash as the start of a flag."""
    flags = list(words[: words.index(_END_OF_FLAGS)]) if _END_OF_FLAGS in words else list(words)
    for index, word in enumerate(flags):
        is_value = index > 0 and flags[index - 1] == "--prompt-file"
        names_file = word == "--prompt-file" and flags[index + 1 : index + 2] == [STDIN]
        if word == STDIN:
            yield f"--prompt-file={STDIN}"
        elif is_value or not names_file:
            yield word
    yield from words[len(flags) :]


def error_message(error: CycloptsError, arguments: Sequence[str]) -> str:
    """Return the error message for a command that cannot be parsed, in one line."""
    match error:
        case UnknownCommandError(unused_tokens=[word, *_]) if not error.command_chain:
            return _unknown_command(word, error)
        case UnknownOptionError():
            unknown = (error.token.keyword or error.token.value).partition("=")[0]
            if unknown == STDIN:
                return f"{STDIN!r} means a prompt on stdin, for generate only; chat reads stdin without it."
            here = equivalent_flag(unknown, arguments)
            if here is not None:
                return f"Unknown option: {here}."
            is_prompt = "generate" in (error.command_chain or ())
            behind = ' Put a prompt that begins with "-" after "--": twostroke generate [FLAGS] -- PROMPT'
            every_flag = f" {HELP_ALL} lists every flag."
            return _one_line(error) + every_flag + (behind if is_prompt else "")
        case MissingArgumentError(argument=argument) if argument is not None:
            name = error.keyword or next((token.keyword for token in argument.tokens if token.keyword), None)
            what = f"{argument.name} is required{_by_command_text(error)}" if name is None else f"{name} needs a value"
            choices = [repr(value) for value in get_args(argument.hint)] if get_origin(argument.hint) is Literal else []
            return f"{what}{': ' if choices else ''}{' or '.join(choices)}. --help shows how."
        case CoercionError(msg=None, target_type=kind, token=token) if kind is not None and token is not None:
            wanted = dict.fromkeys(_accepted_values(kind))
            if error.__cause__ is None and get_origin(kind) is not Literal and wanted:
                name = token.keyword or (error.argument.name.lstrip("-").upper() if error.argument else "the value")
                return f"{name}={shown(token.value)}: must be {' or '.join(wanted)}."
            return _one_line(error)
        case UnusedCliTokensError(unused_tokens=[*words]):
            more = "chat takes only the model: type a question after the start, or send it on stdin. "
            is_chat = (error.command_chain or ())[:1] == ("chat",)
            return f"{'' if not is_chat else more}Too many words: {' '.join(map(repr, words))}."
        case _:
            return _one_line(error)


def _unknown_command(word: str, error: CycloptsError) -> str:
    if word in OTHER_COMMANDS:
        return f"there is no command {word!r} here: {OTHER_COMMANDS[word]}."
    if "/" in word or word.endswith((".gguf", ".safetensors")) or os.path.exists(word):
        return f"{word!r} is not a command; put a command before the model: twostroke chat {word}"
    return _one_line(error)


def _by_command_text(error: CycloptsError) -> str:
    """Return " by COMMAND" if the parser had found a command, else ""."""
    return f" by {' '.join(error.command_chain)}" if error.command_chain else ""


def _one_line(error: CycloptsError) -> str:
    return " ".join(str(error).split())


def _accepted_values(hint: Any) -> Iterator[str]:
    """Yield descriptions of the values that a type accepts."""
    if hint in _TYPE_NAMES:
        yield _TYPE_NAMES[hint]
    elif get_origin(hint) is Literal:
        yield from map(repr, get_args(hint))
    else:
        for part in get_args(hint):
            if part is not NoneType and part is not Ellipsis:
                yield from _accepted_values(part)
