"""Where a calibration lies, and whether it is one of this model, as it is loaded here, on this machine.

    beside the model    FOLDER/twostroke-calibration.json, or FILE.gguf.twostroke-calibration.json
    in the cache        ~/.cache/twostroke/, for the embedded model and for folders that one may not write to

With weights that are quantized while loading, that are random or that are multiplied without batch invariance, the name
says so: these have other step times, or are no model's.
"""

from __future__ import annotations

import hashlib
import os
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
    """Where it may lie, the best place first.

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
    if path.is_relative_to(_PACKAGE):  # what comes with the package is not ours to add to
        return (cache,)
    beside = path / name if path.is_dir() else path.with_name(f"{path.name}.{name}")
    return beside, cache


def place_to_write(model: Path, load: LoadConfig) -> Path:
    """The best place that can be written to; folders on the way are made.

    Raises:
        InvalidParameter: there is none.
    """
    places = calibration_places(model, load)
    for place in places[:-1]:
        if os.access(place.parent, os.W_OK):
            return place
    cache = places[-1]
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        limit = f"cannot be made ({error.strerror or error})"
        raise InvalidParameter("output", str(cache.parent), limit, "Name a file with --output.") from error
    return cache


def find_calibration(model: Path, load: LoadConfig, cache: CacheConfig) -> tuple[Calibration | None, str]:
    """The calibration of a model as it is loaded here, or why there is none, in words.

    Raises:
        InvalidParameter: the file that lies there is no calibration.
    """
    place = next((place for place in calibration_places(model, load) if place.is_file()), None)
    if place is None:
        return None, f"not calibrated: `twostroke calibrate {load.model} --no-drafts` takes about a minute"
    found = Calibration.read(place)
    differences = [
        *_differences(found.machine, Hardware.of_this_machine().as_json()),
        *_differences(found.load, {name: getattr(load, name) for name in (*_LOAD, "tensor_parallel_size")}),
        *_differences(found.cache, {"kv_cache_dtype": cache.kv_cache_dtype}),
    ]
    if differences:
        return None, f"{place.name} is of another machine or other settings ({'; '.join(differences)})"
    if found.step_times is None:
        return None, f"{place.name} has no step times"
    return found, f"calibrated: {place.name}"


def _differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """In words, of what both know."""
    return [f"{name} {then[name]} there, {value} here" for name, value in now.items() if then.get(name, value) != value]
