"""When a generation has to stop at a text. Tokens and lengths are checked by the engine (engine/generation.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


class _StopString:
    """One stop string with the borders of its beginnings (Knuth-Morris-Pratt)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.borders = [0] * (len(text) + 1)
        """borders[n]: length of the longest proper beginning of text[:n] that is also its end."""
        length = 0
        for end in range(1, len(text)):
            while length and text[end] != text[length]:
                length = self.borders[length]
            length += text[end] == text[length]
            self.borders[end + 1] = length

    def scan(self, text: str, matched: int, position: int = 0) -> tuple[int, int | None]:
        """Reads on until the first match.

        Args:
            text: what comes next.
            matched: how much of the stop string the text before `position` ends with.
            position: where to begin in `text`.

        Returns:
            How much of the stop string the text read so far ends with, and where in `text` the match ends, if any.
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
    """A stop string was found."""

    stop: str
    start: int
    """Where it begins in the text that had not been released before, the new text included."""
    end: int


class StopFinder(Protocol):
    """Looks for stop strings in the text of one generation and holds back what may be the beginning of one."""

    def push(self, text: str, may_stop: bool = True) -> tuple[str, StopMatch | None]:
        """Take the next text.

        Args:
            text: follows what was pushed before.
            may_stop: False lets matches that end in this text pass, for good.

        Returns:
            Without a match the text to release now; with a match all the text that was held, and where to cut it.
        """
        ...

    def finish(self, may_stop: bool = True, *, is_cut: bool = False) -> tuple[str, StopMatch | None]:
        """Take the end of the text; return what `push` returns, with nothing held any more.

        Args:
            may_stop: as for `push`.
            is_cut: whether the model would have gone on.
        """
        ...


class StopStrings(StopFinder):
    """Watches one generation's text for stop strings; returns the text that cannot be part of one any more.

        released | held: "</to"  +  new: "ol> and"         stop string "</tool>"
                          [------------]                    found: start 0, end 7 of held + new

    The match that ends first wins, of several that end at the same character the longest. So it does not matter how
    tokens cut up the text.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [_StopString(text) for text in stops]
        self._matched = [0] * len(self._stops)
        self._held = ""

    def push(self, text: str, may_stop: bool = True) -> tuple[str, StopMatch | None]:
        """Take the next text, as StopFinder.push; the match that ends first wins."""
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
        """Return what was held, which is no stop string."""
        held, self._held = self._held, ""
        return held, None


MARKS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))
"""Code points that Unicode keeps for a program's own use. One stands for a special token that the text leaves out."""


class HiddenTokens:
    """Special tokens that the text leaves out and stop strings name.

    A stop string has to fire whether the model writes it with a special token or letter by letter. So such a token is a
    mark in the searched text, every stop string that names it is also looked for with the mark in place of the name,
    and marks are taken out of what is released.

    Args:
        names: token id to text of the special tokens that are left out.
        stops: stop strings.
    """

    def __init__(self, names: Mapping[int, str], stops: Sequence[str]) -> None:
        named = [token_id for token_id, name in names.items() if name and any(name in stop for stop in stops)]
        self.marks = dict(zip(named, MARKS, strict=False))
        """Token id to its mark."""
        self._written: dict[str, str] = {}
        """Stop string with marks to the one that was asked for."""
        for stop in stops:
            marked = stop
            for token_id, mark in self.marks.items():
                marked = marked.replace(names[token_id], mark)
            if marked != stop:
                self._written[marked] = stop
        self._without_marks = str.maketrans(dict.fromkeys(self.marks.values(), ""))
        self.stops = (*stops, *self._written)
        """What to look for."""

    def shown(self, text: str) -> str:
        """Return the text without marks."""
        return text.translate(self._without_marks) if self.marks else text

    def asked(self, stop: str) -> str:
        """Return the stop string that was asked for, given the one that was found."""
        return self._written.get(stop, stop)
