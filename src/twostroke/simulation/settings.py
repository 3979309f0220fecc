"""Recorded settings with some of them changed, for what-if predictions."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from twostroke.config.cache import CacheConfig
from twostroke.config.checks import check_int, check_number
from twostroke.config.fields import MAX_COUNT
from twostroke.config.kv_format import KVFormat
from twostroke.config.layer_spec import KVSpec
from twostroke.config.scheduler import SchedulerConfig
from twostroke.errors import InvalidParameter
from twostroke.event_codec import plain
from twostroke.events import EngineStarted
from twostroke.kv_cache.layout import KVLayout
from twostroke.scheduler.replay import layout_of
from twostroke.simulation.pools import SimulatedPools
from twostroke.simulation.requests import SimulatedRequest

_SCHEDULER = {f.name for f in dataclasses.fields(SchedulerConfig)}
_CACHE = {"block_size", "num_kv_blocks", "kv_cache_memory", "kv_cache_dtype", "enable_prefix_caching", "kv_reservation"}
_POOLS = {f.name for f in dataclasses.fields(SimulatedPools)}
_OWN = {"request_rate_factor", "step_time_factor", "max_model_len"} | _POOLS
_MIN_ARRIVAL_SHARE = 0.01
"""Share of a run: requests that all arrive within less than this have no arrival rate."""
_SIZES = ("block_size", "kv_cache_dtype")
"""Settings that change the size of a block."""
_MAX_BLOCKS = 1 << 24
"""Limit for the number of blocks: a simulation keeps a few hundred bytes for each."""
MAX_FACTOR = 1_000_000
"""Limit for the factors of the request rate and of step times."""
_FORMATS: Mapping[str, KVFormat] = {"bf16": "bf16", "f32": "f32", "fp8": "fp8", "int8": "int8", "int4": "int4"}


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """Settings to change; an empty one keeps the recorded configuration.

    >>> WhatIf.read(["max_num_batched_tokens=256", "request_rate_factor=2"])
    WhatIf(settings={'max_num_batched_tokens': 256, 'request_rate_factor': 2})
    """

    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def read(cls, words: Iterable[str]) -> WhatIf:
        """Parse KEY=VALUE words; a value is JSON or a bare word.

        Raises:
            InvalidParameter: a word has no "=", or names a setting that cannot be simulated.
        """
        found: dict[str, Any] = {}
        for word in words:
            name, equals, value = word.partition("=")
            name = name.strip().lstrip("-").replace("-", "_")
            if not equals:
                raise InvalidParameter("set", word, "must be key=value", "For example max_num_batched_tokens=256.")
            known = _SCHEDULER | _CACHE | _OWN
            if name not in known:
                near = difflib.get_close_matches(name, known, n=2)
                remedy = f"Did you mean {' or '.join(near)}?" if near else f"Known: {', '.join(sorted(known))}."
                raise InvalidParameter("set", word, "names a setting that cannot be simulated", remedy)
            found[name] = _value(value)
        return cls(settings=found)

    @property
    def words(self) -> str:
        """Settings as KEY=VALUE words, or "as recorded".

        >>> WhatIf(settings={"policy": "fair", "max_num_seqs": 8}).words
        'policy=fair max_num_seqs=8'
        """
        return " ".join(f"{name}={value}" for name, value in self.settings.items()) or "as recorded"

    @property
    def request_rate_factor(self) -> float:
        """Factor by which requests arrive faster."""
        return self._factor("request_rate_factor")

    @property
    def step_time_factor(self) -> float:
        """Factor by which steps take longer."""
        return self._factor("step_time_factor")

    @property
    def pools(self) -> SimulatedPools | None:
        """Pools to simulate instead of the single process; None: a single process.

        Raises:
            InvalidParameter: sizes that a server does not accept, a prefill pool without a link, or a link without a
            prefill pool.
        """
        pools = SimulatedPools(**{name: value for name, value in self.settings.items() if name in _POOLS})
        return pools if pools.decode else None

    def apply(self, started: EngineStarted) -> EngineStarted:
        """Return the recorded engine start with these settings.

        The bytes of KV memory stay the same unless they are changed: blocks of another size or format change the
        number of blocks.

        Raises:
            InvalidParameter: a setting does not accept its value.
        """
        given = self.settings
        # construct new configs, so that ranges are checked as at an engine's start
        of_scheduler: dict[str, Any] = {n: v for n, v in given.items() if n in _SCHEDULER}
        of_cache: dict[str, Any] = {n: v for n, v in given.items() if n in _CACHE}
        sizes: dict[str, Any] = {"num_kv_blocks": None, "kv_cache_memory": None, "gpu_memory_utilization": None}
        scheduler = SchedulerConfig(**started.scheduler | of_scheduler)
        if self.pools is not None or of_cache.get("enable_prefix_caching") is False:
            sizes["kv_offloading_size"] = None  # cannot be combined with either
        cache = CacheConfig(**started.cache | sizes | of_cache)
        before = after = layout_of(started.layout)
        if "block_size" in given:
            after = KVLayout.of(_specs_of(before), block_size=cache.block_size, kv_format=before.kv_format)
        if "kv_cache_dtype" in given:
            after = replace(after, kv_format=_kv_format(cache.kv_cache_dtype))
        memory = cache.kv_cache_memory or started.num_blocks * before.bytes_per_block
        num_blocks = cache.num_kv_blocks or int(memory // after.bytes_per_block)
        self._check_blocks(num_blocks, after.bytes_per_block)
        max_model_len = given.get("max_model_len", started.max_model_len)
        check_int("max_model_len", max_model_len, 2, MAX_COUNT)
        return replace(
            started,
            scheduler=plain(scheduler),
            cache=plain(cache),
            layout=plain(after),
            num_blocks=num_blocks,
            max_model_len=max_model_len,
        )

    def _check_blocks(self, num_blocks: int, bytes_per_block: int) -> None:
        """Raise if the KV memory holds no block, or more than can be simulated; name the setting that causes it."""
        name = next((name for name in ("num_kv_blocks", "kv_cache_memory", *_SIZES) if name in self.settings), None)
        if name is None or 1 <= num_blocks <= _MAX_BLOCKS:
            return
        blocks = f"blocks of {bytes_per_block:,} bytes"
        limit = f"must make room for 1 to {_MAX_BLOCKS:,} KV {blocks}; it makes room for {num_blocks:,}"
        raise InvalidParameter(name, self.settings[name], limit)

    def _factor(self, name: str) -> float:
        value = self.settings.get(name, 1.0)
        check_number(name, value, 0, MAX_FACTOR, f"a number, more than 0 and at most {MAX_FACTOR}", low_open=True)
        return float(value)


def check_rate_factor(what_if: WhatIf, requests: Sequence[SimulatedRequest], duration_s: float) -> None:
    """Raise if a request_rate_factor is given and all requests arrive within a hundredth of the run, before and after.

    Raises:
        InvalidParameter: the requests arrived at once, or nearly.
    """
    factor = what_if.request_rate_factor
    if factor == 1 or not requests:
        return
    times_s = [request.arrival.arrival_time_s for request in requests]
    span_s = max(times_s) - min(times_s)
    if max(span_s, span_s / factor) >= _MIN_ARRIVAL_SHARE * duration_s:
        return
    came = "came at once" if span_s == 0 else f"came within {span_s:.3g} s of a run of {duration_s:.3g} s"
    raise InvalidParameter(
        "request_rate_factor",
        factor,
        f"changes nothing: all {len(requests)} requests {came}",
        "Leave it out, or record requests that come over time.",
    )


def rehash_for_block_size(
    requests: Sequence[SimulatedRequest], before: int, after: int
) -> tuple[SimulatedRequest, ...]:
    """Return the requests with block hashes for another block size.

    A chained hash also covers all tokens before its block, so every second hash is that of a block of twice the
    size. Smaller blocks get derived hashes, and are shared exactly where the larger ones were.

    ```
    before   h0 h1 h2 h3 h4          twice     h1 h3          half     h0' h0 h1' h1 h2' h2 h3' h3 h4' h4
    ```
    """
    if before == after:
        return tuple(requests)
    return tuple(_rehashed(request, before, after) for request in requests)


def _rehashed(request: SimulatedRequest, before: int, after: int) -> SimulatedRequest:
    arrival = request.arrival
    num_prompt = len(arrival.block_hashes)
    names = [*arrival.block_hashes, *request.output_hashes]
    if after > before:
        ratio = after // before
        new = names[ratio - 1 :: ratio]
    else:
        ratio = before // after
        new = [name if part == ratio - 1 else name + bytes([part]) for name in names for part in range(ratio)]
    num_new = min(len(new), arrival.num_prompt_tokens // after) if num_prompt else 0
    return replace(
        request, arrival=replace(arrival, block_hashes=tuple(new[:num_new])), output_hashes=tuple(new[num_new:])
    )


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _specs_of(layout: KVLayout) -> list[KVSpec]:
    """Return the KV spec of each layer."""
    found = {layer_id: group.spec for group in layout.groups for layer_id in group.layer_ids}
    return [found[layer_id] for layer_id in sorted(found)]


def _kv_format(name: str) -> KVFormat:
    if name not in _FORMATS:
        raise InvalidParameter("kv_cache_dtype", name, f"must be one of {', '.join(_FORMATS)} in a what-if")
    return _FORMATS[name]
