"""The numbers of the tiles and the histograms: those of /metrics, and rates of the steps of the last second."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from twostroke.live.rows import LiveStep
from twostroke.metrics import families
from twostroke.metrics.engine_metrics import EngineMetrics
from twostroke.metrics.families import Family
from twostroke.metrics.instruments import Distribution, Number

WINDOW_S = 1.0
"""Rates are of so long."""
NUM_STEPS_MEANT = 20
"""Step times are means of so many."""

_NUMBERS: dict[str, Family] = {
    "running": families.NUM_REQUESTS_RUNNING,
    "waiting": families.NUM_REQUESTS_WAITING,
    "num_preemptions": families.NUM_PREEMPTIONS,
    "num_steps": families.ENGINE_STEPS,
    "prompt_tokens": families.PROMPT_TOKENS,
    "cached_tokens": families.PROMPT_TOKENS_CACHED,
    "generation_tokens": families.GENERATION_TOKENS,
    "cache_queries": families.PREFIX_CACHE_QUERIES,
    "cache_hits": families.PREFIX_CACHE_HITS,
    "kv_usage": families.KV_CACHE_USAGE,
}
_HISTOGRAMS: dict[str, Family] = {
    "ttft": families.TIME_TO_FIRST_TOKEN,
    "tpot": families.TIME_PER_OUTPUT_TOKEN,
    "itl": families.INTER_TOKEN_LATENCY,
}


def figures_of(metrics: EngineMetrics, steps: Sequence[LiveStep], now_s: float) -> dict[str, float | None]:
    """The tiles' numbers of one engine.

    Args:
        metrics: of it.
        steps: its last ones, oldest first.
        now_s: the engine's clock: a rate is 0 when nothing has come for a second.
    """
    figures: dict[str, float | None] = {name: _number(metrics, family).value for name, family in _NUMBERS.items()}
    return figures | _rates(steps, now_s) | _step_times(steps)


def waiting_by_reason(metrics: EngineMetrics) -> dict[str, float]:
    """As the metric of that name has it."""
    return {labels["reason"]: n for _, labels, n in _number(metrics, families.NUM_REQUESTS_WAITING_BY_REASON).samples()}


def histograms_of(metrics: EngineMetrics) -> dict[str, dict[str, Any]]:
    """TTFT, TPOT and ITL since the start: bounds in seconds, and counts, one more than bounds."""
    found: dict[str, dict[str, Any]] = {}
    for name, family in _HISTOGRAMS.items():
        instrument = metrics.instruments[family]
        assert isinstance(instrument, Distribution), family.name
        found[name] = {
            "bounds": family.bounds,
            "counts": instrument.counts,
            "sum": instrument.total,
            "count": instrument.count,
        }
    return found


def _number(metrics: EngineMetrics, family: Family) -> Number:
    instrument = metrics.instruments[family]
    assert isinstance(instrument, Number), family.name
    return instrument


def _rates(steps: Sequence[LiveStep], now_s: float) -> dict[str, float | None]:
    """Tokens per second of each stroke."""
    recent = [step for step in steps if step.done_s is not None and step.done_s > now_s - WINDOW_S]
    if not recent:
        return {"prefill_tokens_per_s": 0.0, "decode_tokens_per_s": 0.0}
    # steps that are remembered may reach back less than a second
    span_s = max(now_s - recent[0].time_s, 1e-3)
    return {
        "prefill_tokens_per_s": sum(step.batch.num_prefill_tokens for step in recent) / span_s,
        "decode_tokens_per_s": sum(step.num_generated for step in recent) / span_s,
    }


def _step_times(steps: Sequence[LiveStep]) -> dict[str, float | None]:
    """Means of the last steps that gave a result, in milliseconds."""
    done = [step for step in list(steps)[-NUM_STEPS_MEANT:] if step.done_s is not None]
    if not done:
        return {"step_ms": None, "floor_ms": None}
    step_s = sum(step.done_s - step.time_s for step in done if step.done_s is not None) / len(done)
    floors = [floor_s for floor_s in (step.floor_s for step in done) if floor_s is not None]
    return {"step_ms": step_s * 1e3, "floor_ms": sum(floors) / len(floors) * 1e3 if floors else None}
