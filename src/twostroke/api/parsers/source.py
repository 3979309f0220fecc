"""Text that arrives in pieces, for parsers that are written as if it were complete.

A parser is a generator. It yields when it needs more text, and is resumed when there is more or the text has ended.
A grammar therefore reads from top to bottom, and the split into pieces cannot matter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
"""Part of a parser that returns T; it yields whenever it waits for text."""

MAX_HEAD_CHARS = 512
"""Maximum characters of names, keys and the like. It bounds the text that is held back and read repeatedly."""

_SPACE = re.compile(r"\s*")


class Stops:
    """Texts to search for; none is a prefix of another."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts
        self.max_chars = max(map(len, texts))
        self._pattern = re.compile("|".join(map(re.escape, texts)))
        self._first_char = re.compile("|".join({re.escape(text[0]) for text in texts}))

    def find(self, text: str, position: int = 0) -> tuple[int, str] | None:
        """Return the position and text of the first match; None if there is none."""
        found = self._pattern.search(text, position)
        return (found.start(), found.group()) if found else None

    def num_undecided(self, text: str) -> int:
        """Return the length of the longest suffix of the text that may be the beginning of one of them.

        >>> Stops("<think>").num_undecided("a < b <th")
        3
        """
        for found in self._first_char.finditer(text, max(0, len(text) - self.max_chars + 1)):
            end = text[found.start() :]
            if any(stop.startswith(end) for stop in self.texts):
                return len(end)
        return 0


class Source:
    """Text of one generation so far; `position` is where a parser reads next.

    A parser goes back by setting `position` to an earlier value, unless it has called `forget` in between.
    """

    def __init__(self) -> None:
        self.text = ""
        self.position = 0
        self.has_ended = False
        self.is_cut = False
        """Whether the text was cut off where the model would have gone on, as by max_tokens."""
        self.wanted_more_text = False
        """Whether a parser wanted more text after the end; callers reset it."""
        self.num_forgotten = 0
        """Characters of the generation before `text`."""

    @property
    def num_unread(self) -> int:
        """Characters that have arrived and are unread."""
        return len(self.text) - self.position

    @property
    def place(self) -> int:
        """Characters of the generation before the next one to read."""
        return self.num_forgotten + self.position

    def append(self, text: str) -> None:
        """Add text that has arrived."""
        self.text += text

    def forget(self) -> None:
        """Drop the text that has been read."""
        self.num_forgotten += self.position
        self.text, self.position = self.text[self.position :], 0

    def more(self, num_chars: int = 1) -> Reading[bool]:
        """Wait for so many unread characters; return False if the text ends before."""
        while self.num_unread < num_chars:
            if self.has_ended:
                self.wanted_more_text = True
                return False
            yield
        return True

    def match(self, pattern: re.Pattern[str]) -> str:
        """Read what the pattern matches in the available text; "" if it does not match."""
        found = pattern.match(self.text, self.position)
        if found is None:
            return ""
        self.position = found.end()
        return found.group()

    def every(self, pattern: re.Pattern[str]) -> Reading[None]:
        """Read as many characters as the pattern, a repetition, matches."""
        while (yield from self.more()):
            self.match(pattern)
            if self.num_unread:
                return

    def space(self) -> Reading[None]:
        """Read whitespace, if there is any."""
        yield from self.every(_SPACE)

    def literal(self, *expected: str) -> Reading[str]:
        """Read and return one of these texts, none of which is a prefix of another.

        If none comes, read nothing and return "".
        """
        while True:
            for text in expected:
                if self.text.startswith(text, self.position):
                    self.position += len(text)
                    return text
            if self.has_ended or not self._may_become(expected):
                self.wanted_more_text |= self.has_ended_within(*expected)
                return ""
            yield

    def closing(self, *expected: str) -> Reading[str]:
        """Read whitespace and one of these texts, and return the text; if none comes, read nothing and return "".

        It is for the end of a call: if the generation ends within the text, that piece of markup is read as well.
        """
        start = self.position
        yield from self.space()
        found = yield from self.literal(*expected)
        if not found:
            self.position = len(self.text) if self.has_ended_within(*expected) else start
        return found

    def has_ended_within(self, *expected: str) -> bool:
        """Return whether the text has ended where one of these may have begun."""
        return self.has_ended and self._may_become(expected)

    def until(self, *stops: str) -> Reading[str | None]:
        """Read up to the first of the stops, which stays unread; None, with nothing read, after MAX_HEAD_CHARS."""
        wanted = Stops(*stops)
        while True:
            if found := wanted.find(self.text, self.position):
                end = found[0]
                if end - self.position > MAX_HEAD_CHARS:
                    return None
                text, self.position = self.text[self.position : end], end
                return text
            if self.has_ended or self.num_unread > MAX_HEAD_CHARS + wanted.max_chars:
                self.wanted_more_text |= self.num_unread <= MAX_HEAD_CHARS + wanted.max_chars
                return None
            yield

    def copy_until(
        self, stops: Stops, emit: Callable[[str], None], *, drops_partial_stop: bool = False
    ) -> Reading[str]:
        """Emit text as it comes, up to the first stop, which stays unread and is returned; "" if none comes.

        Text that may be the beginning of a stop is held back until that is decided. Text that was read is forgotten.

        Args:
            stops: texts to search for.
            emit: receives the text.
            drops_partial_stop: whether a stop in which the text is cut is dropped, unless it is a single character.
        """
        while True:
            self.forget()
            found = stops.find(self.text)
            is_whole = self.has_ended and not (self.is_cut and drops_partial_stop)
            num_undecided = 0 if found or is_whole else stops.num_undecided(self.text)
            if self.has_ended and num_undecided == 1:
                num_undecided = 0
            end = found[0] if found else len(self.text) - num_undecided
            if end:
                emit(self.text[:end])
            self.position = len(self.text) if self.has_ended and not found else end
            self.forget()
            if found or self.has_ended:
                return found[1] if found else ""
            yield

    def _may_become(self, expected: tuple[str, ...]) -> bool:
        """Return whether all unread text is a prefix of one of these; true if there is none."""
        unread = self.text[self.position :]
        return any(text.startswith(unread) for text in expected)
