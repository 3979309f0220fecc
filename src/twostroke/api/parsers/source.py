"""Text that comes in pieces, for parsers that are written as if it were all there.

A parser is a generator: where it needs text that has not come, it yields and is resumed when there is more or when the
text has ended. So a grammar reads from top to bottom, and where the pieces are cut cannot matter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
"""A part of a parser that returns T; it yields wherever it has to wait for text."""

MAX_HEAD_CHARS = 512
"""Of names, keys and the like: longer ones are none. It bounds what is held back and read again and again."""

_SPACE = re.compile(r"\s*")


class Stops:
    """Texts to look for; none of them begins with another."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts
        self.max_chars = max(map(len, texts))
        self._pattern = re.compile("|".join(map(re.escape, texts)))
        self._first_char = re.compile("|".join({re.escape(text[0]) for text in texts}))

    def find(self, text: str, position: int = 0) -> tuple[int, str] | None:
        """Return where the first of them begins, and which it is; None where none does."""
        found = self._pattern.search(text, position)
        return (found.start(), found.group()) if found else None

    def num_undecided(self, text: str) -> int:
        """Length of the longest end of the text that may be the beginning of one of them.

        >>> Stops("<think>").num_undecided("a < b <th")
        3
        """
        for found in self._first_char.finditer(text, max(0, len(text) - self.max_chars + 1)):
            end = text[found.start() :]
            if any(stop.startswith(end) for stop in self.texts):
                return len(end)
        return 0


class Source:
    """The text of one generation as far as it has come; `position` is where a parser reads on.

    A parser goes back by setting `position` to an earlier one, unless it has called `forget` in between.
    """

    def __init__(self) -> None:
        self.text = ""
        self.position = 0
        self.has_ended = False
        self.is_cut = False
        """Whether the text ended where its writer would have gone on, as by max_tokens."""
        self.lacks_text = False
        """Whether more was waited for when the text had ended; for whoever sets it back before."""
        self.num_forgotten = 0
        """Characters of the generation before `text`."""

    @property
    def num_unread(self) -> int:
        """Characters that have come and are not read."""
        return len(self.text) - self.position

    @property
    def place(self) -> int:
        """Characters of the generation before what is read next."""
        return self.num_forgotten + self.position

    def append(self, text: str) -> None:
        """More has come."""
        self.text += text

    def forget(self) -> None:
        """Lets go of what was read."""
        self.num_forgotten += self.position
        self.text, self.position = self.text[self.position :], 0

    def more(self, num_chars: int = 1) -> Reading[bool]:
        """Waits for so many unread characters; False if the text ends before."""
        while self.num_unread < num_chars:
            if self.has_ended:
                self.lacks_text = True
                return False
            yield
        return True

    def match(self, pattern: re.Pattern[str]) -> str:
        """Reads what the pattern matches of the text that has come, "" if it does not."""
        found = pattern.match(self.text, self.position)
        if found is None:
            return ""
        self.position = found.end()
        return found.group()

    def every(self, pattern: re.Pattern[str]) -> Reading[None]:
        """Reads as many characters as there are of those that the pattern matches any number of."""
        while (yield from self.more()):
            self.match(pattern)
            if self.num_unread:
                return

    def space(self) -> Reading[None]:
        """Reads whitespace, if there is any."""
        yield from self.every(_SPACE)

    def literal(self, *expected: str) -> Reading[str]:
        """Reads one of these texts, of which none begins with another, and returns it.

        If none comes, it reads nothing and returns "".
        """
        while True:
            for text in expected:
                if self.text.startswith(text, self.position):
                    self.position += len(text)
                    return text
            if self.has_ended or not self._may_become(expected):
                self.lacks_text |= self.has_ended_within(*expected)
                return ""
            yield

    def closing(self, *expected: str) -> Reading[str]:
        """Reads whitespace and one of these texts, and returns it; if none comes, it reads nothing and returns "".

        For what ends a call: a text that ends within it has nothing but a piece of markup there, which is read as well.
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
        """Reads up to the first of the stops, which stays unread; None, and nothing read, if it is not near."""
        wanted = Stops(*stops)
        while True:
            if found := wanted.find(self.text, self.position):
                end = found[0]
                if end - self.position > MAX_HEAD_CHARS:
                    return None
                text, self.position = self.text[self.position : end], end
                return text
            if self.has_ended or self.num_unread > MAX_HEAD_CHARS + wanted.max_chars:
                self.lacks_text |= self.num_unread <= MAX_HEAD_CHARS + wanted.max_chars
                return None
            yield

    def copy_until(self, stops: Stops, emit: Callable[[str], None], *, drops_half: bool = False) -> Reading[str]:
        """Hands text on as it comes, up to the first stop, which stays unread and is returned; "" if none comes.

        What may be the beginning of a stop is kept back until that is decided. Forgets what it has read.

        Args:
            stops: to look for.
            emit: takes the text.
            drops_half: whether a stop in which the text is cut is handed to nobody, unless one character is all of it.
        """
        while True:
            self.forget()
            found = stops.find(self.text)
            is_whole = self.has_ended and not (self.is_cut and drops_half)
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
        """Whether all that is unread is the beginning of one of these; of nothing, it is."""
        unread = self.text[self.position :]
        return any(text.startswith(unread) for text in expected)
