"""Messages name what users know: no class of Python is written into one."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import twostroke
from twostroke.plain_words import kind_of, reason_of

SOURCES = Path(twostroke.__file__).parent
NOT_FOR_USERS = {
    "measure": "what went wrong on the bench is recorded as it was",
    "events.py": "the log's own names of events",
    "event_codec.py": "likewise",
    "live/recording.py": "likewise",
    "kv_transfer": "names of the messages of a protocol",
    "config/path_codec.py": "a message that we forgot to make one",
    "llm.py": "SamplingParams, which callers of it write themselves",
}


def sources() -> Iterator[Path]:
    for path in sorted(SOURCES.rglob("*.py")):
        name = path.relative_to(SOURCES).as_posix()
        if name not in NOT_FOR_USERS and name.split("/")[0] not in NOT_FOR_USERS:
            yield path


def class_names(tree: ast.AST) -> Iterator[int]:
    """Yield lines with a string that includes the name of a class, or an exception's repr."""
    asserted = {id(part) for node in ast.walk(tree) if isinstance(node, ast.Assert) for part in ast.walk(node)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.FormattedValue) or id(node) in asserted:
            continue
        names_class = any(isinstance(part, ast.Attribute) and part.attr == "__name__" for part in ast.walk(node.value))
        is_error = isinstance(node.value, ast.Name) and node.value.id in ("error", "exception", "exc")
        if names_class or (is_error and node.conversion == ord("r")):
            yield node.lineno


def test_the_search_finds_them() -> None:
    found = 'f"{type(x).__name__}"\nf"{error!r}"\nassert x, f"{kind.__name__}"\nf"{error} {x!r}"'
    assert list(class_names(ast.parse(found))) == [1, 2]


def test_no_message_is_made_with_the_name_of_a_class() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in sources()}
    found = [
        f"{path.relative_to(SOURCES)}:{line}"
        for path, text in texts.items()
        if any(sign in text for sign in ("__name__", "!r", "=}"))  # without one there is nothing to find
        for line in class_names(ast.parse(text))
    ]
    assert len(texts) > 300
    assert found == []


KINDS = [None, True, 1, 1.5, "a", (1,), {}, object(), {1}]


@pytest.mark.parametrize("value", KINDS, ids=lambda value: type(value).__name__)
def test_every_value_has_a_kind_without_a_class(value: object) -> None:
    assert type(value).__name__ not in kind_of(value).split()


def test_reasons() -> None:
    assert reason_of(OSError(28, "No space left on device")) == "No space left on device"
    assert reason_of(ValueError(" two\n lines ")) == "two lines"
    assert "MemoryError" not in reason_of(MemoryError())


def failure_of(do: Callable[[], object]) -> Exception:
    try:
        do()
    except Exception as error:
        return error
    raise AssertionError("it did not fail")


@pytest.mark.parametrize(
    ("do", "words"),
    [
        (lambda: int("9" * 5000), "a number has more than 4300 digits"),
        (lambda: json.loads("9" * 5000), "a number has more than 4300 digits"),
        (lambda: str(10**5000), "a number has more than 4300 digits"),
        (lambda: b"a\xff".decode(), "byte 1 is not UTF-8"),
        (lambda: b"\xff\xfe{".decode("utf-8-sig"), "byte 0 is not UTF-8"),
        (lambda: {}["\x1b[31m"], "'\\x1b[31m' is missing"),
    ],
)
def test_reasons_of_python_in_our_words(do: Callable[[], object], words: str) -> None:
    assert reason_of(failure_of(do)) == words


@pytest.mark.parametrize("text", ["x" * 10**6, "\x00" * 10**6, "\u2028" * 10**6, "\U0001f600" * 10**6])
def test_a_reason_is_short_and_can_be_printed(text: str) -> None:
    told = reason_of(ValueError(text))
    assert len(told) < 2050
    assert told.isprintable()
