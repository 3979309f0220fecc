"""What a story says of what was measured: figures of both sides in, sentences out; pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from twostroke.lab.figures import Measured, Spread, Tokens, apart

Kind = Literal["effect", "price"]


_OVERLAP = (
    "the runs of both sides overlap, so chance may have made the difference. Where something else wants the processor, "
    "runs of one side differ much; run it again when nothing does."
)


@dataclass(frozen=True, slots=True)
class Sentence:
    """A few words under one heading."""

    kind: Kind
    text: str


@dataclass(frozen=True, slots=True)
class Seen:
    """Both sides, as a text may name their figures."""

    a: Measured
    b: Measured
    tokens: Tokens

    def __getitem__(self, name: str) -> str:
        """A figure of a side: `a.ttft_p50_ms`; of shares, per cent."""
        side, _, figure = name.partition(".")
        return in_words({"a": self.a, "b": self.b}[side][figure], percent=figure.endswith("_share"))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoryClaim:
    """That the second setting moves a figure one way, and why; told as it came.

    Texts name figures as `{seen[b.cached_share]}`.
    """

    kind: Kind = "effect"
    figure: str
    what: str
    """The figure, at the beginning of a sentence, with its unit."""
    rises: bool
    because: str
    """Why, where it came so."""
    unless: str
    """What kept it from coming so, where it did not."""

    def told(self, seen: Seen) -> Sentence:
        """The figures of both sides, what became of the claim, and the reason that fits."""
        a, b = seen.a[self.figure], seen.b[self.figure]
        if a is None or b is None:
            return Sentence(self.kind, f"{self.what}: not measured, since no answer has it.")
        figures = f"{self.what}: {in_words(a)} and {in_words(b)}"
        direction = apart(a, b)
        if direction == 0 and a == b:
            told = f"{figures}: no difference. {self.unless}"
        elif direction == 0:
            told = f"{figures}: {_OVERLAP}"
        else:
            change = f"{figures}, {times(a.median, b.median)}"
            if (direction > 0) == self.rises:
                told = f"{change}. {self.because}"
            elif self.kind == "price":
                told = f"{change}: no price here, but a gain. {self.unless}"
            else:
                told = f"{change}: here it came out the other way round. {self.unless}"
        return Sentence(self.kind, told.format(seen=seen))


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    """What is to be said of the second setting alone."""

    kind: Kind
    lower: str
    """A figure of the second setting."""
    higher: str = ""
    """Another, which is to be above it in all runs; empty: it is to be above 0."""
    text: str
    otherwise: str

    def told(self, seen: Seen) -> Sentence:
        """The text that fits."""
        lower = seen.b[self.lower]
        is_so = lower is not None and (apart(lower, seen.b[self.higher]) > 0 if self.higher else lower.high > 0)
        return Sentence(self.kind, (self.text if is_so else self.otherwise).format(seen=seen))


def times(a: float, b: float) -> str:
    """How the second stands to the first.

    >>> times(10.0, 25.0), times(30.0, 10.0), times(0.0, 1.0)
    ('2.5 times as much', '0.33 times as much', 'from nothing')
    """
    if a == 0:
        return "from nothing"
    share = b / a
    return f"{share:.1f} times as much" if share >= 2 else f"{share:.2f} times as much"


def in_words(spread: Spread | None, *, percent: bool = False) -> str:
    """A median with its range, where there is one.

    >>> in_words(Spread(1234.5, 900, 2000)), in_words(Spread(8, 8, 8)), in_words(Spread(0.5, 0.5, 0.5), percent=True)
    ('1,234 (900 to 2,000)', '8', '50 %')
    """
    if spread is None:
        return "none"
    scale, unit = (100, " %") if percent else (1, "")
    median, low, high = (_digits(scale * value) for value in (spread.median, spread.low, spread.high))
    return f"{median}{unit}" if low == high else f"{median} ({low} to {high}){unit}"


def _digits(value: float) -> str:
    """About three of them."""
    if float(value).is_integer() or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
