"""Where a calibration lies, and whether it is one of this model, as it is loaded here, on this machine.

    written to   ~/.cache/twostroke/NAME-KEY-twostroke-calibration.json, where KEY is a hash of the model's path
    read from    the same, and else beside the model, where earlier releases wrote it:
                 FOLDER/twostroke-calibration.json, or FILE.gguf.twostroke-calibration.json

Machines may share a model's folder, and step times belong to one machine, so nothing is written there. The file's name
says whether weights are quantized while loading, are random, or are multiplied without batch invariance: step times
then differ, or belong to no real model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twostroke.config.cache import CacheConfig
from twostroke.config.load import LoadConfig
from twostroke.cost.calibration import Calibration
from twostroke.errors import InvalidParameter
from twostroke.hardware import Hardware

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
)
"""Of the settings, those that step times depend on; and the number of ranks."""
_PACKAGE = Path(__file__).parents[1]


def calibration_places(model: Path, load: LoadConfig) -> tuple[Path, ...]:
    """Return where a calibration may lie: in the cache folder, where it is written, then where older releases wrote it.

    Args:
        model: the folder or the GGUF file.
        load: how it is loaded.
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
    """Return the file in the cache folder; the folder is made.

    Raises:
        InvalidParameter: the folder cannot be made.
    """
    place = calibration_places(model, load)[0]
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        limit = f"cannot be made ({error.strerror or error})"
        raise InvalidParameter("output", str(place.parent), limit, "Name a file with --output.") from error
    return place


def find_calibration(model: Path, load: LoadConfig, cache: CacheConfig) -> tuple[Calibration | None, str]:
    """Return the calibration of a model as it is loaded here, and words: which it is, or why there is none.

    A file that is none or of another version counts as missing, since calibrating again is what mends it.
    """
    found, reasons = _read(model, load)
    for place, calibration in found:
        reason = why_not(calibration, load, cache)
        if not reason:
            return calibration, "; ".join([f"calibrated: {place.name}", *reasons])
        reasons.append(f"{place.name} {reason}")
    if not found:
        reasons.insert(0, f"not calibrated: `twostroke calibrate {load.model} --no-drafts` takes about a minute")
    return None, "; ".join(reasons)


def broken_calibrations(model: Path, load: LoadConfig) -> tuple[str, ...]:
    """Return for each file that lies where a calibration should and is none its whole path and what is wrong."""
    return tuple(_read(model, load)[1])


def _read(model: Path, load: LoadConfig) -> tuple[list[tuple[Path, Calibration]], list[str]]:
    """Return the calibrations that lie there, and of the other files their paths and what is wrong with them."""
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


def why_not(found: Calibration, load: LoadConfig, cache: CacheConfig) -> str:
    """Return why a calibration cannot be used here; empty: it can.

    Args:
        found: the calibration.
        load: how the model is loaded here.
        cache: of the engine here.
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
    """In words, of what both know."""
    return [f"{name} {then[name]} there, {value} here" for name, value in now.items() if then.get(name, value) != value]
