"""Everything Twostroke refuses, as types.

    TwostrokeError
    ├── ClientError                 the caller can mend it; nobody else's request is touched
    │   ├── InvalidParameter        a value out of range, or two that contradict each other
    │   ├── UnknownParameter        a name that is not one of ours
    │   └── InvalidPrompt           empty, too long, ids outside the vocabulary, a template that fails
    ├── SetupError                  the engine cannot start with this model or these settings
    │   ├── ModelNotFound           no such folder, hub id unreachable
    │   ├── UnsupportedModel        an architecture, a rope type or a layout that we do not run
    │   ├── CorruptCheckpoint       missing, extra, misshapen, unreadable or not finite tensors
    │   └── DoesNotFit              an explicit size that memory cannot hold, with the arithmetic
    ├── UnreadableEvent             a line of an event log that is none, or of another version
    └── EngineError                 ours: a step failed, or the engine has stopped
        ├── RankLost                one of the processes that compute a model together is gone
        └── EngineUnavailable       no engine takes requests now; one may soon
            └── Overloaded          there is one, and it has too much to do

Each message names the value, the limit and the remedy. Broken invariants of our own are assertions, not these.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import PurePath
from typing import Any, cast

from twostroke.plain_words import printable

MOST_SHOWN = 80
"""Characters of a value that a message shows whole."""
_BEGINNING = 60
"""Characters of one that is longer."""
_MOST_ITEMS = MOST_SHOWN // 3
"""Of a list or an object that are looked at; so many fill what is shown."""
_MOST_LEVELS = 3
_MOST_BITS = 256
"""Of a number that is written with all its digits."""
_MOST_MESSAGE = 4000
"""Characters of a message about a model's files; they may hold names of any length."""
_MOST_NEAR = 64
"""Characters of an unknown name for which a similar one is looked for."""


class TwostrokeError(Exception):
    """Base of every error that Twostroke raises on purpose."""


class ClientError(TwostrokeError):
    """The request is at fault; the same request will fail again until it is changed."""


class InvalidParameter(ClientError, ValueError):
    """A parameter's value cannot be used.

    Args:
        name: the parameter, as the caller spells it.
        value: what was given.
        limit: what is allowed.
        remedy: what to do instead; empty when the limit says it all.
    """

    def __init__(self, name: str, value: object, limit: str, remedy: str = "") -> None:
        self.name, self.value, self.limit, self.remedy = name, value, limit, remedy
        head = f"{name} is not given" if value is None else f"{name}={shown(value)}"
        super().__init__(f"{head}: {limit}." + (f" {remedy}" if remedy else ""))


class UnknownParameter(ClientError, TypeError):
    """A keyword that nothing here understands; the nearest known names are offered."""

    def __init__(self, name: str, known: Iterable[str], where: str) -> None:
        self.name = name
        known = sorted(known)
        near = difflib.get_close_matches(name, known, n=3) if len(name) <= _MOST_NEAR else []
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"known: {', '.join(known)}."
        super().__init__(f"{where} has no parameter {shown(name)}; {hint}")


class InvalidPrompt(ClientError, ValueError):
    """The prompt cannot be run."""


class SetupError(TwostrokeError):
    """The engine cannot start as asked. Its message is one printable line, whatever a model's files say."""

    def __init__(self, message: object = "") -> None:
        super().__init__(printable(str(message), _MOST_MESSAGE))


class ModelNotFound(SetupError):
    """There is no such model folder, and no hub to fetch it from."""


class UnsupportedModel(SetupError):
    """The checkpoint asks for something that is not implemented; the message lists what is."""


class CorruptCheckpoint(SetupError):
    """The files of a model contradict each other or cannot be read."""


class DoesNotFit(SetupError):
    """An explicit size exceeds what the machine has; the message shows the arithmetic."""


class UnreadableEvent(TwostrokeError, ValueError):
    """A line of an event log is no event of this version."""


class EngineError(TwostrokeError):
    """Our failure: a request ended with an error because its step failed, or the engine has stopped."""


class RankLost(EngineError):
    """One of the ranks that compute a model together is gone, so nothing can be computed any more.

    Args:
        rank: which.
        reason: how that was noticed.
    """

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank} is lost: {reason}. Its log says why; start the engine again.")
        self.rank = rank


class EngineUnavailable(EngineError):
    """Nothing was begun.

    Args:
        message: why.
        may_return: whether asking again later may help.
    """

    def __init__(self, message: str, *, may_return: bool = True) -> None:
        super().__init__(message)
        self.may_return = may_return


class Overloaded(EngineUnavailable):
    """The request would wait too long.

    Args:
        message: which limit, and by how much.
        retry_after_s: when to ask again, in whole seconds.
    """

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


def shown(value: object) -> str:
    """Return a value as messages show it; of a long one its beginning and its size, without looking at the rest.

    >>> shown([1, "a"])
    "[1, 'a']"
    >>> shown(["text"] * 1000)[-20:]
    "', 'te… (1000 items)"
    >>> shown({"stream": True, "stop": [None]})
    "{'stream': true, 'stop': [null]}"
    """
    text = _beginning(value, _MOST_LEVELS)
    match value:
        case str() | bytes():
            is_whole, size = len(value) <= MOST_SHOWN, f"{len(value)} characters"
        case list() | tuple() | dict():
            num_items = len(cast(list[Any], value))
            is_whole, size = num_items <= _MOST_ITEMS, f"{num_items} items"
        case _:
            is_whole, size = True, f"{len(text)} characters"
    return text if is_whole and len(text) <= MOST_SHOWN else f"{text[:_BEGINNING]}… ({size})"


def name_shown(name: object) -> str:
    """Return a name from a file as messages show it: without quotes, printable; of a long one its beginning.

    >>> name_shown("model.norm.weight"), name_shown("\x1b[2J"), len(name_shown("a" * 10**6))
    ('model.norm.weight', '\\\\x1b[2J', 82)
    """
    return printable(name, MOST_SHOWN, _BEGINNING) if isinstance(name, str) else shown(name)


def shorten(names: Sequence[object], limit: int = 8, show: Callable[[object], str] = name_shown) -> str:
    """Return the first few names of a file's, or what `show` makes of them, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(map(show, names[:limit])) + more


def _beginning(value: Any, num_levels: int) -> str:
    """Return `repr` of a value, but for what is long or deep in it, and what JSON and users spell otherwise."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, PurePath):
        value = str(value)
    kind: type[Any] = type(value)
    if kind in (str, bytes):
        return repr(value[:MOST_SHOWN])
    if kind is int and value.bit_length() > _MOST_BITS:
        return f"a number of {value.bit_length()} bits"
    if kind not in (list, tuple, dict):
        return repr(value)
    if not num_levels:
        return "{…}" if kind is dict else "[…]"
    some = itertools.islice(value.items() if kind is dict else value, _MOST_ITEMS)
    if kind is dict:
        inner = ", ".join(f"{_beginning(key, 0)}: {_beginning(item, num_levels - 1)}" for key, item in some)
        return f"{{{inner}}}"
    inner = ", ".join(_beginning(item, num_levels - 1) for item in some)
    if kind is tuple:
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    return f"[{inner}]"
