"""Loads that are bound by different things; the doctor names a lever for each, and then it is pulled.

a run with a fault ──► diagnose ──► lever, its metric as predicted ──► the same run with the lever ──► as measured
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from benchmarks.reproduce.claim import Claim, ReproduceOptions, Reproduction
from benchmarks.reproduce.recorded import recorded
from twostroke.config.cache import CacheConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.cost.step_fit import fit_step_model
from twostroke.cost.step_model import StepTimeModel
from twostroke.events import Event
from twostroke.measure.figure import MEASURED, PREDICTED, bars
from twostroke.measure.from_log import run_of_log
from twostroke.measure.report import median
from twostroke.measure.workload import Workload, of_lengths, with_arrivals
from twostroke.planner.doctor import diagnose
from twostroke.planner.replay import figures
from twostroke.simulation.observed import observed_steps

GOAL = 0.3
"""Of the predicted change."""
CONTEXT = 576


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A load on an engine, and the lever that it wants."""

    lever: str
    workload: Workload
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    cache: CacheConfig = field(default_factory=lambda: CacheConfig(enable_prefix_caching=False, num_kv_blocks=1200))

    def with_settings(self, settings: dict[str, Any]) -> Case:
        """The same load on another engine."""
        of_scheduler = {one.name for one in fields(SchedulerConfig)}
        return replace(
            self,
            scheduler=replace(self.scheduler, **{n: v for n, v in settings.items() if n in of_scheduler}),
            cache=replace(self.cache, **{n: v for n, v in settings.items() if n not in of_scheduler}),
        )


def reproduce(options: ReproduceOptions) -> Reproduction:
    """Diagnoses every load, pulls the lever, and compares."""
    title = "The doctor's levers, pulled"
    if not options.with_model:
        remarks = ("times need a model: nothing was run",)
        return Reproduction(name="doctor", title=title, claims=(), config={}, workload={}, remarks=remarks)
    rounds = 5 if options.full else 1
    claims: list[Claim] = []
    details: dict[str, Any] = {}
    for name, make in CASES.items():
        case = make(options.vocab_size(), options.full)
        runs = [_pulled(options, case) for _ in range(rounds)]
        details[name] = runs
        claims += _claims(name, case, runs, full=options.full)
    return Reproduction(
        name="doctor",
        title=title,
        claims=tuple(claims),
        config={"model": options.model_name, "context": CONTEXT},
        workload=dict.fromkeys(CASES, "see the source"),
        details=details,
        draw=lambda figure: _draw(figure, details),
        repeats=rounds,
    )


def _pulled(options: ReproduceOptions, case: Case) -> dict[str, Any]:
    log = _run(options, case)
    begin_s = time.perf_counter()
    found = diagnose(log)
    took_s = time.perf_counter() - begin_s
    best = found.levers[0] if found.levers else None
    row: dict[str, Any] = {
        "constraint": found.constraint.value,
        "evidence": found.evidence,
        "lever": best.name if best else None,
        "diagnosed_s": took_s,
        "num_events": len(log),
    }
    if best is None or not best.settings or not best.before or not best.after:
        return row
    was = figures(run_of_log(log))[best.metric]
    step_times = fit_step_model(observed_steps(log))
    after = _run(options, case.with_settings(best.settings), step_times)
    really = figures(run_of_log(after))[best.metric]
    return row | {
        "flags": best.flags,
        "metric": best.metric,
        "was": was,
        "predicted": was * best.after / best.before,
        "really": really,
    }


def _run(options: ReproduceOptions, case: Case, step_times: StepTimeModel | None = None) -> list[Event]:
    return recorded(options, case.scheduler, case.cache, case.workload, max_model_len=CONTEXT, step_times=step_times)


