"""Location of a calibration, and the check that it fits this model, its settings and this machine.

    written to   ~/.cache/twostroke/NAME-KEY-twostroke-calibration.json, where KEY is a hash of the model's path
    read from    the same, and else beside the model, where earlier releases wrote it:
                 FOLDER/twostroke-calibration.json, or FILE.gguf.twostroke-calibration.json

Machines may share a model's folder, and step times belong to one machine, so nothing is written there. The file's name
says whether weights are quantized while loading, are random, or are multiplied without batch invariance: step times
then differ, or belong to no real model.

The calibration gives the step times by which an engine keeps its latency limits and makes room for background work. It
also shows whether limits can be kept at all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twostroke.config.cache import CacheConfig
from twostroke.config.engine import EngineConfig
from twostroke.config.load import LoadConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.cost.calibration import Calibration
from twostroke.cost.roofline import roofline
from twostroke.cost.step_cost import Layers, MachineLimits, ModelShape
from twostroke.cost.step_model import StepTimeModel
from twostroke.engine.facts import NOTE
from twostroke.errors import InvalidParameter
from twostroke.hardware import Hardware
from twostroke.scheduler.step_budget import MIN_CHUNK

_LOAD = (
    "load_format",
    "dtype",
    "quantization",
    "group_size",
    "activation_quantization",
    "device",
    "kernels",
    "batch_invariant",
    "threads",
    "enable_expert_parallel",
)
"""Load settings that step times depend on, in addition to the number of ranks."""
_PACKAGE = Path(__file__).parents[1]


def calibration_places(model: Path, load: LoadConfig) -> tuple[Path, ...]:
    """Return the paths of a calibration: in the cache folder, where it is written, then where older releases wrote it.

    Args:
        model: the folder or the GGUF file.
        load: load settings.
    """
    ending = "" if load.quantization is None else f"-{load.quantization}"
    ending += "" if load.load_format == "auto" else f"-{load.load_format}"
    ending += "" if load.batch_invariant else "-not-batch-invariant"
    name = f"twostroke-calibration{ending}.json"
    path = model.resolve()
    key = hashlib.blake2b(str(path).encode(), digest_size=6).hexdigest()
    cache = Path.home() / ".cache" / "twostroke" / f"{path.name}-{key}-{name}"
    if path.is_relative_to(_PACKAGE):  # the package's own folder never held a calibration
        return (cache,)
    return cache, path / name if path.is_dir() else path.with_name(f"{path.name}.{name}")


def place_to_write(model: Path, load: LoadConfig) -> Path:
    """Return the file in the cache folder, after creating the folder.

    Raises:
        InvalidParameter: the folder cannot be created.
    """
    place = calibration_places(model, load)[0]
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        limit = f"cannot be made ({error.strerror or error})"
        raise InvalidParameter("output", str(place.parent), limit, "Name a file with --output.") from error
    return place


def find_calibration(model: Path, load: LoadConfig, cache: CacheConfig) -> tuple[Calibration | None, str]:
    """Return the calibration for a model as it is loaded here, and words: which file it is, or why there is none.

    A file that is invalid or of another version counts as missing, because a new calibration replaces it.
    """
    return _chosen(*_read(model, load), load, cache)


def _chosen(
    found: Sequence[tuple[Path, Calibration]], broken: Sequence[str], load: LoadConfig, cache: CacheConfig
) -> tuple[Calibration | None, str]:
    reasons = list(broken)
    for place, calibration in found:
        reason = mismatch_reason(calibration, load, cache)
        if not reason:
            return calibration, "; ".join([f"calibrated: {place.name}", *reasons])
        reasons.append(f"{place.name} {reason}")
    if not found:
        reasons.insert(0, f"not calibrated: `twostroke calibrate {load.model} --no-drafts` takes about a minute")
    return None, "; ".join(reasons)


def _read(model: Path, load: LoadConfig) -> tuple[list[tuple[Path, Calibration]], list[str]]:
    """Return the calibrations found, and a message for each file that cannot be read."""
    found: list[tuple[Path, Calibration]] = []
    broken: list[str] = []
    for place in calibration_places(model, load):
        if not place.is_file():
            continue
        try:
            found.append((place, Calibration.read(place)))
        except InvalidParameter as error:
            broken.append(f"{place} is left out: it {error.limit}")
    return found, broken


def mismatch_reason(found: Calibration, load: LoadConfig, cache: CacheConfig) -> str:
    """Return why a calibration cannot be used here; empty: it can.

    Args:
        found: the calibration.
        load: load settings here.
        cache: cache settings here.
    """
    differences = [
        *_differences(found.machine, Hardware.of_this_machine().as_json()),
        *_differences(found.load, {name: getattr(load, name) for name in (*_LOAD, "tensor_parallel_size")}),
        *_differences(found.cache, {"kv_cache_dtype": cache.kv_cache_dtype}),
    ]
    if differences:
        return f"is of another machine or other settings ({'; '.join(differences)})"
    return "has no step times" if found.step_times is None else ""


def _differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the differences of the values that both sides have, in words."""
    return [f"{name} {then[name]} there, {value} here" for name, value in now.items() if then.get(name, value) != value]


