"""By which step times an engine keeps its limits and makes room for background work, and whether limits can be kept at
all: found out at its start."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from twostroke.config.engine import EngineConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.cost.roofline import roofline
from twostroke.cost.step_cost import Layers, MachineLimits, ModelShape
from twostroke.cost.step_model import StepTimeModel
from twostroke.engine.facts import NOTE
from twostroke.scheduler.step_budget import LEAST_CHUNK
from twostroke.startup.calibrated import broken_calibrations, find_calibration


@dataclass(frozen=True, slots=True)
class Pace:
    """What limits of time are kept by."""

    step_times: StepTimeModel
    lines: tuple[str, ...]
    """To be said at the start."""


def pace_of(
    config: EngineConfig,
    model: Path,
    shape: ModelShape,
    machine: MachineLimits,
    step_times: StepTimeModel | None = None,
) -> Pace:
    """The calibration of the model, or else the floors of the machine, which are stretched by what steps really take.

    Args:
        config: with or without limits.
        model: its folder or file.
        shape: of the model.
        machine: what it does at best.
        step_times: to go by; None: those of a calibration, if there is one.
    """
    why, broken = "step times as given", ()
    if step_times is None:
        broken = broken_calibrations(model, config.load)
        found, why = find_calibration(model, config.load, config.cache)
        step_times = None if found is None else found.step_times
    if step_times is None:
        step_times = roofline(shape, machine, most_tokens=config.scheduler.max_num_batched_tokens)
        why += "; limits begin with what the machine could do at best, and follow what steps take"
    remedy = f"`twostroke calibrate {config.load.model} --no-drafts` writes a new one"
    notes = tuple(f"{NOTE}     {words}; {remedy}" for words in broken)
    if not config.scheduler.has_slo:
        return Pace(step_times, notes)
    lines = (*notes, f"slo      {_words(config.scheduler)}; {why}", *_unreachable(config.scheduler, step_times, shape))
    return Pace(step_times, lines)


def _words(config: SchedulerConfig) -> str:
    limits = (("itl", config.itl_slo_s), ("ttft", config.ttft_slo_s))
    return ", ".join(f"{name} {_ms(limit)}" for name, limit in limits if limit is not None)


def _unreachable(config: SchedulerConfig, step_times: StepTimeModel, shape: ModelShape) -> Iterator[str]:
    """A limit below what a single request takes is said, with the nearest that can be kept."""
    layers = Layers(shape.windows)
    first_s = step_times.seconds(layers.work([(0, 1, 1)]))
    if config.ttft_slo_s is not None and config.ttft_slo_s < first_s:
        why = f"cannot be kept: a prompt of one token alone takes {_ms(first_s)}, which is the nearest"
        yield f"note     ttft_slo {_ms(config.ttft_slo_s)} {why}"
    alone_s = step_times.seconds(layers.work([(1, 1, 1)]))
    beside_s = step_times.seconds(layers.work([(1, 1, 1), (0, LEAST_CHUNK, 0)]))
    limit_s = config.itl_slo_s
    if limit_s is None or limit_s >= beside_s:
        return
    given, alone, beside = map(_ms, (limit_s, alone_s, beside_s))
    if limit_s >= alone_s:
        why = f"is kept for one request alone; a step takes {LEAST_CHUNK} prompt tokens at least, and beside these"
        yield f"note     itl_slo {given} {why} the nearest that can be kept is {beside}"
        return
    why = f"cannot be kept: a token of one request alone takes {alone}"
    yield f"note     itl_slo {given} {why}, beside a prompt {beside}, which is the nearest"


def _ms(seconds: float) -> str:
    """A limit may be a fraction of a millisecond.

    >>> _ms(0.05), _ms(0.0123), _ms(1e-6)
    ('50 ms', '12.3 ms', '0.001 ms')
    """
    return f"{seconds * 1e3:,.4g} ms" if seconds < 1 else f"{seconds * 1e3:,.0f} ms"
