"""The limits of time that a history missed, and those that no schedule can keep. Pure."""

from __future__ import annotations

from twostroke.config.scheduler import SchedulerConfig
from twostroke.planner.constraint import KEPT
from twostroke.planner.signals import Signals

LEAST_STEPS = 100
"""Fewest steps without a prompt for a meaningful 99th percentile."""


def limit_lines(found: Signals) -> tuple[str, ...]:
    """Return a sentence for each limit that was missed at the 99th percentile, by more than `KEPT` allows.

    No chunk size keeps an ITL limit below the time of decode-only steps; the sentence then says so.
    """
    if found.started is None:
        return ()
    config = SchedulerConfig(**found.started.scheduler)
    lines: list[str] = []
    alone_s, itl_s = found.decode_step.get("p99", 0.0), found.itl.get("p99", 0.0)
    limit_s = config.itl_slo_s
    if limit_s is not None and alone_s > KEPT * limit_s and found.decode_step["count"] >= LEAST_STEPS:
        lines.append(
            f"itl_slo {_ms(limit_s)} cannot be kept: a step without any prompt takes {_ms(alone_s)} at the 99th "
            "percentile. Give a larger --itl-slo or fewer --max-num-seqs."
        )
    elif limit_s is not None and itl_s > KEPT * limit_s:
        lines.append(
            f"itl_slo {_ms(limit_s)} was missed: the time between tokens is {_ms(itl_s)} at the 99th percentile"
        )
    ttft_s = found.ttft.get("p99", 0.0)
    if config.ttft_slo_s is not None and ttft_s > KEPT * config.ttft_slo_s:
        lines.append(f"ttft_slo {_ms(config.ttft_slo_s)} was missed: the TTFT is {_ms(ttft_s)} at the 99th percentile")
    return tuple(lines)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.4g} ms"
