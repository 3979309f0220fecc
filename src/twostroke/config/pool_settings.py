"""The engine settings of each pool: shared ones, and those that --prefill-config and --decode-config change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from twostroke.config.cache import CacheConfig
from twostroke.config.engine import EngineConfig
from twostroke.config.kv_format import resolve_kv_format
from twostroke.config.load import DEFAULT_GROUP_SIZE, LoadConfig
from twostroke.config.pools import NUMERIC_SETTINGS, PoolConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.errors import InvalidParameter


def prefill_engine(config: EngineConfig, pools: PoolConfig) -> EngineConfig:
    """Return the engine settings of a prefill worker, without drafting.

    Raises:
        InvalidParameter: a value of prefill_config is out of its range, or contradicts another setting.
    """
    given: dict[str, Any] = dict(pools.prefill_config or {})
    flags = {
        "block_size": pools.prefill_block_size,
        "tensor_parallel_size": pools.prefill_tensor_parallel_size,
    }
    given |= {name: value for name, value in flags.items() if value is not None}
    return _changed("prefill_config", replace(config, speculative_config=None), given)


def decode_engine(config: EngineConfig, pools: PoolConfig) -> EngineConfig:
    """Return the engine settings of a decode worker.

    Raises:
        InvalidParameter: a value of decode_config is out of its range, or contradicts another setting.
    """
    return _changed("decode_config", config, pools.decode_config or {})


def check_numerics(config: EngineConfig, pools: PoolConfig) -> None:
    """Check that both pools compute with the same numerics, as far as settings say, or that drift is allowed.

    Raises:
        InvalidParameter: pools differ in a setting that tokens depend on, and drift is not allowed.
    """
    if pools.allow_numeric_drift:
        return
    prefill, decode = (_numerics(one(config, pools)) for one in (prefill_engine, decode_engine))
    differing = [name for name in NUMERIC_SETTINGS if prefill[name] != decode[name]]
    if differing:
        sides = (", ".join(f"{name}={side[name]}" for name in differing) for side in (prefill, decode))
        limit = "prefill workers have {}, decode workers {}: tokens may differ from one to the other".format(*sides)
        remedy = "Give both pools the same values, or allow it (--allow-numeric-drift)."
        source = "prefill_config" if pools.prefill_config else "decode_config"
        raise InvalidParameter(source, dict(getattr(pools, source)), limit, remedy)


def _numerics(config: EngineConfig) -> dict[str, Any]:
    """Return the values of NUMERIC_SETTINGS, with defaults and aliases resolved where that needs no model."""
    load = config.load
    found: dict[str, Any] = {name: getattr(load, name) for name in NUMERIC_SETTINGS if name != "kv_cache_dtype"}
    wanted = config.cache.kv_cache_dtype
    known = wanted != "auto" or load.dtype != "auto"
    found["kv_cache_dtype"] = resolve_kv_format(wanted, load.dtype) if known else "auto"
    if load.quantization == "int4":
        found["group_size"] = load.group_size or DEFAULT_GROUP_SIZE
    return found


def _changed(source: str, config: EngineConfig, given: Mapping[str, Any]) -> EngineConfig:
    """Return a config with some settings changed; errors name `source`."""
    if config.load.cpu_affinity is not None:
        limit = "pools are several processes, which would share these CPUs"
        raise InvalidParameter("cpu_affinity", config.load.cpu_affinity, limit, "Leave it out.")
    parts: dict[str, Any] = {"load": config.load, "cache": config.cache, "scheduler": config.scheduler}
    kinds = {"load": LoadConfig, "cache": CacheConfig, "scheduler": SchedulerConfig}
    of_part = {part: {f.name: given[f.name] for f in fields(kind) if f.name in given} for part, kind in kinds.items()}
    changed = of_part["load"]
    if changed.get("quantization", "int4") != "int4":  # a shared group size applies to int4 alone
        changed.setdefault("group_size", None)
    if "kv_cache_memory" in given or "num_kv_blocks" in given:  # each replaces the other
        of_part["cache"] = {"kv_cache_memory": None, "num_kv_blocks": None, **of_part["cache"]}
    try:
        return replace(config, **{part: replace(parts[part], **values) for part, values in of_part.items() if values})
    except InvalidParameter as error:
        name = f"{source}.{error.name}" if error.name in given else error.name
        raise InvalidParameter(name, error.value, error.limit, error.remedy) from None
