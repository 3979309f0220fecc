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
    """Return the calibration of a model as it is loaded here, or why there is none, in words.

    Raises:
        InvalidParameter: the file that lies there is no calibration.
    """
    places = [place for place in calibration_places(model, load) if place.is_file()]
    if not places:
        return None, f"not calibrated: `twostroke calibrate {load.model} --no-drafts` takes about a minute"
    reasons: list[str] = []
    for place in places:
        found = Calibration.read(place)
        reason = why_not(found, load, cache)
        if not reason:
            return found, f"calibrated: {place.name}"
        reasons.append(f"{place.name} {reason}")
    return None, "; ".join(reasons)


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
