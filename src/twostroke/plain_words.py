"""Values and exceptions in words for users: they know JSON and what they typed, and no class of Python."""

from __future__ import annotations

from collections.abc import Mapping

_KINDS: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (bool, "a boolean"),  # before the numbers: to Python it is one
    ((int, float), "a number"),
    (str, "a text"),
    (bytes, "bytes"),
    (Mapping, "an object"),
    ((list, tuple), "a list"),
)


def kind_of(value: object) -> str:
    """Return what kind of value this is, in JSON's words.

    >>> [kind_of(value) for value in (None, True, 3, 0.5, "a", [1], {})]
    ['null', 'a boolean', 'a number', 'a number', 'a text', 'a list', 'an object']
    """
    if value is None:
        return "null"
    return next((words for kinds, words in _KINDS if isinstance(value, kinds)), "something else")


def reason_of(error: BaseException) -> str:
    """Return what an exception says, in one line and without the name of its class.

    >>> reason_of(ValueError("too\\n  long")), reason_of(KeyError("name")), reason_of(MemoryError())
    ('too long', "'name' is missing", 'there is not enough memory')
    >>> reason_of(FileNotFoundError(2, "No such file or directory", "/a")), reason_of(RuntimeError())
    ('No such file or directory: /a', 'no reason was given; the log says where it happened')
    """
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename is not None else error.strerror
    if isinstance(error, KeyError):
        return f"{text} is missing"
    if not text and isinstance(error, MemoryError):
        return "there is not enough memory"
    return text or "no reason was given; the log says where it happened"
