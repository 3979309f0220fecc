"""Levers: for each constraint, the settings that relieve it and are not yet in effect.

A lever with `settings` can be simulated, and its gain is predicted. The gain of the others cannot be derived from a
log; they are listed with the measurement that would show it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from twostroke.events import EngineStarted
from twostroke.plain_words import multiple
from twostroke.planner.constraint import Binding, own_limit_s
from twostroke.planner.signals import Signals
from twostroke.simulation.settings import WhatIf

MIN_LEVER_GAIN = 1.10
"""Least gain factor that is worth a change of settings."""
_LIMITS = (3.0, 8.0, 20.0)
"""Factors on the usual step time, as limits of the time between tokens. A tighter limit makes prompts take longer."""
_BASELINES = {"enable_chunked_prefill": "--no-enable-chunked-prefill", "mixing": "--mixing"}
"""Settings that keep prompts whole, and their flags."""
_FEW_DECODES = 4
"""Requests per step from which on no drafts are offered: the arithmetic to verify them is not free there."""
_INT8_BITS = 8.5
"""Bits per weight in 8-bit formats, scales included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lever:
    """A change to make, and its predicted effect."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    """Settings as for `twostroke replay --set`; empty where the change cannot be simulated."""
    flags: str
    """Flags of the server."""
    metric: str
    """Name of the figure that improves, as in figures()."""
    is_exact: bool = True
    """Whether every request keeps its output, bit for bit."""
    measure: str = ""
    """Measurement that would show its gain, where it cannot be simulated."""
    before: float | None = None
    after: float | None = None
    """Predicted figure with the lever; `before` is the one without it, for the same requests."""
    costs: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    """Other predicted figures, before and after."""

    @property
    def ttft_cost(self) -> float:
        """Factor on the time to the first token; 1: unchanged, or not predicted."""
        before, after = self.costs.get("ttft_p50", (1.0, 1.0))
        return after / before

    @property
    def gain(self) -> float:
        """Gain factor; 1: unchanged, or not predicted."""
        if not self.before or not self.after:
            return 1.0
        return self.after / self.before if self.metric.endswith("_tok_s") else self.before / self.after


def levers_of(constraint: Binding, found: Signals, link_bytes_per_s: float | None) -> tuple[Lever, ...]:
    """Return every lever that may relieve a constraint and is not yet in effect."""
    started = found.started
    if started is None:
        return ()
    match constraint:
        case Binding.KV:
            return (*_baseline_levers(started), *_kv_levers(started))
        case Binding.SLOTS:
            return (*_baseline_levers(started), _more_slots(started))
        case Binding.PROMPTS:
            return (*_chunk_levers(found, started), *_pool_levers(found, started, link_bytes_per_s))
        case Binding.BANDWIDTH:
            return (*_draft_levers(found, started), *_weight_levers(found, started))
        case _:
            return ()


def _baseline_levers(started: EngineStarted) -> list[Lever]:
    """Return levers that switch off the baselines that were switched on."""
    usual = {"batching": "continuous", "kv_reservation": "paged"}
    given = {**started.scheduler, **started.cache}
    settings = {name: value for name, value in usual.items() if given[name] != value}
    if not settings:
        return []
    names = {"batching": "continuous batching", "kv_reservation": "paged KV"}
    flags = " and ".join(f"--{name.replace('_', '-')}" for name in settings)
    return [
        Lever(
            name=" with ".join(names[name] for name in settings),
            flags=f"leave out {flags}",
            metric="output_tok_s",
            settings=settings,
        )
    ]


def _kv_levers(started: EngineStarted) -> list[Lever]:
    more = int(1.5 * started.num_blocks)
    flags, settings = f"--num-kv-blocks {more}", {"num_kv_blocks": more}
    for name in ("kv_cache_memory", "gpu_memory_utilization"):  # neither can be given with a number of blocks
        if started.cache[name] is not None:
            flags += f" in place of --{name.replace('_', '-')}"
    found = [Lever(name="half as much KV memory again", flags=flags, metric="ttft_p99", settings=settings)]
    if started.layout["kv_format"] not in ("bf16", "f16", "f32"):
        return found
    settings, flags = {"kv_cache_dtype": "int8"}, "--kv-cache-dtype int8"
    if started.cache["num_kv_blocks"] is not None:  # the old number of blocks would take half of the memory
        more = WhatIf(settings=settings).apply(started).num_blocks
        settings, flags = settings | {"num_kv_blocks": more}, f"{flags} --num-kv-blocks {more}"
    return [*found, Lever(name="KV in 8 bits", flags=flags, metric="ttft_p99", is_exact=False, settings=settings)]


def _more_slots(started: EngineStarted) -> Lever:
    more = 2 * started.scheduler["max_num_seqs"]
    settings = {"max_num_seqs": more}
    return Lever(name="twice the slots", flags=f"--max-num-seqs {more}", metric="ttft_p99", settings=settings)


def _chunk_levers(found: Signals, started: EngineStarted) -> list[Lever]:
    """Return limits of the time between tokens, as multiples of the usual step; the prediction chooses one of them."""
    scheduler, own_s = started.scheduler, own_limit_s(found)
    has_chunks = scheduler["enable_chunked_prefill"] and scheduler["mixing"] == "mixed"
    levers: list[Lever] = []
    if own_s is not None and found.decode_step.get("p99", 0.0) > own_s:
        return levers  # a tighter limit cannot be kept either: a step without any prompt takes longer
    for times in _LIMITS:
        limit_s = round(times * found.decode_step.get("p50", 0.02), 4)
        settings: dict[str, Any] = {"itl_slo": limit_s}
        flags = f"--itl-slo {limit_s * 1e3:g}ms"
        if own_s is not None and limit_s >= own_s:
            continue  # no tighter than the present limit
        if has_chunks:
            name = "a limit for the time between tokens" if own_s is None else "a tighter limit between tokens"
            levers.append(Lever(name=name, flags=flags, metric="itl_beside_prompts", settings=settings))
            continue
        if not scheduler["enable_chunked_prefill"]:
            settings["enable_chunked_prefill"] = True
        if scheduler["mixing"] != "mixed":
            settings["mixing"] = "mixed"
        off = [flag for name, flag in _BASELINES.items() if name in settings]
        levers.append(
            Lever(
                name="chunked prefill",
                flags=f"leave out {' and '.join(off)}, and give {flags}",
                metric="itl_beside_prompts" if found.stalled_itl.get("count") else "ttft_p99",
                settings=settings,
            )
        )
    return levers


def _pool_levers(found: Signals, started: EngineStarted, link_bytes_per_s: float | None) -> list[Lever]:
    """Return the lever of two pools on two such machines, where chunked prefill is on and there are no pools yet."""
    scheduler, cache = started.scheduler, started.cache
    is_chunked = scheduler["enable_chunked_prefill"] and scheduler["mixing"] == "mixed"
    if found.has_pools or not is_chunked:
        return []
    flags, remark = "--prefill 1 --decode 1", "give --link-bytes-per-s to predict it"
    cannot = [
        flag
        for flag, is_given in (
            ("--no-enable-prefix-caching", not cache["enable_prefix_caching"]),
            ("--kv-check-rate", bool(cache["kv_check_rate"])),
            ("--kv-offloading-size", cache["kv_offloading_size"] is not None),
        )
        if is_given
    ]
    settings: dict[str, Any] = {}
    if cannot:
        flags, remark = f"{flags}, and leave out {' and '.join(cannot)}", "record a run without these first"
    elif link_bytes_per_s is not None:
        settings, remark = {"prefill": 1, "decode": 1, "link_bytes_per_s": link_bytes_per_s}, ""
    name = "prefill and decode in two pools"
    return [Lever(name=name, flags=flags, metric="itl_beside_prompts", settings=settings, measure=remark)]


def _draft_levers(found: Signals, started: EngineStarted) -> list[Lever]:
    if started.speculation is not None or found.decodes_per_step >= _FEW_DECODES:
        return []
    flags = '--speculative-config \'{"method": "ngram"}\''
    measure = "`twostroke calibrate` measures which drafts pay on this model"
    return [Lever(name="speculation", flags=flags, metric="tpot_p50", measure=measure)]


def _weight_levers(found: Signals, started: EngineStarted) -> list[Lever]:
    """Return weight formats with fewer bytes, where weights dominate a step's reads and have more bits than that."""
    bits = bits_per_weight(found, started)
    if bits is None or bits < MIN_LEVER_GAIN * _INT8_BITS:
        return []
    measure = f"weights take {bits:.1f} bits each; at most {multiple(bits / _INT8_BITS)} times as good. Measure it"
    return [
        Lever(name="weights in 8 bits", flags="--quantization int8", metric="tpot_p50", is_exact=False, measure=measure)
    ]


def bits_per_weight(found: Signals, started: EngineStarted) -> float | None:
    """Return the bits per weight, by the bytes of all weights or else those that a step reads; None: not known."""
    known = re.search(r"(\d+) parameters", started.model)
    num_bytes = started.weight_bytes or found.weight_bytes
    return 8 * num_bytes / int(known[1]) if known is not None and num_bytes else None
