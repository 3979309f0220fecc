"""Stop strings of a chat: they stop the answer, and nothing else.

    <think>Question: 6*7?</think>42 Question: x          stop string "Question:"
           [- may hold it -]        [-------] found here

A parser reads the text beside the one that writes the answer, and stop strings are looked for in what it finds to be
content. What is found is cut from the raw text, so that everybody who reads it sees the same answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from twostroke.api.parsers.chat_parser import ChatParser
from twostroke.api.parsers.output import HearContent
from twostroke.engine.stop_checker import StopFinder, StopMatch, StopStrings


class AnswerStops(StopFinder):
    """Looks for stop strings in the content of one generation.

    Places are characters of the raw text. Text is held while it may become content, or is content that may be the
    beginning of a stop string.

    Args:
        stops: the strings.
        make_parser: makes a parser of the text, which tells content to what it is given.
    """

    def __init__(self, stops: Sequence[str], make_parser: Callable[[HearContent], ChatParser]) -> None:
        self._strings = tuple(stops)
        self._parser = make_parser(self._hear)
        self._stops = StopStrings(stops)
        self._held = ""
        self._num_released = 0
        self._content_end = 0
        """Place behind the content that was heard last."""
        self._num_watched = 0
        """Characters at the end of that content which may be the beginning of a stop string."""
        self._may_stop = True
        self._found: StopMatch | None = None

    def push(self, text: str, may_stop: bool = True) -> tuple[str, StopMatch | None]:
        """Take the next text, as StopFinder.push."""
        self._held += text
        self._may_stop = may_stop
        self._parser.push(text)
        decided = self._parser.num_decided
        if decided <= self._content_end:
            decided = min(decided, self._content_end - self._num_watched)
        return self._taken(decided)

    def finish(self, may_stop: bool = True, *, is_cut: bool = False) -> tuple[str, StopMatch | None]:
        """Take the end of the text, as StopFinder.finish: what was undecided may turn out to be content."""
        self._may_stop = may_stop
        self._parser.finish(is_cut=is_cut)
        return self._taken(self._num_released + len(self._held))

    def _taken(self, until: int) -> tuple[str, StopMatch | None]:
        start = self._num_released
        if self._found is not None:
            text, self._held = self._held, ""
            return text, StopMatch(self._found.stop, self._found.start - start, self._found.end - start)
        text = self._held[: until - start]
        self._held = self._held[len(text) :]
        self._num_released += len(text)
        return text, None

    def _hear(self, content: str, num_layout: int) -> None:
        if self._found is not None:
            return
        start = self._parser.place
        if start != self._content_end:  # something else stands between this content and the last
            self._stops, self._num_watched = StopStrings(self._strings), 0
            self._content_end = start
        self._search(content[:num_layout], may_stop=False)
        self._search(content[num_layout:], may_stop=self._may_stop)

    def _search(self, content: str, *, may_stop: bool) -> None:
        if not content:
            return
        first = self._content_end - self._num_watched
        self._content_end += len(content)
        released, match = self._stops.push(content, may_stop)
        self._num_watched = self._content_end - first - len(released)
        if match is not None:
            self._found = StopMatch(match.stop, first + match.start, first + match.end)
