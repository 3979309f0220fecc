"""Incremental reading of JSON that a model writes: where a value ends, and short strings."""

from __future__ import annotations

import json
import re

from twostroke.api.parsers.source import MAX_HEAD_CHARS, Reading, Source

_BARE = re.compile(r"[\sA-Za-z0-9_.,:+-]*")
"""Characters of JSON outside of strings, brackets excluded."""
_IN_STRING = re.compile(r'[^"\\]*')
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x1f]")
_CLOSER = {"{": "}", "[": "]"}


class JsonScanner:
    """Incremental scanner for the end of an object, list or string.

    It follows only strings and brackets. Other errors of the model (an extra comma, a bare word) are passed on to the
    client, while markup after an unfinished value does not become part of it.
    """

    def __init__(self) -> None:
        self._closers: list[str] = []
        """Closing brackets that are still missing, the innermost last."""
        self._in_string = False
        self._is_escaped = False
        self.has_ended = False
        """Whether no further text can belong to the value."""
        self.is_whole = False

    def take(self, source: Source) -> str:
        """Read the available text that belongs to the value.

        Control characters in strings, which JSON forbids and models write, are escaped.
        """
        taken: list[str] = []
        while source.num_unread and not self.has_ended:
            if self._in_string:
                taken.append(_CONTROL.sub(_escaped, self._take_of_string(source)))
            else:
                taken.append(source.match(_BARE) if self._closers else "")
                taken.append(self._take_structure(source))
        return "".join(taken)

    def _take_of_string(self, source: Source) -> str:
        if self._is_escaped:
            self._is_escaped = False
            return self._take_char(source)
        taken = source.match(_IN_STRING)
        if not source.num_unread:
            return taken
        char = self._take_char(source)
        self._is_escaped = char == "\\"
        if char == '"':
            self._in_string = False
            self._end_if_outermost()
        return taken + char

    def _take_structure(self, source: Source) -> str:
        """Read the next bracket or quotation mark; "" if there is none."""
        char = source.text[source.position : source.position + 1]
        if char in _CLOSER:
            self._closers.append(_CLOSER[char])
        elif char == '"':
            self._in_string = True
        elif char and self._closers and char == self._closers[-1]:
            self._closers.pop()
            self._end_if_outermost()
        else:
            self.has_ended = bool(char)
            return ""
        return self._take_char(source)

    def _end_if_outermost(self) -> None:
        self.has_ended = self.is_whole = not self._closers

    @staticmethod
    def _take_char(source: Source) -> str:
        source.position += 1
        return source.text[source.position - 1]


def is_complete_value(text: str) -> bool:
    """Return whether an object, list or string is complete; errors within it are ignored, as in JsonScanner."""
    source, value = Source(), JsonScanner()
    source.append(text)
    value.take(source)
    return value.is_whole


def read_value(source: Source) -> Reading[str | None]:
    """Read the text of an object, list or string as a whole; None if it is incomplete."""
    value = JsonScanner()
    taken: list[str] = []
    while not value.has_ended and (yield from source.more()):
        taken.append(value.take(source))
    return "".join(taken) if value.is_whole else None


def read_short_string(source: Source, max_chars: int = MAX_HEAD_CHARS) -> Reading[str | None]:
    """Read and decode a string such as a name; None if there is none, or if it is too long."""
    if not (yield from source.more()) or source.text[source.position] != '"':
        return None
    while not (text := source.match(_STRING)):
        if source.num_unread > max_chars or not (yield from source.more(source.num_unread + 1)):
            return None
    if len(text) > max_chars:  # the same result as for a string that has not ended
        source.position -= len(text)
        return None
    return decoded_string(text)


def decoded_string(text: str) -> str | None:
    """Return the value of a JSON string; None if it is invalid or contains a lone surrogate."""
    try:
        decoded: str = json.loads(text, strict=False)
        decoded.encode()
    except ValueError:
        return None
    return decoded


def _escaped(control: re.Match[str]) -> str:
    return json.dumps(control.group())[1:-1]
