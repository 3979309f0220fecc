"""Search for stop strings in generated text. The engine checks stop tokens and lengths (engine/generation.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


class _StopString:
    """One stop string with the borders of its prefixes (Knuth-Morris-Pratt)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.borders = [0] * (len(text) + 1)
        """Border lengths: borders[n] is the length of the longest proper prefix of text[:n] that is also its suffix."""
        length = 0
        for end in range(1, len(text)):
            while length and text[end] != text[length]:
                length = self.borders[length]
            length += text[end] == text[length]
            self.borders[end + 1] = length

    def scan(self, text: str, matched: int, position: int = 0) -> tuple[int, int | None]:
        """Search text until the first match.

        Args:
            text: the next text.
            matched: number of the stop string's characters that the text before `position` ends with.
            position: where to begin in `text`.

        Returns:
            Number of the stop string's characters that the text ends with now, and the end of a match in `text`, if
            any.
        """
        stop = self.text
        while position < len(text):
            if not matched:
                position = text.find(stop[0], position)
                if position < 0:
                    return 0, None
            while matched and text[position] != stop[matched]:
                matched = self.borders[matched]
            matched += text[position] == stop[matched]
            position += 1
            if matched == len(stop):
                return self.borders[matched], position
        return matched, None


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string that was found."""

    stop: str
    start: int
    """Start of the match in the text not released before, including the new text."""
    end: int


class StopFinder(Protocol):
    """A search for stop strings in one generation's text; it holds text back that may be the beginning of one."""

    def push(self, text: str, may_stop: bool = True) -> tuple[str, StopMatch | None]:
        """Process the next text.

        Args:
            text: continues the text pushed before.
            may_stop: False ignores matches that end in this text, for good.

        Returns:
            Without a match the text to release now; with a match all the text that was held, and where to cut it.
        """
        ...

    def finish(self, may_stop: bool = True, *, is_cut: bool = False) -> tuple[str, StopMatch | None]:
        """Process the end of the text; return what `push` returns, with nothing held any more.

        Args:
            may_stop: as for `push`.
            is_cut: whether the model would have continued.
        """
        ...


class StopStrings(StopFinder):
    """A search for stop strings; it releases the text that can no longer be part of one.

        released | held: "</to"  +  new: "ol> and"         stop string "</tool>"
                              [------------]                    found: start 0, end 7 of held + new

    The match that ends first wins; of several that end at the same character, the longest. So the result does not
    depend on how tokens divide the text.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [_StopString(text) for text in stops]
        self._matched = [0] * len(self._stops)
        self._held = ""

    def push(self, text: str, may_stop: bool = True) -> tuple[str, StopMatch | None]:
        first: StopMatch | None = None
        unreleased = self._held + text
        for index, stop in enumerate(self._stops):
            matched, end = stop.scan(text, self._matched[index])
            while end is not None and not may_stop:
                matched, end = stop.scan(text, matched, end)
            self._matched[index] = matched
            if end is not None:
                match = StopMatch(stop.text, len(self._held) + end - len(stop.text), len(self._held) + end)
                if first is None or (match.end, match.start) < (first.end, first.start):
                    first = match
        if first is not None:
            self._held = ""
            return unreleased, first
        num_held = max(self._matched, default=0)
        released = unreleased[: len(unreleased) - num_held]
        self._held = unreleased[len(released) :]
        return released, None

    def finish(self, may_stop: bool = True, *, is_cut: bool = False) -> tuple[str, StopMatch | None]:
        """Return the text that was held; it contains no stop string."""
        held, self._held = self._held, ""
        return held, None


MARKS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))
"""Unicode noncharacters, free for internal use. Each stands for a special token that the text leaves out."""


class HiddenTokens:
    """Special tokens that the text leaves out and that stop strings name.

    A stop string must match whether the model writes it with a special token or letter by letter. So each such token
    is a mark in the searched text, and every stop string that names it is also searched with the mark in place of the
    name. Marks are removed from the released text.

    Args:
        names: token id to text of the special tokens that are left out.
        stops: stop strings.
    """

    def __init__(self, names: Mapping[int, str], stops: Sequence[str]) -> None:
        named = [token_id for token_id, name in names.items() if name and any(name in stop for stop in stops)]
        self.marks = dict(zip(named, MARKS, strict=False))
        """Marks by token id."""
        self._written: dict[str, str] = {}
        """Requested stop string by the stop string with marks."""
        for stop in stops:
            marked = stop
            for token_id, mark in self.marks.items():
                marked = marked.replace(names[token_id], mark)
            if marked != stop:
                self._written[marked] = stop
        self._without_marks = str.maketrans(dict.fromkeys(self.marks.values(), ""))
        self.stops = (*stops, *self._written)
        """Stop strings to search for, with and without marks."""

    def shown(self, text: str) -> str:
        """Return the text without marks."""
        return text.translate(self._without_marks) if self.marks else text

    def asked(self, stop: str) -> str:
        """Return the stop string that was requested, given the one that was found."""
        return self._written.get(stop, stop)
