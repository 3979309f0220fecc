"""Calibration: measured step and drafting times of a model on a machine, and the drafting method they favour.

    measured    v(n)   seconds of a step by its query tokens
                d(k)   seconds to guess k drafts
                a      probability that a draft is accepted, given that those before it are
                s      share of the passes that have any drafts
                x      seconds that the method adds to every step, with or without drafts (reading along)

    chosen      the k with the most tokens per second, for one request:

                        s E(a, k) + (1 - s)
                ─────────────────────────────────── ,   E(a, k) = 1 + a + … + a^k      (acceptance.py)
                s (v(1 + k) + d(k)) + (1 - s) v(1) + x

The figures are saved as JSON and read by everything that plans with them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from twostroke.config.checks import check_int
from twostroke.config.speculation import MAX_DRAFTS
from twostroke.cost.acceptance import expected_tokens
from twostroke.cost.step_cost import MachineLimits
from twostroke.cost.step_model import Curve, StepTimeModel
from twostroke.errors import InvalidParameter

VERSION = 2
MAX_BYTES = 16 * 2**20
"""Size limit of a calibration file. `calibrate` writes a few kilobytes."""
MIN_RECOMMENDED_GAIN = 1.03
"""Smallest gain that is recommended; smaller gains are within the measurement error."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Measured seconds for one size."""

    size: int
    """Query tokens of a step, or drafts of a round."""
    seconds: float


def seconds_at(timings: Sequence[Timing], size: int) -> float:
    """Return the seconds for a size, interpolated linearly between measured sizes.

    Beyond the largest size the last line continues. Below the smallest size the smallest time is returned.

    Args:
        timings: one or more, by rising size.
        size: 1 or more.

    >>> seconds_at((Timing(1, 1.0), Timing(3, 2.0)), 2), seconds_at((Timing(1, 1.0), Timing(3, 2.0)), 5)
    (1.5, 3.0)
    >>> seconds_at((Timing(2, 1.0),), 1), seconds_at((Timing(2, 1.0),), 9)
    (1.0, 1.0)
    """
    curve = Curve(tuple(timing.size for timing in timings), tuple(timing.seconds for timing in timings))
    return curve.at(size)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterFigures:
    """Measured figures of one drafting method, with one request at a time."""

    method: str
    """Method name, as in speculative_config."""
    exit_layer: int | None = None
    """Exit layer; early_exit only."""
    model: str | None = None
    """Model of draft_model, medusa or eagle as it was given; None: the one that comes with the embedded model."""
    acceptance: float
    """Probability that a draft is accepted, given that those before it are."""
    share: float
    """Share of the passes meant to have drafts that have any: a lookup may find nothing."""
    draft_s: tuple[Timing, ...]
    """Seconds to guess a number of drafts."""
    extra_s: float = 0.0
    """Seconds that the method adds to each step, guessing excluded."""

    @property
    def words(self) -> str:
        """Name in tables.

        >>> DrafterFigures(method="early_exit", exit_layer=3, acceptance=0.5, share=1.0, draft_s=()).words
        'early_exit 3'
        """
        return self.method if self.exit_layer is None else f"{self.method} {self.exit_layer}"


