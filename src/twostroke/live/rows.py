"""Table rows of the page: requests and steps as arrays, with the field names sent once.

Also the numbers of its tiles and histograms: those of /metrics, and rates over the last second.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from twostroke.batch import Stroke
from twostroke.explain.run_state import RequestState
from twostroke.explain.step import DecidedStep
from twostroke.metrics import families
from twostroke.metrics.engine_metrics import EngineMetrics
from twostroke.metrics.families import Family
from twostroke.metrics.instruments import Distribution, Number


class SequenceRow(msgspec.Struct, frozen=True, array_like=True):
    """Row of a request; times in seconds on the engine's clock."""

    id: str
    state: str
    """State: waiting, running, preempted or ended."""
    stroke: str
    """Stroke (prefill or decode) of the last step that computed tokens for it; empty before."""
    tenant_is_other: bool
    """Whether the request belongs to another tenant; its id is then a placeholder."""
    arrival_s: float | None
    scheduled_s: float | None
    first_token_s: float | None
    last_token_s: float | None
    finish_s: float | None
    finish: str
    """Finish reason: stop, length, abort, error, moved (it continues in another process) or lost (its process died; it
    continues elsewhere if others can take over). Empty until it ends."""
    num_prompt: int
    num_cached: int
    num_computed: int
    num_output: int
    max_tokens: int
    itl_ms: float | None
    """Milliseconds between its last two tokens."""
    num_preemptions: int
    priority: int
    background: bool


class StepRow(msgspec.Struct, frozen=True, array_like=True):
    """Row of a step."""

    step: int
    at_s: float
    """Time of the decision in seconds."""
    ms: float | None
    """Milliseconds from the decision to the result; None while the step runs."""
    floor_ms: float | None
    """Shortest time in which this machine can compute it; None if unknown."""
    bound: str
    """Resource that binds: compute or memory."""
    decode: int
    """Query tokens of decodes without drafts; `prefill` counts those of prefills, `drafts` those of drafts."""
    prefill: int
    drafts: int
    cached: int
    """Cached prompt tokens of the requests that this step admits."""
    limit: str
    """Limit that kept the batch from being larger: tokens, seqs, kv or none."""
    wait: str
    """Reason why the head of the queue was not admitted."""
    head: str
    """Id of the request at the head of the queue."""
    num_running: int
    num_waiting: int
    preempted: tuple[str, ...]
    budget: int
    """Token budget of the step; 0 if not recorded."""


FIELDS = {"request": list(SequenceRow.__struct_fields__), "step": list(StepRow.__struct_fields__)}
"""Field names of the rows, sent as `State.fields`."""


def row_of_step(step: DecidedStep) -> StepRow:
    """Return the row of a step."""
    batch, cost, floor_s = step.batch, step.cost, step.floor_s
    num_tokens = num_prefill = num_drafts = 0
    for share in batch.requests:  # a single pass, since a frame has many steps and a step many requests
        num_tokens += share.num_scheduled_tokens
        num_drafts += share.num_draft_tokens
        if share.stroke is Stroke.PREFILL:
            num_prefill += share.num_scheduled_tokens
    return StepRow(
        step=batch.step,
        at_s=step.time_s,
        ms=None if step.done_s is None else (step.done_s - step.time_s) * 1e3,
        floor_ms=None if floor_s is None else floor_s * 1e3,
        bound="" if cost is None else cost.bound,
        decode=num_tokens - num_prefill - num_drafts,
        prefill=num_prefill,
        drafts=num_drafts,
        cached=sum(admitted.num_cached_tokens for admitted in batch.admitted),
        limit=str(batch.limited_by),
        wait=batch.wait_reason,
        head=batch.head_request_id or "",
        num_running=batch.num_running,
        num_waiting=batch.num_waiting,
        preempted=batch.preempted_request_ids,
        budget=batch.token_budget,
    )


def row_of_request(request: RequestState, finish: str = "", finish_s: float | None = None) -> SequenceRow:
    """Return the row of a request."""
    arrival, tokens_s = request.arrival, request.times.token_times_s
    return SequenceRow(
        id=request.request_id,
        state="ended" if finish else str(request.status),
        stroke=request.stroke,
        tenant_is_other=False,
        arrival_s=None if arrival is None else arrival.arrival_time_s,
        scheduled_s=request.times.scheduled_s,
        first_token_s=tokens_s[0] if tokens_s else None,
        last_token_s=tokens_s[-1] if tokens_s else None,
        finish_s=finish_s,
        finish=finish,
        num_prompt=request.num_prompt_tokens,
        num_cached=request.num_cached_tokens,
        num_computed=request.num_computed_tokens,
        num_output=len(tokens_s),
        max_tokens=request.max_tokens,
        itl_ms=(tokens_s[-1] - tokens_s[-2]) * 1e3 if len(tokens_s) > 1 else None,
        num_preemptions=request.num_preemptions,
        priority=0 if arrival is None else arrival.priority,
        background=arrival is not None and arrival.background,
    )


# ---------------------------------------------------------------------- tiles and histograms


WINDOW_S = 1.0
"""Window of the rates in seconds."""
NUM_STEPS_AVERAGED = 20
"""Number of steps over which step times are averaged."""

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


def figures_of(metrics: EngineMetrics, steps: Sequence[DecidedStep], now_s: float) -> dict[str, float | None]:
    """Return the tile numbers of one engine.

    Args:
        metrics: metrics of the engine.
        steps: its last steps, oldest first.
        now_s: time on the engine's clock: a rate is 0 if the last second had no result.
    """
    figures: dict[str, float | None] = {name: _number(metrics, family).value for name, family in _NUMBERS.items()}
    return figures | _rates(steps, now_s) | _step_times(steps)


def waiting_by_reason(metrics: EngineMetrics) -> dict[str, float]:
    """Return the number of waiting requests by reason, from the metric of that name."""
    return {labels["reason"]: n for _, labels, n in _number(metrics, families.NUM_REQUESTS_WAITING_BY_REASON).samples()}


def histograms_of(metrics: EngineMetrics) -> dict[str, dict[str, Any]]:
    """Return histograms of TTFT, TPOT and ITL since the start: bounds in seconds, and one more count than bounds."""
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


def _rates(steps: Sequence[DecidedStep], now_s: float) -> dict[str, float | None]:
    """Return tokens per second of prefill and of decode."""
    recent = [step for step in steps if step.done_s is not None and step.done_s > now_s - WINDOW_S]
    if not recent:
        return {"prefill_tokens_per_s": 0.0, "decode_tokens_per_s": 0.0}
    # the kept steps may cover less than a second
    span_s = max(now_s - recent[0].time_s, 1e-3)
    return {
        "prefill_tokens_per_s": sum(step.batch.num_prefill_tokens for step in recent) / span_s,
        "decode_tokens_per_s": sum(step.num_generated for step in recent) / span_s,
    }


def _step_times(steps: Sequence[DecidedStep]) -> dict[str, float | None]:
    """Return mean milliseconds of the last steps with a result, and of their floors."""
    done = [step for step in list(steps)[-NUM_STEPS_AVERAGED:] if step.done_s is not None]
    if not done:
        return {"step_ms": None, "floor_ms": None}
    step_s = sum(step.done_s - step.time_s for step in done if step.done_s is not None) / len(done)
    floors = [floor_s for floor_s in (step.floor_s for step in done) if floor_s is not None]
    return {"step_ms": step_s * 1e3, "floor_ms": sum(floors) / len(floors) * 1e3 if floors else None}
