"""What can be switched, and what a side of an experiment is made of."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from twostroke.config.engine import EngineConfig
from twostroke.config.pools import PoolConfig
from twostroke.errors import InvalidParameter, UnknownParameter

MODEL = "embedded"
"""Experiments run on the model that ships with the package: it is there, it is small, and it is nobody's."""
CONTEXT = 4096


@dataclass(frozen=True, slots=True)
class Switch:
    """A setting, by the name that the command line has for it."""

    name: str
    title: str
    values: tuple[Any, ...]
    """To choose from; the first is what a server does by default. Empty: a whole number."""
    most: int = 0
    """Of a number."""


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
    """One of the two settings."""

    given: Mapping[str, Any]
    """As it was asked for, and what follows from that."""
    engine: EngineConfig
    pools: PoolConfig | None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Side:
        """Checks what was asked for.

        >>> Side.of({"batching": "static"}).engine.scheduler.batching
        'static'

        Raises:
            UnknownParameter: there is no such switch.
            InvalidParameter: a value that a switch does not have, or settings that contradict each other.
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
    """Of each engine process: half of the cores, so that two pools fit, and the server beside one process.

    A thread too many costs much more than it brings: every operator waits until the slowest has had its turn.
    """
    return max(1, len(os.sched_getaffinity(0)) // 2)


def _check(name: str, value: Any) -> None:
    switch = _BY_NAME.get(name)
    if switch is None:
        raise UnknownParameter(name, list(_BY_NAME), "the switchboard")
    if switch.values:
        if not any(value is known or (value == known and type(value) is type(known)) for known in switch.values):
            raise InvalidParameter(name, value, f"must be one of {', '.join(map(repr, switch.values))}")
    elif not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= switch.most:
        raise InvalidParameter(name, value, f"must be a whole number from 1 to {switch.most}")
