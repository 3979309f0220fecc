"""The constraint that binds an engine, found from its history alone. Nothing is predicted here.

    idle        nothing: steps run less than half of the time, no limit keeps requests waiting, and itl_slo is kept
    compute     prompts: their arithmetic takes most of the working time, whatever the scheduler does
    link        KV that is fetched from other processes
    KV, slots   requests that wait to be admitted
    prompts     decodes that wait for the prompts in their steps
    the rest    the parts of a step that make it long

The order matters. A server that is idle or computes prompts all the time also has decodes that wait for a prompt,
but no scheduler setting changes its users' waits.

The module also reports the latency limits that were missed, and those that no schedule can keep.
"""

from __future__ import annotations

from enum import StrEnum

from twostroke.batch import Limit
from twostroke.config.scheduler import SchedulerConfig
from twostroke.plain_words import counted
from twostroke.planner.back_test import too_few
from twostroke.planner.signals import Signals
from twostroke.planner.words import milliseconds, significant

_WAITED = 0.2
"""Least share of the working time that counts as waiting."""
_IDLE = 0.5
"""Share of the time in which steps run, below which a server is idle."""
_COMPUTES = 0.75
"""Share of the working time for prompt arithmetic, above which the scheduler has nothing to gain."""
_STALLED = 3.0
"""Factor on the usual step above which a decode has waited for a prompt."""
LIMIT_TOLERANCE = 1.1
"""Factor on a limit up to which it counts as kept."""
_OWN = 0.5
"""Share of the working time outside of the model's operators, above which that time binds."""
_FEW_GAPS = 4


class Binding(StrEnum):
    """The constraint that binds an engine."""

    KV = "KV memory"
    SLOTS = "slots"
    PROMPTS = "long prompts"
    LINK = "link"
    ENGINE = "engine time"
    COMPUTE = "compute"
    BANDWIDTH = "bandwidth"
    NONE = "nothing"
    UNKNOWN = "unknown: too few requests"


ConstraintVerdict = tuple[Binding, tuple[str, ...]]


def constraint_of(found: Signals) -> ConstraintVerdict:
    """Return the first constraint that applies, and one sentence for each piece of evidence."""
    if not found.num_steps and not found.busy_s:
        return _without_steps(found)
    few = too_few(found.num_served)
    if few:
        return Binding.UNKNOWN, (few,)
    for rule in (_idle, _prompt_compute, _link, _admission, _prompts, _engine):
        verdict = rule(found)
        if verdict is not None:
            return verdict
    return _steps(found)


def _without_steps(found: Signals) -> ConstraintVerdict:
    """Return the verdict on an engine that has finished no step: idle, or not seen long enough."""
    num_asked = sum(found.waiting_by_tenant.values())
    if not num_asked:
        return Binding.NONE, ("the engine is idle: no step ended in the recorded time, and no request arrived",)
    return Binding.UNKNOWN, (f"{counted(num_asked, 'request')} arrived, and no step has ended yet. Try again later.",)


def own_limit_s(found: Signals) -> float | None:
    """Return the engine's limit of the time between tokens, in seconds."""
    return SchedulerConfig(**found.started.scheduler).itl_slo_s if found.started else None


def _idle(found: Signals) -> ConstraintVerdict | None:
    is_chunked = found.started is None or found.started.scheduler["enable_chunked_prefill"]
    limits = (Limit.KV, Limit.SEQS) if is_chunked else (Limit.KV, Limit.SEQS, Limit.TOKENS)
    waits_for_link = found.link_s > _WAITED * found.busy_s
    if found.busy >= _IDLE or waits_for_link or any(found.waited(limit) > _WAITED for limit in limits):
        return None
    own_s = own_limit_s(found)
    if own_s is not None and found.itl.get("p99", 0.0) > LIMIT_TOLERANCE * own_s:
        return None  # a missed limit is a problem however idle the server is
    return Binding.NONE, (f"steps ran in {found.busy:.0%} of the time, and no request waited long for admission",)


def _prompt_compute(found: Signals) -> ConstraintVerdict | None:
    share = found.prompt_s / found.busy_s if found.busy_s else 0.0
    if share < _COMPUTES:
        return None
    rate = found.num_prompt_tokens / found.busy_s
    return Binding.COMPUTE, (
        f"arithmetic for prompts takes {share:.0%} of the working time, at {rate:,.0f} prompt tokens/s",
        "only a faster machine, another replica, a smaller model or shorter prompts change that",
    )


def _link(found: Signals) -> ConstraintVerdict | None:
    if found.link_s <= _WAITED * found.busy_s or not found.link_bytes:
        return None
    rate = found.link_bytes / max(found.link_busy_s, 1e-9) / 1e6
    return Binding.LINK, (f"KV was awaited for {significant(found.link_s)} s; it came at {significant(rate)} MB/s",)