class _Versioned(msgspec.Struct):
    """The field that files of every version have."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """All results of a calibration, as saved."""

    version: Literal[2] = VERSION
    model: str
    load: dict[str, Any]
    """Fields of the LoadConfig that the model was loaded with."""
    machine: dict[str, str | int]
    """Properties of the machine that the figures depend on: processor, cores, memory, libraries. Nothing identifies the
    machine."""
    context_tokens: int
    """Context tokens of the timed steps."""
    most_drafts: int
    """Largest number of drafts for which acceptance was measured, and that is chosen."""
    step_s: tuple[Timing, ...]
    """Seconds of a step of one request, by its query tokens."""
    step_times: StepTimeModel | None = None
    """Fitted times of steps of any kind; None: not measured."""
    limits: MachineLimits | None = None
    """Best measured rates of the machine."""
    scheduler: dict[str, Any] = field(default_factory=dict[str, Any])
    """Fields of the SchedulerConfig whose steps were timed. Within its limits no prediction is an extrapolation."""
    cache: dict[str, Any] = field(default_factory=dict[str, Any])
    """Fields of the CacheConfig of the timed steps."""
    drafters: tuple[DrafterFigures, ...] = ()
    left_out: dict[str, str] = field(default_factory=dict[str, str])
    """Methods that could not be measured with this model, and the reasons."""

    def __post_init__(self) -> None:
        """Refuse values that nothing can be computed from; a file may hold anything."""
        _check_timings("step_s", self.step_s, least_s=1e-12)
        check_int("most_drafts", self.most_drafts, 1, MAX_DRAFTS)
        for drafter in self.drafters:
            _check_timings(f"draft_s of {drafter.words}", drafter.draft_s)
            for name in ("acceptance", "share"):
                value = getattr(drafter, name)
                if not 0 <= value <= 1:
                    raise InvalidParameter(f"{name} of {drafter.words}", value, "must be from 0 to 1")
            if not 0 <= drafter.extra_s < float("inf"):
                raise InvalidParameter(f"extra_s of {drafter.words}", drafter.extra_s, "must be 0 or more")

    def verify_s(self, num_tokens: int) -> float:
        """Return v(n), the seconds of a step of `num_tokens` query tokens."""
        return seconds_at(self.step_s, num_tokens)

    def write(self, path: Path) -> None:
        """Write the calibration as JSON, atomically: a concurrent reader gets the old file or the new one.

        Raises:
            InvalidParameter: the file cannot be written.
        """
        try:
            _write_whole(path, msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")
        except OSError as error:
            raise _unwritable(path, error) from error

    @classmethod
    def read(cls, path: Path) -> Calibration:
        """Read a calibration that `write` wrote.

        Raises:
            InvalidParameter: the file does not exist, or has another type, version or value.
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
    """Raise if the output file cannot be written, before anything is measured. An existing file is left unchanged.

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
    """A drafting method with its best number of drafts, for one request at a time."""

    drafter: DrafterFigures
    num_drafts: int
    tokens_per_pass: float
    """Expected tokens of a pass."""
    tokens_per_s: float
    """Expected tokens per second of steps."""
    gain: float
    """Speed relative to no drafts."""

    @property
    def pays(self) -> bool:
        """Whether the gain exceeds the measurement error."""
        return self.gain >= MIN_RECOMMENDED_GAIN

    def speculative_config(self, *, is_fixed: bool) -> dict[str, Any]:
        """Return a speculative_config; unless fixed, the number of drafts is left to "auto", the default."""
        drafter = self.drafter
        named = {"method": drafter.method, "exit_layer": drafter.exit_layer, "model": drafter.model}
        found: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
        return found | {"num_speculative_tokens": self.num_drafts} if is_fixed else found


def best_choice(calibration: Calibration, drafter: DrafterFigures) -> Choice:
    """Return the number of drafts, 1 to `most_drafts`, with the most tokens per second."""
    choices = [_choice(calibration, drafter, k) for k in range(1, calibration.most_drafts + 1)]
    return max(choices, key=lambda choice: choice.tokens_per_s)


def choices_of(calibration: Calibration) -> tuple[Choice, ...]:
    """Return the best choice of each drafter, fastest first."""
    found = [best_choice(calibration, drafter) for drafter in calibration.drafters]
    return tuple(sorted(found, key=lambda choice: -choice.tokens_per_s))


def best_exit_layer(calibration: Calibration) -> int | None:
    """Return the exit layer with the most tokens per second; None: no early exit was measured."""
    layers = (choice.drafter.exit_layer for choice in choices_of(calibration) if choice.drafter.method == "early_exit")
    return next(layers, None)


def recommended(calibration: Calibration) -> Choice | None:
    """Return the fastest choice; None where no drafts are faster."""
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
        raise InvalidParameter(name, sizes, "must be timings of one or more rising sizes, from 1 on")
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
    """Return a temporary file name in the same folder; None for a path that is no file, such as a pipe."""
    if path.exists() and not path.is_file():
        return None
    return path.resolve().parent / f".calibration-{os.getpid()}"


def _unwritable(path: Path, error: OSError) -> InvalidParameter:
    limit = f"cannot be written ({error.strerror or error})"
    return InvalidParameter("output", str(path), limit, "Name a file in a folder that you may write to.")
