"""What an engine that hands KV over cannot be combined with, refused before a process is started."""

from __future__ import annotations

from twostroke.config.engine import EngineConfig
from twostroke.errors import InvalidParameter


def check_can_hand_over(config: EngineConfig) -> None:
    """Refuse settings that do not go with prefill processes.

    Raises:
        InvalidParameter: one of them.
    """
    if not config.cache.enable_prefix_caching:
        remedy = "Leave the prefix cache on, or leave --prefill out."
        raise InvalidParameter("enable_prefix_caching", False, "KV is handed over through the prefix cache", remedy)
    if config.cache.kv_offloading_size is not None:
        remedy = "Leave it out, or serve with one process."
        raise InvalidParameter(
            "kv_offloading_size", config.cache.kv_offloading_size, "does not go with prefill processes", remedy
        )
    if config.cache.kv_check_rate:
        remedy = "Leave --kv-check-rate or --prefill out."
        raise InvalidParameter(
            "kv_check_rate", config.cache.kv_check_rate, "does not go with prefill processes", remedy
        )
    if config.load.device != "cpu":
        remedy = "Use --device cpu, or leave --prefill out."
        raise InvalidParameter("device", config.load.device, "KV is handed over between processes on CPUs", remedy)
