"""JSON form of a plan, with stable keys for programs."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from twostroke.cost.calibration import Choice
from twostroke.planner.after_run import PlanComparison
from twostroke.planner.back_test import errors
from twostroke.planner.floors import FrontierPoint, TTFTPoint
from twostroke.planner.memory import MemoryPlan
from twostroke.planner.plan import Plan
from twostroke.planner.what_if import Change, TwoPools

_NO_PLAIN_VALUES = ("kinds", "experts", "layout", "cache", "max_tokens_per_step")
"""Fields of a memory plan that are left out, or reported in another form."""


def as_json(plan: Plan, after: PlanComparison | None = None) -> dict[str, Any]:
    """Return the plan as plain values; with a run, its comparison is under "measured"."""
    return {
        **({} if after is None else {"measured": _of_run(after)}),
        **_of_memory(plan.memory),
        "machine": {
            "name": plan.machine.name,
            "flops_per_s": plan.machine.limits.flops_per_s,
            "bytes_per_s": plan.machine.limits.bytes_per_s,
            "is_published": plan.machine.is_published,
            "is_estimate": plan.machine.limits.is_estimate,
            "raised": plan.raised or None,
            "price_per_hour": plan.machine.price_per_hour,
        },
        "too_long_prompts": list(plan.too_long_prompts),
        "has_measured_experts": plan.has_measured_experts,
        "is_predicted": plan.is_predicted,
        "predicted_by": plan.predicted_by,
        "context": plan.context,
        "most_requests": plan.most_requests,
        "tpot_floor_s": plan.base.tpot_floor_s,
        "ttft": [_of_ttft(point) for point in plan.ttft],
        "frontier": [_of_frontier(point) for point in plan.frontier],
        "what_if": [_of_change(change) for change in plan.changes],
        "verification": {"batch": plan.verified_batch, "steps": [asdict(point) for point in plan.verification]},
        "prompt": None if plan.prompt is None else {**asdict(plan.prompt), "basis": plan.prompt.basis},
        "requests": None if plan.asked is None else {**asdict(plan.asked), "fit": plan.asked.fits},
        "drafting": [_of_choice(choice) for choice in plan.drafting],
        "two_pools": None if plan.two_pools is None else _of_pools(plan.two_pools),
    }


def _of_memory(memory: MemoryPlan) -> dict[str, Any]:
    names = (field.name for field in fields(memory) if field.name not in _NO_PLAIN_VALUES)
    return {
        **{name: getattr(memory, name) for name in names},
        "max_concurrent_requests": memory.max_concurrent_requests,
        "kv_capacity_tokens": memory.kv_capacity_tokens,
        "kv_cache_dtype": memory.layout.kv_format,
        "block_size": memory.layout.block_size,
        "kv_bytes_per_token_by_kind": [asdict(kind) for kind in memory.kinds],
        "experts": [asdict(kind) for kind in memory.experts],
    }


def _of_ttft(point: TTFTPoint) -> dict[str, Any]:
    return {
        "num_prompt_tokens": point.num_prompt_tokens,
        "ttft_floor_s": point.floor_s,
        "ttft_predicted_s": point.predicted_s,
        "bound": point.bound,
    }


def _of_frontier(point: FrontierPoint) -> dict[str, Any]:
    return {
        **asdict(point),
        "tokens_per_s_ceiling": point.tokens_per_s_ceiling,
        "tokens_per_s_predicted": point.tokens_per_s_predicted,
    }


def _of_change(change: Change) -> dict[str, Any]:
    outcome = None if change.outcome is None else asdict(change.outcome)
    return {"change": change.name, "outcome": outcome, "why_not": change.why_not or None}


def _of_choice(choice: Choice) -> dict[str, Any]:
    drafter = choice.drafter
    figures = {"acceptance": drafter.acceptance, "num_drafts": choice.num_drafts, "gain": choice.gain}
    return {"method": drafter.words, **figures}


def _of_run(after: PlanComparison) -> dict[str, Any]:
    sizes = {one.figure: {"planned": one.planned, "measured": one.measured, "error": one.error} for one in after.sizes}
    off = errors(after.planned, after.measured)
    times = {
        name: {"planned": after.planned[name], "measured": after.measured[name], "error": error}
        for name, error in off.items()
    }
    floors = [asdict(kind) for kind in after.beside_floors]
    return {"sizes": sizes, "times": times, "beside_floors": floors, "why_not": after.why_not or None}


def _of_pools(pools: TwoPools) -> dict[str, Any]:
    return {**asdict(pools), "needed_bytes_per_s": pools.needed_bytes_per_s, "is_hidden": pools.is_hidden}
