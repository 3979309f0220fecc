"""The planner's statements about recorded runs, compared with runs: the doctor's verdicts and levers, and what-ifs.

Five loads on a real engine, and the doctor's verdict on each: the right lever, or nothing to do.

    a run with a user's settings ──► event log ──► diagnose ──► constraint and first lever ──► right or wrong

Verdicts do not depend on the machine's speed or its other work, so small runs are judged, too.

Loads with different bottlenecks; the doctor names a lever for each, which is then applied.

a run with a fault ──► diagnose ──► lever, its metric as predicted ──► the same run with the lever ──► as measured

What-ifs on a recorded run, and then the runs that they predict.

One run is recorded with the default settings. From its log alone, each what-if is predicted as `twostroke replay LOG
--set …` does: step times fitted to the log's own steps, the scheduler in simulated time. Then each is really run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

from benchmarks.alternating import alternate, medians
from benchmarks.claim import Claim, MissingHardware, ReproduceOptions, Reproduction
from benchmarks.reproduce.recorded import recorded, with_values
from twostroke.config.cache import CacheConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.cost.step_fit import fit_step_model
from twostroke.cost.step_model import StepTimeModel
from twostroke.events import Event
from twostroke.measure.figure import Draw, bar_chart, bars
from twostroke.measure.from_log import run_from_log
from twostroke.measure.report import median
from twostroke.measure.workload import Lengths, Workload, with_arrivals, workload_of_lengths
from twostroke.planner.constraint import Binding
from twostroke.planner.doctor import Diagnosis, diagnose
from twostroke.planner.replay import figures, replay_log
from twostroke.planner.show_doctor import diagnosis_json
from twostroke.simulation.observed import observed_steps
from twostroke.simulation.settings import WhatIf

ROUNDS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorLoad:
    """A load on an engine, and its correct verdict."""

    lever: str | None
    """Name of the first lever to offer; None: there is nothing to do."""
    constraint: Binding | None = None
    """Constraint in the verdict; None: the verdict is the lever alone."""
    context: int
    """Tokens of the longest request that the engine accepts."""
    lengths: tuple[tuple[int, int], ...]
    """Tokens of prompt and output of each request."""
    arrivals_s: tuple[float, ...] = ()
    """Arrival of each request; empty: all arrive at once."""
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)

    def workload(self, vocab_size: int) -> Workload:
        """Return the requests, with tokens of a vocabulary."""
        requests = workload_of_lengths(self.lengths, vocab_size=vocab_size)
        return with_arrivals(requests, self.arrivals_s) if self.arrivals_s else requests

    def recorded(
        self,
        options: ReproduceOptions,
        settings: Mapping[str, Any] = MappingProxyType({}),
        step_times: StepTimeModel | None = None,
    ) -> list[Event]:
        """Run it, with the given settings of the scheduler and the cache changed, and return its log."""
        scheduler, cache = with_values(settings, self.scheduler, self.cache)
        workload = self.workload(options.vocab_size())
        return recorded(options, scheduler, cache, workload, max_model_len=self.context, step_times=step_times)

    def is_right(self, found: Diagnosis) -> bool:
        """Return whether this is the correct verdict, without advice if there is nothing to do."""
        lever = found.levers[0].name if found.levers else None
        is_quiet = self.lever is not None or not (found.to_measure or found.faults)
        return (found.constraint, lever) == (self.constraint, self.lever) and is_quiet


LOADS: dict[str, DoctorLoad] = {
    "too little KV": DoctorLoad(
        constraint=Binding.KV,
        lever="half as much KV memory again",
        context=256,
        lengths=((32, 96),) * 14,
        scheduler=SchedulerConfig(max_num_seqs=32),
        cache=CacheConfig(num_kv_blocks=18),
    ),
    "too few slots": DoctorLoad(
        constraint=Binding.SLOTS,
        lever="twice the slots",
        context=512,
        lengths=((16, 40),) * 24,
        arrivals_s=tuple(0.02 * i for i in range(24)),
        scheduler=SchedulerConfig(max_num_seqs=2),
    ),
    "mixed long prompts": DoctorLoad(
        constraint=Binding.PROMPTS,
        lever="a limit for the time between tokens",
        context=1024,
        lengths=((24, 240),) * 8 + ((700, 4),) * 5,
        arrivals_s=(0.0,) * 8 + tuple(1.0 + 1.5 * i for i in range(5)),
    ),
    "compute-bound short outputs": DoctorLoad(
        constraint=Binding.COMPUTE, lever=None, context=512, lengths=((300, 3),) * 24
    ),
    "idle": DoctorLoad(  # two requests at a time: while one decodes, the prompt of the other is computed
        constraint=Binding.NONE,
        lever=None,
        context=512,
        lengths=((48, 6),) * 12,
        arrivals_s=tuple(10.0 * (i // 2) + 0.1 * (i % 2) for i in range(12)),
    ),
}


def reproduce(options: ReproduceOptions) -> Reproduction:
    """Run every load, alternating, once or five times, and diagnose each log."""
    rounds = ROUNDS if options.full else 1
    rows = alternate(rounds, LOADS, lambda name, _: _verdict(options, LOADS[name]))
    return Reproduction(
        claims=tuple(_claim(name, LOADS[name], of_load) for name, of_load in rows.items()),
        config={"model": options.model_name, "rounds": rounds},
        workload={name: asdict(load) for name, load in LOADS.items()},
        details={"verdicts": rows},
        repeats=rounds,
    )


def _verdict(options: ReproduceOptions, load: DoctorLoad) -> dict[str, Any]:
    begin_s = time.perf_counter()
    log = load.recorded(options)
    run_s = time.perf_counter() - begin_s
    found = diagnose(log)
    return {
        "is_right": load.is_right(found),
        **{name: value for name, value in diagnosis_json(found).items() if name != "signals"},
        "busy": found.signals.busy,
        "run_s": run_s,
        "diagnosed_s": time.perf_counter() - begin_s - run_s,
    }


def _claim(name: str, load: DoctorLoad, rows: list[dict[str, Any]]) -> Claim:
    verdict = load.lever or "nothing to do"
    constraint = load.constraint.value if load.constraint else None
    words = f"{name}: runs whose verdict is {constraint!r}, {verdict!r}"
    return Claim.equal(words, len(rows), sum(row["is_right"] for row in rows))


GOAL = 0.3
"""Largest error as a share of the predicted change."""
CONTEXT = 576


def reproduce_levers(options: ReproduceOptions) -> Reproduction:
    """Diagnose every load, apply the lever, and compare."""
    rounds = ROUNDS if options.full else 1
    cases = _cases(full=options.full)
    details = {name: [_pulled(options, load) for _ in range(rounds)] for name, load in cases.items()}
    return Reproduction(
        claims=tuple(c for name, load in cases.items() for c in _claims(name, load, details[name], full=options.full)),
        config={"model": options.model_name, "context": CONTEXT},
        workload=dict.fromkeys(cases, "see the source"),
        details=details,
        draw=_chart(details),
        repeats=rounds,
    )


def _pulled(options: ReproduceOptions, load: DoctorLoad) -> dict[str, Any]:
    log = load.recorded(options)
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
    was = figures(run_from_log(log))[best.metric]
    step_times = fit_step_model(observed_steps(log))
    after = load.recorded(options, best.settings, step_times)
    really = figures(run_from_log(after))[best.metric]
    return row | {
        "flags": best.flags,
        "metric": best.metric,
        "was": was,
        "predicted": was * best.after / best.before,
        "really": really,
    }


def _claims(name: str, load: DoctorLoad, runs: list[dict[str, Any]], *, full: bool) -> Iterator[Claim]:
    right = sum(run["lever"] == load.lever for run in runs)
    yield Claim.equal(f"{name}: runs that name {load.lever!r}", len(runs), right).judged(full)
    slowest_s = max(run["diagnosed_s"] for run in runs)
    yield Claim.at_most(f"{name}: seconds to a diagnosis", 1.0, slowest_s).judged(full)
    pulled = [run for run in runs if "really" in run]
    if pulled:
        of = medians(pulled, ("was", "predicted", "really"))
        words = f"{name}: change of {pulled[0]['metric']}, times"
        # the prediction is a change, so changes are compared
        yield Claim.within(words, of["predicted"] / of["was"] - 1, of["really"] / of["was"] - 1, GOAL).judged(full)


def _cases(*, full: bool) -> dict[str, DoctorLoad]:
    room = CacheConfig(enable_prefix_caching=False, num_kv_blocks=1200)
    slots = SchedulerConfig(max_num_seqs=4)
    num_waiting = 80 if full else 24
    num_long = (
        6 if full else 4
    )  # as many as arrive while the other requests decode; the doctor needs 10 requests in all
    long_prompts: dict[str, Any] = {
        "context": CONTEXT,
        "lengths": ((16, 500),) * 6 + ((540, 4),) * num_long,
        "arrivals_s": (0.0,) * 6 + tuple(0.3 + 0.3 * i for i in range(num_long)),
        "cache": room,
    }
    return {
        "naive": DoctorLoad(  # static batches, and memory for the longest request each
            lever="continuous batching with paged KV",
            context=CONTEXT,
            lengths=tuple((48, 8 + 31 * (i % 9)) for i in range(96 if full else 24)),
            scheduler=SchedulerConfig(batching="static", max_num_seqs=16),
            cache=CacheConfig(kv_reservation="contiguous", enable_prefix_caching=False, num_kv_blocks=16 * 36),
        ),
        "little memory": DoctorLoad(
            lever="half as much KV memory again",
            context=CONTEXT,
            lengths=((32, 96),) * (96 if full else 20),
            scheduler=SchedulerConfig(max_num_seqs=32),
            cache=CacheConfig(enable_prefix_caching=False, num_kv_blocks=40),
        ),
        "few slots": DoctorLoad(
            lever="twice the slots",
            context=CONTEXT,
            lengths=((32, 96),) * num_waiting,
            arrivals_s=tuple(0.01 * i for i in range(num_waiting)),
            scheduler=slots,
            cache=room,
        ),
        "whole prompts": DoctorLoad(
            lever="chunked prefill", scheduler=SchedulerConfig(enable_chunked_prefill=False), **long_prompts
        ),
        "large chunks": DoctorLoad(
            lever="a limit for the time between tokens",
            scheduler=SchedulerConfig(max_num_batched_tokens=512),
            **long_prompts,
        ),
    }


def _chart(details: dict[str, list[dict[str, Any]]]) -> Draw:
    pulled = {name: kept for name, runs in details.items() if (kept := [run for run in runs if "really" in run])}
    # times the metric without the lever
    times = {
        words: [median([run[key] / run["was"] for run in runs]) for runs in pulled.values()]
        for words, key in (("predicted", "predicted"), ("measured", "really"))
    }
    labels = [f"{name}\n{runs[0]['metric']}" for name, runs in pulled.items()]
    return bar_chart(labels, times, "times", lines=(1.0,))


SLOTS = 16
WHAT_IFS: dict[str, dict[str, Any]] = {
    "as recorded": {},
    "budget 128": {"max_num_batched_tokens": 128},
    "budget 2048": {"max_num_batched_tokens": 2048},
    "4 slots": {"max_num_seqs": 4},
    "little KV": {"num_kv_blocks": 160},
    "no chunks": {"enable_chunked_prefill": False},
    "static": {"batching": "static"},
}
COMPARED = {"itl_p99": "p99 ITL ms", "output_tok_s": "tokens/s", "ttft_p50": "median TTFT ms"}
MAX_ERROR = 0.2
"""Largest error of p99 ITL and throughput."""


def reproduce_what_ifs(options: ReproduceOptions) -> Reproduction:
    """Record, predict and run, round by round."""
    count, rounds = (96, 3) if options.full else (16, 1)
    # all at once, so that throughput is the engine's
    workload = options.drawn(count, Lengths.uniform(16, 480), Lengths.uniform(8, 96))
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in WHAT_IFS}
    predicted: dict[str, list[dict[str, Any]]] = {name: [] for name in WHAT_IFS}
    speeds: list[float] = []
    refusals: list[str] = []
    for round_number in range(1, rounds + 1):
        log = _log_of(options, workload, {})
        asked = [WhatIf(settings=settings) for settings in WHAT_IFS.values()]
        replayed = replay_log(log, asked)
        assert replayed.difference is None, f"a batch was decided differently: {replayed.difference}"
        if replayed.refusal:
            refusals.append(f"round {round_number} was left out: {replayed.refusal}")
            continue
        for name, guess in zip(WHAT_IFS, replayed.what_ifs, strict=True):
            predicted[name].append(figures(guess.run))
            speeds.append(guess.speed)
        for name, settings in WHAT_IFS.items():
            found[name].append(figures(run_from_log(_log_of(options, workload, settings))))
    if len(refusals) == rounds:
        raise MissingHardware(refusals[-1])
    middle, guesses = ({name: medians(runs, COMPARED) for name, runs in of.items()} for of in (found, predicted))
    return Reproduction(
        claims=(
            *_claims_of_what_ifs(middle, guesses, full=options.full),
            Claim.reported("simulated s in a s", median(speeds)),
        ),
        config={"model": options.model_name, "slots": SLOTS, "what_ifs": WHAT_IFS},
        workload=dict(workload.description),
        details={"measured": middle, "predicted": guesses, "rounds": found},
        draw=lambda figure: _draw_what_ifs(figure, middle, guesses),
        figure_size=(10.0, 4.0),
        repeats=rounds,
        remarks=tuple(refusals),
    )


def _log_of(options: ReproduceOptions, workload: Workload, settings: dict[str, Any]) -> list[Event]:
    scheduler, cache = with_values(
        settings,
        SchedulerConfig(max_num_seqs=SLOTS),
        CacheConfig(enable_prefix_caching=False, num_kv_blocks=SLOTS * 36),
    )
    return recorded(options, scheduler, cache, workload, max_model_len=576)


def _claims_of_what_ifs(
    middle: dict[str, dict[str, float]], guesses: dict[str, dict[str, float]], *, full: bool
) -> list[Claim]:
    claims: list[Claim] = []
    for name in WHAT_IFS:
        for key, words in COMPARED.items():
            scale = 1.0 if key == "output_tok_s" else 1e3
            guess, measured = guesses[name][key] * scale, middle[name][key] * scale
            claim = Claim.within(f"{words}, {name}", guess, measured, MAX_ERROR)
            claims.append(claim.judged(full and key != "ttft_p50"))
    return claims


def _draw_what_ifs(figure: Any, middle: dict[str, dict[str, float]], guesses: dict[str, dict[str, float]]) -> None:
    for place, (key, words) in enumerate(COMPARED.items(), 1):
        axes = figure.add_subplot(1, len(COMPARED), place)
        scale = 1.0 if key == "output_tok_s" else 1e3
        both = {"predicted": guesses, "measured": middle}
        groups = {name: [of[key] * scale for of in figures.values()] for name, figures in both.items()}
        bars(axes, [name.replace(" ", "\n") for name in middle], groups, words)
        axes.tick_params(axis="x", labelsize=6)