def _admission(found: Signals) -> ConstraintVerdict | None:
    """Return KV or slots, whichever made requests wait longer."""
    kv, slots = found.waited(Limit.KV), found.waited(Limit.SEQS)
    if kv > _WAITED and kv >= slots:
        used = f"{found.most_blocks_used:.0%} of the KV blocks were held at most"
        return Binding.KV, (f"requests waited for KV blocks in {kv:.0%} of the working time", used)
    if slots > _WAITED:
        limit = found.started.scheduler["max_num_seqs"] if found.started else 0
        return Binding.SLOTS, (f"requests waited for one of {limit} slots in {slots:.0%} of the working time",)
    return None


def _prompts(found: Signals) -> ConstraintVerdict | None:
    tokens = found.waited(Limit.TOKENS)
    if tokens > _WAITED and found.started and not found.started.scheduler["enable_chunked_prefill"]:
        waited = f"a prompt waited in {tokens:.0%} of the working time for a step with room for the whole of it"
        return Binding.PROMPTS, (waited,)
    if not stalls(found, _STALLED):
        return None
    stalled_s, usual_s = found.stalled_itl["mean"], found.decode_step["mean"]
    return Binding.PROMPTS, (
        f"beside prompts a token takes {milliseconds(stalled_s)} in the mean, otherwise {milliseconds(usual_s)}",
        f"a step took up to {found.largest_chunk:,} prompt tokens of one request",
    )


def stalls(found: Signals, factor: float) -> bool:
    """Return whether decodes beside prompts take `factor` times as long as others, and exceed their limit.

    Equal quantiles are compared, because other processes on the machine lengthen both.
    """
    stalled, usual = found.stalled_itl, found.decode_step
    if (
        not usual
        or stalled.get("count", 0) <= _FEW_GAPS
        or stalled["p99"] <= LIMIT_TOLERANCE * (own_limit_s(found) or 0.0)
    ):
        return False
    return any(stalled[quantile] > factor * usual[quantile] for quantile in ("p90", "p99"))


def _engine(found: Signals) -> ConstraintVerdict | None:
    own = found.own_s / found.busy_s if found.busy_s else 0.0
    if own <= _OWN:
        return None
    return Binding.ENGINE, (f"{own:.0%} of the working time is spent outside of the model's operators",)


def _steps(found: Signals) -> ConstraintVerdict:
    """Return compute or memory bandwidth, whichever makes steps long."""
    if found.compute_s > found.memory_s:
        return Binding.COMPUTE, (f"arithmetic binds {found.compute_s / found.busy_s:.0%} of the working time",)
    share = found.memory_s / found.busy_s if found.busy_s else 0.0
    few = f"{found.decodes_per_step:.1f} requests decode in a step"
    return Binding.BANDWIDTH, (f"reading memory binds {share:.0%} of the working time", few)


MIN_DECODE_STEPS = 100
"""Fewest steps without a prompt for a meaningful 99th percentile."""


def limit_lines(found: Signals) -> tuple[str, ...]:
    """Return a sentence for each limit that was missed at the 99th percentile, by more than `LIMIT_TOLERANCE` allows.

    No chunk size keeps an ITL limit below the time of decode-only steps; the sentence then says so.
    """
    if found.started is None:
        return ()
    config = SchedulerConfig(**found.started.scheduler)
    lines: list[str] = []
    alone_s, itl_s = found.decode_step.get("p99", 0.0), found.itl.get("p99", 0.0)
    limit_s = config.itl_slo_s
    if limit_s is not None and alone_s > LIMIT_TOLERANCE * limit_s and found.decode_step["count"] >= MIN_DECODE_STEPS:
        lines.append(
            f"itl_slo {_ms(limit_s)} cannot be kept: a step without any prompt takes {_ms(alone_s)} at the 99th "
            "percentile. Give a larger --itl-slo or fewer --max-num-seqs."
        )
    elif limit_s is not None and itl_s > LIMIT_TOLERANCE * limit_s:
        lines.append(
            f"itl_slo {_ms(limit_s)} was missed: the time between tokens is {_ms(itl_s)} at the 99th percentile"
        )
    ttft_s = found.ttft.get("p99", 0.0)
    if config.ttft_slo_s is not None and ttft_s > LIMIT_TOLERANCE * config.ttft_slo_s:
        lines.append(f"ttft_slo {_ms(config.ttft_slo_s)} was missed: the TTFT is {_ms(ttft_s)} at the 99th percentile")
    return tuple(lines)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.4g} ms"
