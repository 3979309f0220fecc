"""Types of all errors that Twostroke raises on purpose.

    TwostrokeError
    ├── ClientError                 the caller can correct it; other requests are not affected
    │   ├── InvalidParameter        a value out of range, or two that contradict each other
    │   ├── UnknownParameter        an unknown name
    │   └── InvalidPrompt           empty, too long, ids outside the vocabulary, a template that fails
    ├── SetupError                  the engine cannot start with this model or these settings
    │   ├── ModelNotFound           no such folder, hub id unreachable
    │   ├── UnsupportedModel        an architecture, rope type or layout that is not implemented
    │   ├── CorruptCheckpoint       missing, extra, misshapen, unreadable or not finite tensors
    │   └── DoesNotFit              an explicit size that memory cannot hold, with the arithmetic
    ├── UnreadableEvent             a line of an event log that is no event, or of another version
    └── EngineError                 an internal failure: a step failed, or the engine has stopped
        ├── RankLost                one of the ranks that compute a model together is gone
        └── EngineUnavailable       no engine takes requests now; one may soon
            └── Overloaded          the engine has too much work

Each message names the value, the limit and the remedy. Broken internal invariants are assertions, not these.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import PurePath
from typing import Any, cast

from twostroke.plain_words import printable

MAX_SHOWN_CHARS = 80
"""Longest value that a message shows completely, in characters."""
_BEGINNING = 60
"""Characters shown of a longer value."""
_MAX_ITEMS = MAX_SHOWN_CHARS // 3
"""Most items of a list or an object that are formatted; so many fill the shown characters."""
_MAX_LEVELS = 3
_MAX_BITS = 256
"""Most bits of a number that is written with all its digits."""
_MAX_MESSAGE_CHARS = 4000
"""Characters of a message about a model's files, which may contain names of any length."""
_MAX_SEARCHED_CHARS = 64
"""Longest unknown name for which similar names are searched, in characters."""


class TwostrokeError(Exception):
    """Base of every error that Twostroke raises on purpose."""


class ClientError(TwostrokeError):
    """An error in the request; the same request will fail again until it is changed."""


class InvalidParameter(ClientError, ValueError):
    """Error for a parameter whose value cannot be used.

    Args:
        name: the parameter, as the caller spells it.
        value: the given value.
        limit: the allowed values.
        remedy: what to do instead; empty if the limit is enough.
    """

    def __init__(self, name: str, value: object, limit: str, remedy: str = "") -> None:
        self.name, self.value, self.limit, self.remedy = name, value, limit, remedy
        head = f"{name} is not given" if value is None else f"{name}={shown(value)}"
        super().__init__(f"{head}: {limit}." + (f" {remedy}" if remedy else ""))


class UnknownParameter(ClientError, TypeError):
    """Error for an unknown keyword; the message offers the nearest known names."""

    def __init__(self, name: str, known: Iterable[str], where: str) -> None:
        self.name = name
        known = sorted(known)
        near = difflib.get_close_matches(name, known, n=3) if len(name) <= _MAX_SEARCHED_CHARS else []
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"known: {', '.join(known)}."
        super().__init__(f"{where} has no parameter {shown(name)}; {hint}")


class InvalidPrompt(ClientError, ValueError):
    """Error for a prompt that cannot be run."""


class SetupError(TwostrokeError):
    """Error for an engine that cannot start as asked. Its message is one printable line, whatever a model's files
    contain."""

    def __init__(self, message: object = "") -> None:
        super().__init__(printable(str(message), _MAX_MESSAGE_CHARS))


class ModelNotFound(SetupError):
    """Error for a model folder that does not exist, without a hub to fetch it from."""


class UnsupportedModel(SetupError):
    """Error for a checkpoint that needs something not implemented; the message lists what is."""


class CorruptCheckpoint(SetupError):
    """Error for a model's files that contradict each other or cannot be read."""


class DoesNotFit(SetupError):
    """Error for an explicit size that exceeds the machine; the message shows the arithmetic."""


class UnreadableEvent(TwostrokeError, ValueError):
    """Error for a line of an event log that is no event of this version."""


class EngineError(TwostrokeError):
    """Internal failure: a request ended with an error because its step failed, or the engine has stopped."""


class RankLost(EngineError):
    """Error for the loss of one of the ranks that compute a model together, so that nothing can be computed any more.

    Args:
        rank: number of the lost rank.
        reason: observation that showed the loss.
    """

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank} is lost: {reason}. See its log for the reason, and restart the engine.")
        self.rank = rank


class EngineUnavailable(EngineError):
    """Error for a request that was not begun because no engine takes requests.

    Args:
        message: the reason.
        may_return: whether retrying later may help.
    """

    def __init__(self, message: str, *, may_return: bool = True) -> None:
        super().__init__(message)
        self.may_return = may_return


class Overloaded(EngineUnavailable):
    """Error for a request that would wait too long.

    Args:
        message: the limit, and by how much it is exceeded.
        retry_after_s: seconds after which to retry, a whole number.
    """

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


def shown(value: object) -> str:
    """Return a value as messages show it; for a long one its beginning and its size, without reading the rest.

    >>> shown([1, "a"])
    "[1, 'a']"
    >>> shown(["text"] * 1000)[-20:]
    "', 'te… (1000 items)"
    >>> shown({"stream": True, "stop": [None]})
    "{'stream': true, 'stop': [null]}"
    """
    text = _beginning(value, _MAX_LEVELS)
    match value:
        case str() | bytes():
            is_whole, size = len(value) <= MAX_SHOWN_CHARS, f"{len(value)} characters"
        case list() | tuple() | dict():
            num_items = len(cast(list[Any], value))
            is_whole, size = num_items <= _MAX_ITEMS, f"{num_items} items"
        case _:
            is_whole, size = True, f"{len(text)} characters"
    return text if is_whole and len(text) <= MAX_SHOWN_CHARS else f"{text[:_BEGINNING]}… ({size})"


def show_name(name: object) -> str:
    """Return a name from a file as messages show it: printable, without quotes; for a long one its beginning.

    >>> show_name("model.norm.weight"), show_name("\x1b[2J"), len(show_name("a" * 10**6))
    ('model.norm.weight', '\\\\x1b[2J', 82)
    """
    return printable(name, MAX_SHOWN_CHARS, _BEGINNING) if isinstance(name, str) else shown(name)


def shorten(names: Sequence[object], limit: int = 8, show: Callable[[object], str] = show_name) -> str:
    """Return the first few names, formatted by `show`, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(map(show, names[:limit])) + more


def _beginning(value: Any, num_levels: int) -> str:
    """Return `repr` of a value, shortened where it is long or deep, with JSON's words for None, True and False."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, PurePath):
        value = str(value)
    kind: type[Any] = type(value)
    if kind in (str, bytes):
        return repr(value[:MAX_SHOWN_CHARS])
    if kind is int and value.bit_length() > _MAX_BITS:
        return f"a number of {value.bit_length()} bits"
    if kind not in (list, tuple, dict):
        return repr(value)
    if not num_levels:
        return "{…}" if kind is dict else "[…]"
    some = itertools.islice(value.items() if kind is dict else value, _MAX_ITEMS)
    if kind is dict:
        inner = ", ".join(f"{_beginning(key, 0)}: {_beginning(item, num_levels - 1)}" for key, item in some)
        return f"{{{inner}}}"
    inner = ", ".join(_beginning(item, num_levels - 1) for item in some)
    if kind is tuple:
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    return f"[{inner}]"
