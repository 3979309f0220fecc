"""Model and prompt of `twostroke generate`, told apart from its words."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from twostroke.cli.other_programs import STDIN
from twostroke.errors import ClientError, InvalidParameter
from twostroke.model.model_path import HUB_ID

_USAGE = "twostroke generate [MODEL] PROMPT, with - as PROMPT to read it from stdin"
_FILES = (".gguf", ".ggml", ".safetensors", ".bin", ".pt", ".pth", ".onnx")
_PLACES = ("/", "./", "../", "~/")
_SIZED = re.compile(r"[A-Za-z][\w.]*[-_][\w.-]*\d[bBmM](?:[-_.:][\w.:-]*)?|[\w.-]+:[\w.-]*\d[\w.-]*|[\w.-]+:latest")
_FAMILY = re.compile(
    r"(?:deepseek|gemma|gpt|granite|llama|mistral|mixtral|phi|qwen|smollm|tinyllama|codellama|olmo)"
    r"(?:-?[\d.:-][\w.:-]*)?",
    re.IGNORECASE,
)
_PATH = re.compile(r"[A-Z]:[/\\]\S*|(?:[a-z]+://)?[\w.@:~-]*(?:/[\w.@:~-]+)+/?", re.IGNORECASE)
"""Path, address, or hub id with the prefixes and suffixes that other programs use."""


def model_and_prompt(words: Sequence[str], prompt_file: Path | None, *, has_model: bool) -> tuple[str | None, str]:
    """Return the model, if a word names one, and the prompt.

    Args:
        words: positional words of the command line.
        prompt_file: file to read the prompt from instead; "-" for stdin.
        has_model: whether a flag names the model.

    Raises:
        ClientError: there is no prompt, or there are too many words.
        InvalidParameter: the file cannot be read.
    """
    *models, prompt = [*words, _read(prompt_file)] if prompt_file is not None else words or [None]
    if prompt is None:
        raise ClientError(f"there is no PROMPT: {_USAGE}.")
    if len(models) > 1:
        given = " ".join(map(repr, words))
        raise ClientError(f"too many words ({given}): {_USAGE}. Quote a PROMPT that has spaces.")
    if not (models or has_model or prompt_file):
        _refuse_lone_model(prompt)
    if not prompt:
        raise ClientError("the PROMPT is empty: a model needs at least one token to begin with.")
    return (models[0] if models else None), prompt


def _refuse_lone_model(word: str) -> None:
    """Raise if the only word looks like a model or a file; the embedded model would complete it as a prompt."""
    quoted = shlex.quote(word)
    if _is_file(word) and not word.lower().endswith(_FILES):
        meant = f"To complete its text: twostroke generate --prompt-file {quoted}"
        raise ClientError(f"{word!r} is a file, not a model: {_USAGE}. {meant}")
    if looks_like_model(word):
        itself = f"To complete this word, put a model before it: twostroke generate embedded {quoted}"
        raise ClientError(f"there is no PROMPT after the model {word!r}: {_USAGE}. {itself}")


def looks_like_model(word: str) -> bool:
    """Return whether a word looks like a model: here, on the hub, or in Ollama's library.

    >>> words = ("Qwen/Qwen3-0.6B", "llama3.2:1b", "./model", "hello", "def f(a, b):", "a / b")
    >>> [looks_like_model(word) for word in words]
    [True, True, True, False, False, False]
    """
    if not word or any(character.isspace() for character in word):
        return False
    if word == "embedded" or word.lower().endswith(_FILES) or word.startswith(_PLACES):
        return True
    patterns = (HUB_ID, _SIZED, _FAMILY, _PATH)
    return any(pattern.fullmatch(word) for pattern in patterns) or os.path.isdir(word)


def _is_file(word: str) -> bool:
    return os.path.isfile(word)


def _read(path: Path) -> str:
    try:
        if str(path) == STDIN:
            if sys.stdin.isatty():
                sys.stderr.write("reading the prompt from the terminal; Ctrl-D on a line of its own ends it\n")
            return sys.stdin.buffer.read().decode("utf-8")
        return path.read_bytes().decode("utf-8")  # read_text would turn \r\n into \n, which changes the tokens
    except UnicodeDecodeError as error:
        limit = f"is not UTF-8 text (byte {error.start})"
        raise InvalidParameter("prompt_file", str(path), limit) from error
    except OSError as error:
        raise InvalidParameter("prompt_file", str(path), f"cannot be read ({error.strerror})") from error
