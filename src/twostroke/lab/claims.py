"""Sentences of a story about the measured figures of both sides; pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from twostroke.lab.figures import Measured, Spread, Tokens, apart

Kind = Literal["effect", "price"]


_OVERLAP = (
    "the runs of both sides overlap, so the difference may be chance. Runs of one side vary much while other programs "
    "use the processor; run the experiment again when they do not."
)


@dataclass(frozen=True, slots=True)
class Sentence:
    """Sentence with its heading: effect or price."""

    kind: Kind
    text: str


@dataclass(frozen=True, slots=True)
class StoryFigures:
    """Figures of both sides, for use in story texts."""

    a: Measured
    b: Measured
    tokens: Tokens

    def __getitem__(self, name: str) -> str:
        """Return a figure of a side, such as `a.ttft_p50_ms`, as text; shares in per cent."""
        side, _, figure = name.partition(".")
        return in_words({"a": self.a, "b": self.b}[side][figure], percent=figure.endswith("_share"))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoryClaim:
    """Claim that the second setting moves a figure in one direction, with the reason.

    Texts name figures as `{seen[b.cached_share]}`.
    """

    kind: Kind = "effect"
    figure: str
    what: str
    """Name of the figure with its unit, as the beginning of a sentence."""
    should_rise: bool
    because: str
    unless: str
    """Reason, shown if the claim holds.
    Reason, shown if the claim does not hold."""

    def sentence(self, seen: StoryFigures) -> Sentence:
        """Return the figures of both sides, whether the claim holds, and the matching reason."""
        a, b = seen.a[self.figure], seen.b[self.figure]
        if a is None or b is None:
            return Sentence(self.kind, f"{self.what}: not measured, since no answer has this figure.")
        figures = f"{self.what}: {in_words(a)} and {in_words(b)}"
        direction = apart(a, b)
        if direction == 0 and a == b:
            told = f"{figures}: no difference. {self.unless}"
        elif direction == 0:
            told = f"{figures}: {_OVERLAP}"
        else:
            change = f"{figures}, {times(a.median, b.median)}"
            if (direction > 0) == self.should_rise:
                told = f"{change}. {self.because}"
            elif self.kind == "price":
                told = f"{change}: a gain here, not a price. {self.unless}"
            else:
                told = f"{change}: the opposite of what was expected. {self.unless}"
        return Sentence(self.kind, told.format(seen=seen))


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    """Statement about the second setting alone."""

    kind: Kind
    lower: str
    """Name of a figure of the second setting."""
    higher: str = ""
    """Name of another figure that must be higher in all runs; empty: the first must be above 0."""
    text: str
    otherwise: str

    def sentence(self, seen: StoryFigures) -> Sentence:
        """Return the text that matches the figures."""
        lower = seen.b[self.lower]
        is_so = lower is not None and (apart(lower, seen.b[self.higher]) > 0 if self.higher else lower.high > 0)
        return Sentence(self.kind, (self.text if is_so else self.otherwise).format(seen=seen))


def times(a: float, b: float) -> str:
    """Return the ratio of the second value to the first in words.

    >>> times(10.0, 25.0), times(30.0, 10.0), times(0.0, 1.0)
    ('2.5 times as much', '0.33 times as much', 'from nothing')
    """
    if a == 0:
        return "from nothing"
    share = b / a
    return f"{share:.1f} times as much" if share >= 2 else f"{share:.2f} times as much"


def in_words(spread: Spread | None, *, percent: bool = False) -> str:
    """Return the median as text, with its range if values differ.

    >>> in_words(Spread(1234.5, 900, 2000)), in_words(Spread(8, 8, 8)), in_words(Spread(0.5, 0.5, 0.5), percent=True)
    ('1,234 (900 to 2,000)', '8', '50 %')
    """
    if spread is None:
        return "none"
    scale, unit = (100, " %") if percent else (1, "")
    median, low, high = (_digits(scale * value) for value in (spread.median, spread.low, spread.high))
    return f"{median}{unit}" if low == high else f"{median} ({low} to {high}){unit}"


def _digits(value: float) -> str:
    """Return a number with about three significant digits."""
    if float(value).is_integer() or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
