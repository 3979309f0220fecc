"""Checks of the engine settings of pools, before a process starts."""

from __future__ import annotations

from twostroke.config.engine import EngineConfig
from twostroke.config.pools import PoolConfig, check_numerics, decode_engine, prefill_engine
from twostroke.errors import InvalidParameter


def check_engines(config: EngineConfig, pools: PoolConfig, *, hands_over: bool) -> None:
    """Check the settings of the engines of both pools.

    Args:
        config: settings of both pools.
        pools: changes of each pool to it.
        hands_over: whether there are prefill workers.

    Raises:
        InvalidParameter: a value is out of its range, or the pools cannot hand KV over to each other.
    """
    prefill, decode = prefill_engine(config, pools), decode_engine(config, pools)
    if hands_over:
        _check_caches(config)
        _check_devices(prefill.load.device, decode.load.device)
        check_numerics(config, pools)


def _check_caches(config: EngineConfig) -> None:
    cache = config.cache
    if not cache.enable_prefix_caching:
        remedy = "Leave the prefix cache on, or leave --prefill out."
        raise InvalidParameter("enable_prefix_caching", False, "KV is handed over through the prefix cache", remedy)
    if cache.kv_offloading_size is not None:
        remedy = "Leave it out, or serve with one process."
        raise InvalidParameter(
            "kv_offloading_size", cache.kv_offloading_size, "does not go with prefill processes", remedy
        )
    if cache.kv_check_rate:
        remedy = "Leave --kv-check-rate or --prefill out."
        raise InvalidParameter("kv_check_rate", cache.kv_check_rate, "does not go with prefill processes", remedy)


def _check_devices(prefill: str, decode: str) -> None:
    if prefill == decode == "cpu":
        return
    limit = f"prefill workers are to run on {prefill}, decode workers on {decode}; KV is handed over between CPUs"
    other = prefill if prefill != "cpu" else decode
    raise InvalidParameter("device", other, limit, "Use --device cpu for both pools, or leave --prefill out.")