@dataclass(frozen=True, slots=True)
class LatencyModel:
    """Step times by which latency limits are kept."""

    step_times: StepTimeModel
    lines: tuple[str, ...]
    """Lines for the start."""


def latency_model(
    config: EngineConfig,
    model: Path,
    shape: ModelShape,
    machine: MachineLimits,
    step_times: StepTimeModel | None = None,
) -> LatencyModel:
    """Return the step times of the model's calibration, or else the machine's limits, which measured steps then
    correct.

    Args:
        config: with or without latency limits.
        model: its folder or file.
        shape: of the model.
        machine: its limits.
        step_times: step times to use; None: those of a calibration, if there is one.
    """
    why, broken = "step times as given", list[str]()
    if step_times is None:
        kept, broken = _read(model, config.load)
        found, why = _chosen(kept, broken, config.load, config.cache)
        step_times = None if found is None else found.step_times
    if step_times is None:
        step_times = roofline(shape, machine, most_tokens=config.scheduler.max_num_batched_tokens)
        why += "; limits start from the machine's best speed, and then follow measured steps"
    remedy = f"`twostroke calibrate {config.load.model} --no-drafts` writes a new one"
    notes = tuple(f"{NOTE}     {words}; {remedy}" for words in broken)
    if not config.scheduler.has_slo:
        return LatencyModel(step_times, notes)
    lines = (*notes, f"slo      {_words(config.scheduler)}; {why}", *_limit_notes(config.scheduler, step_times, shape))
    return LatencyModel(step_times, lines)


def _words(config: SchedulerConfig) -> str:
    limits = (("itl", config.itl_slo_s), ("ttft", config.ttft_slo_s))
    return ", ".join(f"{name} {_ms(limit)}" for name, limit in limits if limit is not None)


def _limit_notes(config: SchedulerConfig, step_times: StepTimeModel, shape: ModelShape) -> Iterator[str]:
    """Yield a note for each limit that not even a single request can keep, with the nearest that can be kept."""
    layers = Layers(shape.windows)
    first_s = step_times.seconds(layers.work([(0, 1, 1)]))
    if config.ttft_slo_s is not None and config.ttft_slo_s < first_s:
        why = f"cannot be kept: a prompt of one token alone takes {_ms(first_s)}, which is the nearest"
        yield f"note     ttft_slo {_ms(config.ttft_slo_s)} {why}"
    alone_s = step_times.seconds(layers.work([(1, 1, 1)]))
    beside_s = step_times.seconds(layers.work([(1, 1, 1), (0, MIN_CHUNK, 0)]))
    limit_s = config.itl_slo_s
    if limit_s is None or limit_s >= beside_s:
        return
    given, alone, beside = map(_ms, (limit_s, alone_s, beside_s))
    if limit_s >= alone_s:
        why = f"is kept for one request alone; a step takes {MIN_CHUNK} prompt tokens at least, and beside these"
        yield f"note     itl_slo {given} {why} the nearest that can be kept is {beside}"
        return
    why = f"cannot be kept: a token of one request alone takes {alone}"
    yield f"note     itl_slo {given} {why}, beside a prompt {beside}, which is the nearest"


def _ms(seconds: float) -> str:
    """Return a time in milliseconds, which may be a fraction of one.

    >>> _ms(0.05), _ms(0.0123), _ms(1e-6)
    ('50 ms', '12.3 ms', '0.001 ms')
    """
    return f"{seconds * 1e3:,.4g} ms" if seconds < 1 else f"{seconds * 1e3:,.0f} ms"
