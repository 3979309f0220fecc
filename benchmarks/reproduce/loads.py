"""Five loads on a real engine, and the doctor's verdict on each: the right lever, or nothing to do.

    a run with a user's settings ──► event log ──► diagnose ──► constraint and first lever ──► right or wrong

Verdicts do not depend on the machine's speed or its other work, so small runs are judged, too.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

from benchmarks.reproduce.claim import Claim, ReproduceOptions, Reproduction
from benchmarks.reproduce.recorded import recorded, with_values
from twostroke.config.cache import CacheConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.cost.step_model import StepTimeModel
from twostroke.events import Event
from twostroke.measure.workload import Workload, of_lengths, with_arrivals
from twostroke.planner.constraint import Constraint
from twostroke.planner.doctor import Diagnosis, diagnose
from twostroke.planner.show_doctor import diagnosis_json

ROUNDS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorLoad:
    """A load on an engine, and its correct verdict."""

    lever: str | None
    """Name of the first lever to offer; None: there is nothing to do."""
    constraint: Constraint | None = None
    """None: the verdict is the lever alone."""
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
        requests = of_lengths(self.lengths, vocab_size=vocab_size)
        return with_arrivals(requests, self.arrivals_s) if self.arrivals_s else requests

    def recorded(
        self,
        options: ReproduceOptions,
        settings: Mapping[str, Any] = MappingProxyType({}),
        step_times: StepTimeModel | None = None,
    ) -> list[Event]:
        """Run it, with other settings of the scheduler and the cache where given, and return its log."""
        scheduler, cache = with_values(settings, self.scheduler, self.cache)
        workload = self.workload(options.vocab_size())
        return recorded(options, scheduler, cache, workload, max_model_len=self.context, step_times=step_times)

    def is_right(self, found: Diagnosis) -> bool:
        """Return whether this is the correct verdict, without advice where there is nothing to do."""
        lever = found.levers[0].name if found.levers else None
        is_quiet = self.lever is not None or not (found.to_measure or found.faults)
        return (found.constraint, lever) == (self.constraint, self.lever) and is_quiet


LOADS: dict[str, DoctorLoad] = {
    "too little KV": DoctorLoad(
        constraint=Constraint.KV,
        lever="half as much KV memory again",
        context=256,
        lengths=((32, 96),) * 14,
        scheduler=SchedulerConfig(max_num_seqs=32),
        cache=CacheConfig(num_kv_blocks=18),
    ),
    "too few slots": DoctorLoad(
        constraint=Constraint.SLOTS,
        lever="twice the slots",
        context=512,
        lengths=((16, 40),) * 24,
        arrivals_s=tuple(0.02 * i for i in range(24)),
        scheduler=SchedulerConfig(max_num_seqs=2),
    ),
    "mixed long prompts": DoctorLoad(
        constraint=Constraint.PROMPTS,
        lever="a limit for the time between tokens",
        context=1024,
        lengths=((24, 240),) * 8 + ((700, 4),) * 5,
        arrivals_s=(0.0,) * 8 + tuple(1.0 + 1.5 * i for i in range(5)),
    ),
    "compute-bound short outputs": DoctorLoad(
        constraint=Constraint.COMPUTE, lever=None, context=512, lengths=((300, 3),) * 24
    ),
    "idle": DoctorLoad(  # two requests at a time: while one decodes, the prompt of the other is computed
        constraint=Constraint.NONE,
        lever=None,
        context=512,
        lengths=((48, 6),) * 12,
        arrivals_s=tuple(10.0 * (i // 2) + 0.1 * (i % 2) for i in range(12)),
    ),
}


def reproduce(options: ReproduceOptions) -> Reproduction:
    """Run every load, in turn and once or five times, and diagnose each log."""
    rounds = ROUNDS if options.full else 1
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in LOADS}
    for _ in range(rounds):  # in turn, so that a slow period of the machine affects all loads
        for name, load in LOADS.items():
            rows[name].append(_verdict(options, load))
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
