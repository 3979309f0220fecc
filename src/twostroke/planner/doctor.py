"""`twostroke doctor`: what binds an engine, which lever to pull, and what pulling it is predicted to bring.

    signals       numbers read off the history                                              (signals.py)
    constraint    what the time goes into: KV, slots, long prompts, the link, the engine itself, arithmetic, bandwidth
    levers        for each constraint the settings that loosen it; every one that can be is tried in simulated time on
                  the requests of the history, and the one that helps most comes first         (simulation/)
    faults        things that are wrong whatever the load, each by a rule of its own           (faults.py)

Read-only: it looks at events, and at nothing that serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from twostroke.batch import Limit
from twostroke.config.scheduler import SchedulerConfig
from twostroke.cost.step_fit import fit_step_model
from twostroke.cost.step_model import StepTimeModel
from twostroke.errors import InvalidParameter
from twostroke.events import Event
from twostroke.planner.faults import Fault, faults_of
from twostroke.planner.replay import figures, predict
from twostroke.planner.signals import Signals, signals_of
from twostroke.simulation.observed import observed_steps
from twostroke.simulation.pools import SimulatedPools
from twostroke.simulation.requests import Recording, recording_of
from twostroke.simulation.settings import WhatIf

_WAITED = 0.2
"""Of the working time: less is no queue."""
_STALLED = 3.0
"""Times the usual step: whoever decodes notices."""
_KEPT = 1.1
"""Times a limit that was given: no more is as it was wanted."""
_LIMITS = (3.0, 8.0, 20.0)
"""Times the usual step, for a limit of the time between tokens: the tighter, the longer prompts take."""
_BEARABLE = 1.5
"""Times the TTFT before: a limit that costs more is too tight for the load."""
_HELPS = 1.05
"""Times better: less is nothing to pull a lever for."""
_OWN = 0.5
"""Of the working time, outside of the model."""
_SIMULATED = 6000
"""Steps, of all predictions of a diagnosis together: a second or so, however long the history is."""
_FEW = 24
"""Requests: fewer are no load to predict by."""


class Constraint(StrEnum):
    """What binds."""

    KV = "KV memory"
    SLOTS = "slots"
    PROMPTS = "long prompts"
    LINK = "link"
    ENGINE = "engine time"
    COMPUTE = "compute"
    BANDWIDTH = "bandwidth"
    NONE = "nothing"


_KEEPS_OUT = (Constraint.KV, Constraint.SLOTS, Constraint.LINK)
"""Who is hurt waits for a first token; of the others, for the next one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lever:
    """Something to change, and what it is predicted to bring."""

    name: str
    settings: dict[str, Any]
    """As `twostroke replay --set` takes them; empty where nothing here can be simulated."""
    flags: str
    """As a server takes it."""
    metric: str
    """Of figures()."""
    is_exact: bool = True
    """Whether every request keeps its answer, bit for bit."""
    before: float | None = None
    after: float | None = None
    """Predicted, both, for the same requests."""
    ttft_before: float | None = None
    ttft_after: float | None = None
    """The medians: what a lever for the time between tokens may cost."""

    @property
    def ttft_cost(self) -> float:
        """Times as long until the first token; 1: as it was, or not predicted."""
        return self.ttft_after / self.ttft_before if self.ttft_before and self.ttft_after else 1.0

    @property
    def gain(self) -> float:
        """Times better; 1: as it was, or not predicted."""
        if not self.before or not self.after:
            return 1.0
        return self.after / self.before if self.metric.endswith("_tok_s") else self.before / self.after


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What was found."""

    constraint: Constraint
    evidence: tuple[str, ...]
    levers: tuple[Lever, ...]
    """The best first, of those that help without changing an answer, then of the others."""
    faults: tuple[Fault, ...]
    signals: Signals
    example: str
    """The request that shows best what binds, for `twostroke explain`."""
    remark: str = ""
    """Why nothing was predicted, or by which part of the history alone; empty: by all of it."""


def diagnose(
    events: Sequence[Event], step_times: StepTimeModel | None = None, link_bytes_per_s: float | None = None
) -> Diagnosis:
    """Reads a history and says what to do.

    Args:
        events: of a log or a dump of the flight recorder.
        step_times: as calibrated; None: fitted to the steps of the history.
        link_bytes_per_s: from this machine to another; None: not known, and two pools are not predicted.

    Raises:
        InvalidParameter: no step ever ended in it, or a link that carries nothing.
    """
    if link_bytes_per_s is not None:
        SimulatedPools(prefill=1, decode=1, link_bytes_per_s=link_bytes_per_s)  # checked before anything is tried
    signals = signals_of(events)
    constraint, evidence = _constraint(signals)
    levers = _levers(constraint, signals, link_bytes_per_s)
    remark = ""
    try:
        recording, model = recording_of(events), step_times or fit_step_model(observed_steps(events))
        num_runs = 1 + sum(bool(lever.settings) for lever in levers)
        latest = _latest(recording, signals.num_steps * num_runs)
        if len(latest.requests) < len(recording.requests):
            remark = f"predicted by the last {len(latest.requests):,} of {len(recording.requests):,} requests"
        levers = _predicted(levers, latest, model)
    except InvalidParameter as error:  # a dump with a gap, an engine of a pool: it is looked at all the same
        remark = f"nothing was predicted: {error}"
    return Diagnosis(
        constraint=constraint,
        evidence=evidence,
        levers=levers,
        faults=faults_of(signals),
        signals=signals,
        example=(signals.longest_ttft if constraint in _KEEPS_OUT else signals.longest_itl)[1],
        remark=remark,
    )


def _constraint(found: Signals) -> tuple[Constraint, tuple[str, ...]]:
    """The first that applies, from what keeps requests out to what makes steps long."""
    kv, slots, tokens = (found.waited(limit) for limit in (Limit.KV, Limit.SEQS, Limit.TOKENS))
    usual_s = found.decode_step.get("p50", 0.0)
    if found.link_s > _WAITED * found.busy_s and found.link_bytes:
        rate = found.link_bytes / max(found.link_busy_s, 1e-9) / 1e6
        return Constraint.LINK, (f"KV was awaited for {found.link_s:.2f} s; it came at {rate:,.0f} MB/s",)
    if kv > _WAITED and kv >= slots:
        used = f"{found.most_blocks_used:.0%} of the KV blocks were held at most"
        return Constraint.KV, (f"somebody waited for KV blocks in {kv:.0%} of the working time", used)
    if slots > _WAITED:
        limit = found.started.scheduler["max_num_seqs"] if found.started else 0
        return Constraint.SLOTS, (f"somebody waited for one of {limit} slots in {slots:.0%} of the working time",)
    if tokens > _WAITED and found.started and not found.started.scheduler["enable_chunked_prefill"]:
        waited = f"a prompt waited in {tokens:.0%} of the working time for a step with room for the whole of it"
        return Constraint.PROMPTS, (waited,)
    stalled_s = found.stalled_itl.get("p99", 0.0)
    wanted_s = SchedulerConfig(**found.started.scheduler).itl_slo_s if found.started else None
    bearable_s = max(_STALLED * usual_s, _KEPT * (wanted_s or 0.0))
    if usual_s and stalled_s > bearable_s and len(found.itl) and found.stalled_itl["count"] > 4:
        stall = f"beside prompts a token takes {stalled_s * 1e3:,.1f} ms at the 99th percentile"
        return Constraint.PROMPTS, (
            f"{stall}, otherwise {usual_s * 1e3:,.1f} ms",
            f"a step took up to {found.largest_chunk:,} prompt tokens of one request",
        )
    own = found.own_s / found.busy_s if found.busy_s else 0.0
    if own > _OWN:
        return Constraint.ENGINE, (f"{own:.0%} of the working time is spent outside of the model's operators",)
    if found.busy < 0.5 and tokens < _WAITED:
        return Constraint.NONE, (f"steps ran in {found.busy:.0%} of the time, and nobody waited for long",)
    if found.compute_s > found.memory_s:
        share = found.compute_s / found.busy_s
        return Constraint.COMPUTE, (f"arithmetic binds {share:.0%} of the working time",)
    share = found.memory_s / found.busy_s if found.busy_s else 0.0
    few = f"{found.decodes_per_step:.1f} requests decode in a step"
    return Constraint.BANDWIDTH, (f"reading memory binds {share:.0%} of the working time", few)


def _levers(constraint: Constraint, found: Signals, link_bytes_per_s: float | None) -> tuple[Lever, ...]:
    """What loosens it; nothing that is on already."""
    started = found.started
    if started is None:
        return ()
    scheduler, cache = started.scheduler, started.cache
    levers: list[Lever] = []

    def lever(name: str, flags: str, metric: str, is_exact: bool = True, **settings: Any) -> None:
        levers.append(Lever(name=name, flags=flags, metric=metric, is_exact=is_exact, settings=settings))

    is_naive = scheduler["batching"] == "static" or cache["kv_reservation"] == "contiguous"
    if constraint in (Constraint.KV, Constraint.SLOTS) and is_naive:
        settings = {"batching": "continuous", "kv_reservation": "paged"}
        lever(
            "continuous batching with paged KV", "leave out --batching and --kv-reservation", "output_tok_s", **settings
        )
    if constraint is Constraint.KV:
        more = int(1.5 * started.num_blocks)
        lever("half as much KV memory again", f"--num-kv-blocks {more}", "ttft_p99", num_kv_blocks=more)
        if started.layout["kv_format"] in ("bf16", "f16", "f32"):
            settings: dict[str, Any] = {"kv_cache_dtype": "int8"}
            flags = "--kv-cache-dtype int8"
            if cache["num_kv_blocks"] is not None:  # as many blocks as before would be half of the memory
                more = WhatIf(settings=settings).apply(started).num_blocks
                settings, flags = settings | {"num_kv_blocks": more}, f"{flags} --num-kv-blocks {more}"
            lever("KV in 8 bits", flags, "ttft_p99", is_exact=False, **settings)
    if constraint is Constraint.SLOTS:
        more = 2 * scheduler["max_num_seqs"]
        lever("twice the slots", f"--max-num-seqs {more}", "ttft_p99", max_num_seqs=more)
    if constraint is Constraint.PROMPTS:
        _chunk_levers(lever, found, scheduler, _settings_of_pools(cache, link_bytes_per_s))
    if constraint in (Constraint.COMPUTE, Constraint.BANDWIDTH):
        _step_levers(lever, constraint, found)
    return tuple(levers)


def _chunk_levers(lever: Any, found: Signals, scheduler: dict[str, Any], of_pools: dict[str, Any]) -> None:
    """Chunks, as large as a few usual steps; several sizes, of which the prediction chooses one."""
    has_chunks = scheduler["enable_chunked_prefill"] and scheduler["mixing"] == "mixed"
    for times in _LIMITS:
        limit_s = round(times * found.decode_step.get("p50", 0.02), 4)
        flags = f"--itl-slo {limit_s * 1e3:g}ms"
        if not has_chunks:
            on = {"enable_chunked_prefill": True, "mixing": "mixed"}
            remedy = f"leave out --no-enable-chunked-prefill and --mixing, and give {flags}"
            metric = "itl_max" if found.stalled_itl.get("count") else "ttft_p99"
            lever("chunked prefill", remedy, metric, itl_slo=limit_s, **on)
        elif scheduler.get("itl_slo") is None:
            lever("a limit for the time between tokens", flags, "itl_max", itl_slo=limit_s)
    if has_chunks:
        lever("prefill and decode in two pools", "--prefill 1 --decode 1", "itl_max", **of_pools)


def _settings_of_pools(cache: dict[str, Any], link_bytes_per_s: float | None) -> dict[str, Any]:
    """Of a second machine like this one; empty where its link is not known, or nothing can be handed over."""
    if link_bytes_per_s is None or not cache["enable_prefix_caching"] or cache["kv_check_rate"]:
        return {}
    return {"prefill": 1, "decode": 1, "link_bytes_per_s": link_bytes_per_s}


def _step_levers(lever: Any, constraint: Constraint, found: Signals) -> None:
    """Steps are as long as they are: fewer bytes, or more tokens from each."""
    if constraint is Constraint.BANDWIDTH and found.decodes_per_step < 4:
        lever("speculation", '--speculative-config \'{"method": "ngram"}\'', "tpot_p50")
    lever("weights in 8 bits", "--quantization int8", "tpot_p50", is_exact=False)


def _latest(recording: Recording, num_steps: int) -> Recording:
    """As many of the last requests as fit into the steps that may be simulated, of so many that all would take."""
    requests = recording.requests
    count = max(_FEW, len(requests) * _SIMULATED // max(num_steps, 1))
    if count >= len(requests):
        return recording
    begin_s = requests[-count].arrival.arrival_time_s
    kept = tuple(
        replace(one, arrival=replace(one.arrival, arrival_time_s=one.arrival.arrival_time_s - begin_s))
        for one in requests[-count:]
    )
    return replace(recording, requests=kept)


def _predicted(levers: tuple[Lever, ...], recording: Recording, model: StepTimeModel) -> tuple[Lever, ...]:
    """Each in simulated time, beside the history as it was; what cannot be simulated comes last."""
    before = figures(predict(recording, model, WhatIf()).run)
    found: list[Lever] = []
    for lever in levers:
        if not lever.settings:
            found.append(lever)
            continue
        after = figures(predict(recording, model, WhatIf(settings=lever.settings)).run)
        found.append(
            Lever(
                name=lever.name,
                settings=lever.settings,
                flags=lever.flags,
                metric=lever.metric,
                is_exact=lever.is_exact,
                before=before[lever.metric],
                after=after[lever.metric],
                ttft_before=before["ttft_p50"],
                ttft_after=after["ttft_p50"],
            )
        )
    found = _one_of_each(found)
    return tuple(sorted(found, key=lambda lever: (not (lever.is_exact and lever.gain > _HELPS), -lever.gain)))


def _one_of_each(levers: Sequence[Lever]) -> list[Lever]:
    """Of levers that differ in how far they are pulled, the one that gains most among those whose cost can be borne."""
    sizes: dict[str, list[Lever]] = {}
    for lever in levers:
        sizes.setdefault(lever.name, []).append(lever)
    return [
        max(same, key=lambda lever: (lever.ttft_cost <= _BEARABLE, lever.gain))
        if any(lever.ttft_cost <= _BEARABLE for lever in same)
        else min(same, key=lambda lever: lever.ttft_cost)
        for same in sizes.values()
    ]