def _claims(name: str, case: Case, runs: list[dict[str, Any]], *, full: bool) -> list[Claim]:
    right = sum(run["lever"] == case.lever for run in runs)
    claims = [
        Claim.equal(f"{name}: runs that name {case.lever!r}", len(runs), right).judged(full),
        Claim.at_most(f"{name}: seconds to a diagnosis", 1.0, max(run["diagnosed_s"] for run in runs)).judged(full),
    ]
    pulled = [run for run in runs if "really" in run]
    if pulled:
        was, predicted, really = (median([run[key] for run in pulled]) for key in ("was", "predicted", "really"))
        words = f"{name}: change of {pulled[0]['metric']}, times"
        # a change is predicted, so the change is what is compared
        claims.append(Claim.within(words, predicted / was - 1, really / was - 1, GOAL).judged(full))
    return claims


def _naive(vocab_size: int, full: bool) -> Case:
    """Static batches, and memory for the longest request each."""
    lengths = [(48, 8 + 31 * (i % 9)) for i in range(96 if full else 24)]
    return Case(
        lever="continuous batching with paged KV",
        workload=of_lengths(lengths, vocab_size=vocab_size),
        scheduler=SchedulerConfig(batching="static", max_num_seqs=16),
        cache=CacheConfig(kv_reservation="contiguous", enable_prefix_caching=False, num_kv_blocks=16 * 36),
    )


def _little_memory(vocab_size: int, full: bool) -> Case:
    """Long answers in little KV memory."""
    return Case(
        lever="half as much KV memory again",
        workload=of_lengths([(32, 96)] * (96 if full else 20), vocab_size=vocab_size),
        scheduler=SchedulerConfig(max_num_seqs=32),
        cache=CacheConfig(enable_prefix_caching=False, num_kv_blocks=40),
    )


def _few_slots(vocab_size: int, full: bool) -> Case:
    """More requests than slots."""
    lengths = [(32, 96)] * (80 if full else 24)
    return Case(
        lever="twice the slots",
        workload=with_arrivals(of_lengths(lengths, vocab_size=vocab_size), [0.01 * i for i in range(len(lengths))]),
        scheduler=SchedulerConfig(max_num_seqs=4),
    )


def _long_prompts(vocab_size: int, full: bool, *, scheduler: SchedulerConfig, lever: str) -> Case:
    """Some decode, and long prompts come in between."""
    count = 6 if full else 4  # as many as come while the others decode; the doctor needs 10 requests in all
    lengths = [(16, 500)] * 6 + [(540, 4)] * count
    arrivals = [0.0] * 6 + [0.3 + 0.3 * i for i in range(count)]
    return Case(
        lever=lever,
        workload=with_arrivals(of_lengths(lengths, vocab_size=vocab_size), arrivals),
        scheduler=scheduler,
    )


def _whole_prompts(vocab_size: int, full: bool) -> Case:
    scheduler = SchedulerConfig(enable_chunked_prefill=False)
    return _long_prompts(vocab_size, full, scheduler=scheduler, lever="chunked prefill")


def _large_chunks(vocab_size: int, full: bool) -> Case:
    scheduler = SchedulerConfig(max_num_batched_tokens=512)
    return _long_prompts(vocab_size, full, scheduler=scheduler, lever="a limit for the time between tokens")


CASES: dict[str, Callable[[int, bool], Case]] = {
    "naive": _naive,
    "little memory": _little_memory,
    "few slots": _few_slots,
    "whole prompts": _whole_prompts,
    "large chunks": _large_chunks,
}


def _draw(figure: Any, details: dict[str, list[dict[str, Any]]]) -> None:
    axes = figure.add_subplot()
    pulled = {name: [run for run in runs if "really" in run] for name, runs in details.items()}
    names = [name for name, runs in pulled.items() if runs]

    def times(key: str) -> list[float]:
        """Of the metric without the lever."""
        return [median([run[key] / run["was"] for run in pulled[name]]) for name in names]

    labels = [f"{name}\n{pulled[name][0]['metric']}" for name in names]
    bars(axes, labels, {"measured": (times("really"), MEASURED), "predicted": (times("predicted"), PREDICTED)}, "times")
    axes.axhline(1.0, color="black", linewidth=0.6, linestyle=":")
