"""Settings that an experiment can change, and the configuration of one side."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from twostroke.config.engine import EngineConfig
from twostroke.config.pools import PoolConfig
from twostroke.errors import InvalidParameter, UnknownParameter

MODEL = "embedded"
"""Model of all experiments: it ships with the package, is small, and holds no user's data."""
CONTEXT = 4096


@dataclass(frozen=True, slots=True)
class Switch:
    """Setting that can be changed, under its command line name."""

    name: str
    title: str
    values: tuple[Any, ...]
    """Choices; the first is a server's default. Empty: the value is a whole number."""
    most: int = 0
    """Largest value of a number."""


SWITCHES = (
    Switch("batching", "Batches", ("continuous", "static")),
    Switch("enable_chunked_prefill", "Chunked prefill", (True, False)),
    Switch("enable_prefix_caching", "Prefix cache", (True, False)),
    Switch("speculation", "Drafts", ("none", "ngram")),
    Switch("kv_cache_dtype", "KV format", ("auto", "int8", "int4")),
    Switch("kv_reservation", "KV memory", ("paged", "contiguous")),
    Switch("pools", "Processes", ("one", "prefill and decode")),
    Switch("max_num_seqs", "max_num_seqs", (), 256),
    Switch("max_num_batched_tokens", "max_num_batched_tokens", (), 8192),
    Switch("max_model_len", "max_model_len", (), CONTEXT),
    Switch("kv_cache_memory", "kv_cache_memory, bytes", (), 2**30),
)
_BY_NAME = {switch.name: switch for switch in SWITCHES}
_DEFAULT_MEMORY = 64 << 20


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two configurations that an experiment compares."""

    given: Mapping[str, Any]
    """Settings as requested, and those that follow from them."""
    engine: EngineConfig
    pools: PoolConfig | None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Side:
        """Check the requested settings and return the side.

        >>> Side.of({"batching": "static"}).engine.scheduler.batching
        'static'

        Raises:
            UnknownParameter: there is no such switch.
            InvalidParameter: a switch does not have this value, or settings contradict each other.
        """
        for name, value in given.items():
            _check(name, value)
        follows: dict[str, Any] = {}
        if given.get("kv_reservation") == "contiguous" and "enable_prefix_caching" not in given:
            follows["enable_prefix_caching"] = False
        settings = {**given, **follows}
        drafts = settings.pop("speculation", "none")
        has_pools = settings.pop("pools", "one") != "one"
        if drafts != "none":
            settings["speculative_config"] = {"method": drafts, "num_speculative_tokens": 4}
        settings.setdefault("kv_cache_memory", _DEFAULT_MEMORY)
        settings.setdefault("max_model_len", CONTEXT)
        engine = EngineConfig.from_keywords(model=MODEL, threads=num_threads(), **settings)
        return cls({**given, **follows}, engine, PoolConfig(prefill=1, decode=1) if has_pools else None)


def num_threads() -> int:
    """Return the threads of each engine process: half of the cores, so that two pools fit, or one process and the
    server.

    One thread too many costs far more than it gains: every operator waits for its slowest thread.
    """
    return max(1, len(os.sched_getaffinity(0)) // 2)


def _check(name: str, value: Any) -> None:
    switch = _BY_NAME.get(name)
    if switch is None:
        raise UnknownParameter(name, list(_BY_NAME), "the lab")
    if switch.values:
        if not any(value is known or (value == known and type(value) is type(known)) for known in switch.values):
            raise InvalidParameter(name, value, f"must be one of {', '.join(map(repr, switch.values))}")
    elif not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= switch.most:
        raise InvalidParameter(name, value, f"must be a whole number from 1 to {switch.most}")
