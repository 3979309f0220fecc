"""What was measured of a model on a machine, and which way of drafting it speaks for.

    measured    v(n)   seconds of a step by its query tokens      a     that a draft stands, those before it standing
                d(k)   seconds to guess k drafts                  s     share of the passes with something to guess from
                x      seconds that a step takes longer with the method, whether or not it drafts (reading along)

    chosen      the k with the most tokens per second, of one request:

                        s E(a, k) + (1 - s)
                ─────────────────────────────────── ,   E(a, k) = 1 + a + … + a^k      (acceptance.py)
                s (v(1 + k) + d(k)) + (1 - s) v(1) + x

The figures are written as JSON, and read again by whoever plans with them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from twostroke.config.checks import whole_number
from twostroke.config.speculation import MAX_DRAFTS
from twostroke.cost.acceptance import expected_tokens
from twostroke.cost.step_cost import MachineLimits
from twostroke.cost.step_model import Curve, StepTimeModel
from twostroke.errors import InvalidParameter

VERSION = 2
MAX_BYTES = 16 * 2**20
"""Largest file that is read. Those that `calibrate` writes have some kilobytes."""
LEAST_GAIN = 1.03
"""Less is within what measuring can tell, and not recommended."""


@dataclass(frozen=True, slots=True)
class Timing:
    """How long so much takes."""

    size: int
    """Query tokens of a step, or drafts of a round."""
    seconds: float


def seconds_at(timings: Sequence[Timing], size: int) -> float:
    """Between sizes that were measured, and beyond the largest, along a line; no less than the smallest, below it.

    Args:
        timings: one and more, by rising size.
        size: asked for, 1 or more.

    >>> seconds_at((Timing(1, 1.0), Timing(3, 2.0)), 2), seconds_at((Timing(1, 1.0), Timing(3, 2.0)), 5)
    (1.5, 3.0)
    >>> seconds_at((Timing(2, 1.0),), 1), seconds_at((Timing(2, 1.0),), 9)
    (1.0, 1.0)
    """
    curve = Curve(tuple(timing.size for timing in timings), tuple(timing.seconds for timing in timings))
    return curve.at(size)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterFigures:
    """What was measured of one way of drafting, with one request at a time."""

    method: str
    """As in speculative_config."""
    exit_layer: int | None = None
    """Of early_exit."""
    model: str | None = None
    """Of draft_model, medusa and eagle, as it was given; None is what comes with the embedded model."""
    acceptance: float
    """Probability that a draft stands, those before it standing."""
    share: float
    """Of the passes that were to have drafts, those with any: a lookup may find nothing."""
    draft_s: tuple[Timing, ...]
    """Seconds to guess so many drafts."""
    extra_s: float = 0.0
    """Seconds that each step takes longer than without the method, guessing left out."""

    @property
    def words(self) -> str:
        """Its name in tables.

        >>> DrafterFigures(method="early_exit", exit_layer=3, acceptance=0.5, share=1.0, draft_s=()).words
        'early_exit 3'
        """
        return self.method if self.exit_layer is None else f"{self.method} {self.exit_layer}"


class _Versioned(msgspec.Struct):
    """What every version has."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Everything that was measured."""

    version: Literal[2] = VERSION
    model: str
    load: dict[str, Any]
    """Fields of the LoadConfig that it was loaded with."""
    machine: dict[str, str | int]
    """What the figures depend on: processor, cores, memory, libraries; nothing that names the machine."""
    context_tokens: int
    """Known tokens before the steps that were timed."""
    most_drafts: int
    """As far as the acceptances were measured, and choices go."""
    step_s: tuple[Timing, ...]
    """Seconds of a step of one request, by its query tokens."""
    step_times: StepTimeModel | None = None
    """Of steps of any kind; None: they were not measured."""
    limits: MachineLimits | None = None
    """What the machine does at best."""
    scheduler: dict[str, Any] = field(default_factory=dict[str, Any])
    """Fields of the SchedulerConfig whose steps were timed: as far as they go, nothing is a guess."""
    cache: dict[str, Any] = field(default_factory=dict[str, Any])
    """Fields of its CacheConfig."""
    drafters: tuple[DrafterFigures, ...] = ()
    left_out: dict[str, str] = field(default_factory=dict[str, str])
    """Methods that the model has nothing for, and why."""

    def __post_init__(self) -> None:
        """Refuses what nothing can be computed from: files come from anywhere."""
        _check_timings("step_s", self.step_s, least_s=1e-12)
        whole_number("most_drafts", self.most_drafts, 1, MAX_DRAFTS)
        for drafter in self.drafters:
            _check_timings(f"draft_s of {drafter.words}", drafter.draft_s)
            for name in ("acceptance", "share"):
                value = getattr(drafter, name)
                if not 0 <= value <= 1:
                    raise InvalidParameter(f"{name} of {drafter.words}", value, "must be from 0 to 1")
            if not 0 <= drafter.extra_s < float("inf"):
                raise InvalidParameter(f"extra_s of {drafter.words}", drafter.extra_s, "must be 0 or more")

    def verify_s(self, num_tokens: int) -> float:
        """v(n): seconds of a step of so many query tokens."""
        return seconds_at(self.step_s, num_tokens)

    def write(self, path: Path) -> None:
        """As JSON, whole or not at all: who reads the file meanwhile reads the old one.

        Raises:
            InvalidParameter: the file cannot be written.
        """
        try:
            _write_whole(path, msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")
        except OSError as error:
            raise _unwritable(path, error) from error

    @classmethod
    def read(cls, path: Path) -> Calibration:
        """What `write` wrote; equal to it.

        Raises:
            InvalidParameter: no such file, or another kind of file, version or value.
        """
        remedy = "Give a file that `twostroke calibrate` wrote."
        try:
            with path.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
            if len(data) > MAX_BYTES:
                raise InvalidParameter("calibration", str(path), f"has more than {MAX_BYTES} bytes", remedy)
            version = msgspec.json.decode(data, type=_Versioned).version
            if version != VERSION:
                limit = f"is of version {version}; this is version {VERSION}"
                raise InvalidParameter("calibration", str(path), limit, "Make it again with `twostroke calibrate`.")
            return msgspec.json.decode(data, type=cls)
        except OSError as error:
            limit = f"cannot be read ({error.strerror or error})"
            raise InvalidParameter("calibration", str(path), limit, remedy) from error
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:  # also what __post_init__ refuses
            raise InvalidParameter("calibration", str(path), f"is no calibration ({error})", remedy) from error


def check_writable(path: Path) -> None:
    """Refuses a file before anything is measured that could not be saved; what it holds stays as it is.

    Raises:
        InvalidParameter: it cannot be written.
    """
    beside = _beside(path)
    try:
        if path.exists():
            path.open("ab").close()
        if beside is not None:
            beside.open("wb").close()
            beside.unlink()
    except OSError as error:
        raise _unwritable(path, error) from error


@dataclass(frozen=True, slots=True)
class Choice:
    """A way of drafting with the best number of drafts, of one request at a time."""

    drafter: DrafterFigures
    num_drafts: int
    tokens_per_pass: float
    """Expected."""
    tokens_per_s: float
    """Expected, of the steps alone."""
    gain: float
    """The same over that of no drafts."""

    @property
    def pays(self) -> bool:
        """More than measuring could be wrong by."""
        return self.gain >= LEAST_GAIN

    def speculative_config(self, *, is_fixed: bool) -> dict[str, Any]:
        """Ready to be given: with this number of drafts, or decided step by step ("auto", the default)."""
        drafter = self.drafter
        named = {"method": drafter.method, "exit_layer": drafter.exit_layer, "model": drafter.model}
        found: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
        return found | {"num_speculative_tokens": self.num_drafts} if is_fixed else found


def best_choice(calibration: Calibration, drafter: DrafterFigures) -> Choice:
    """The number of drafts, 1 to `most_drafts`, with the most tokens per second."""
    choices = [_choice(calibration, drafter, k) for k in range(1, calibration.most_drafts + 1)]
    return max(choices, key=lambda choice: choice.tokens_per_s)


def choices_of(calibration: Calibration) -> tuple[Choice, ...]:
    """The best of every drafter, the fastest first."""
    found = [best_choice(calibration, drafter) for drafter in calibration.drafters]
    return tuple(sorted(found, key=lambda choice: -choice.tokens_per_s))


def best_exit_layer(calibration: Calibration) -> int | None:
    """After how many layers an early exit makes the most tokens per second; None where none was measured."""
    layers = (choice.drafter.exit_layer for choice in choices_of(calibration) if choice.drafter.method == "early_exit")
    return next(layers, None)


def recommended(calibration: Calibration) -> Choice | None:
    """The fastest of all; None where no drafts are faster."""
    fastest = next(iter(choices_of(calibration)), None)
    return fastest if fastest is not None and fastest.pays else None


def _choice(calibration: Calibration, drafter: DrafterFigures, num_drafts: int) -> Choice:
    share, plain_s = drafter.share, calibration.verify_s(1)
    tokens = share * expected_tokens(drafter.acceptance, num_drafts) + 1 - share
    drafted_s = calibration.verify_s(1 + num_drafts) + seconds_at(drafter.draft_s, num_drafts)
    seconds = share * drafted_s + (1 - share) * plain_s + drafter.extra_s
    return Choice(drafter, num_drafts, tokens, tokens / seconds, tokens / seconds * plain_s)


def _check_timings(name: str, timings: Sequence[Timing], least_s: float = 0.0) -> None:
    sizes = [timing.size for timing in timings]
    if not sizes or sizes[0] < 1 or sizes != sorted(set(sizes)):
        raise InvalidParameter(name, sizes, "must be timings of one and more sizes, rising, from 1 on")
    for timing in timings:
        if not least_s <= timing.seconds < float("inf"):
            limit = "must be seconds, more than 0" if least_s else "must be seconds, 0 or more"
            raise InvalidParameter(f"{name} at {timing.size}", timing.seconds, limit)


def _write_whole(path: Path, data: bytes) -> None:
    beside = _beside(path)
    if beside is None:
        path.write_bytes(data)
        return
    try:
        beside.write_bytes(data)
        beside.replace(path.resolve())  # where a link points to, so that the link stays
    except OSError:
        beside.unlink(missing_ok=True)
        raise


def _beside(path: Path) -> Path | None:
    """Return a name in the same folder to write to first; None: the path is no file, but a pipe or a terminal, say."""
    if path.exists() and not path.is_file():
        return None
    return path.resolve().parent / f".calibration-{os.getpid()}"


def _unwritable(path: Path, error: OSError) -> InvalidParameter:
    limit = f"cannot be written ({error.strerror or error})"
    return InvalidParameter("output", str(path), limit, "Name a file in a folder that you may write to.")
