"""Random schedules of every format of weights and KV and every kind of router, at every level of the processor.

    bits      the hash of each answer, in each schedule, equals the hash of the request alone
    levels    the best level of this processor runs all schedules; each lower one the first of them

Formats, routers and levels are run in processes of their own, as many at once as --threads says.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from benchmarks.claim import Claim, MissingHardware, ReproduceOptions, Reproduction
from benchmarks.schedules.fuzzer import AnswersAlone, FuzzOutcome, run_schedules
from benchmarks.schedules.requests import LONG_PROMPTS, MAX_MODEL_LEN, MAX_TOKENS, MOST_AT_ONCE, NUM_SHORT, PERIOD
from benchmarks.schedules.subjects import SUBJECTS
from twostroke.hardware import Hardware
from twostroke.kernels import native

NUM_BEST = {True: 1000, False: 2}
"""Schedules of each subject at the best level, by whether the size is full."""
NUM_LOWER = {True: 100, False: 0}
"""Schedules of each subject at each lower level."""
_MOST_SHOWN = 5
"""Differing answers of a subject that the result shows."""


@dataclass(frozen=True, slots=True)
class FuzzTask:
    """Schedules of one subject at one level."""

    subject: int
    """Place in `SUBJECTS`."""
    level: str
    num_schedules: int


@dataclass(frozen=True, slots=True)
class FuzzResult:
    """Counts and findings of a task."""

    task: FuzzTask
    hash: str
    """Hash of the answers of all requests alone."""
    outcome: FuzzOutcome

    def as_json(self) -> dict[str, Any]:
        """Return the result with the names of its subject."""
        subject, counts = SUBJECTS[self.task.subject], asdict(self.outcome)
        differing = counts.pop("differing")
        return {
            "kind": subject.kind,
            "name": subject.name,
            "level": self.task.level,
            **counts,
            "hash": self.hash,
            "num_differing": len(differing),
            "differing": differing[:_MOST_SHOWN],
        }


def run_task(task: FuzzTask) -> FuzzResult:
    """Write the subject's model, and run its schedules at the level."""
    subject = SUBJECTS[task.subject]
    settings = {**subject.settings, "kernels": task.level}
    with tempfile.TemporaryDirectory() as folder:
        model = str(subject.write(Path(folder)))
        alone = AnswersAlone.of(model, settings, subject.window)
        return FuzzResult(
            task, alone.hash, run_schedules(model, alone, range(task.num_schedules), settings, subject.drafts)
        )


def reproduce(options: ReproduceOptions) -> Reproduction:
    """Run all schedules: 1,000 of each subject at the best level in full, otherwise two."""
    levels = native.levels()
    if not levels:
        raise MissingHardware("the native kernels were not built, and only they have levels of the processor.")
    most = dict.fromkeys(levels, NUM_LOWER[options.full]) | {levels[-1]: NUM_BEST[options.full]}
    tasks = [
        FuzzTask(subject, level, most[level])
        for level in reversed(levels)
        if most[level]
        for subject in range(len(SUBJECTS))
    ]
    num_processes = options.threads or Hardware.of_this_machine().cores
    found = sorted(_results(tasks, num_processes), key=lambda result: tasks.index(result.task))
    return Reproduction(
        claims=tuple(_claims(found, most)),
        config={"levels": levels, "processes": num_processes},
        workload={
            "schedules_of_each": most,
            "requests": NUM_SHORT + len(LONG_PROMPTS),
            "max_model_len": MAX_MODEL_LEN,
            "most_tokens": MAX_TOKENS,
            "long_prompts": LONG_PROMPTS,
            "most_at_once": MOST_AT_ONCE,
            "period": PERIOD,
        },
        details={"subjects": [result.as_json() for result in found]},
    )


def _results(tasks: Sequence[FuzzTask], num_processes: int) -> Iterator[FuzzResult]:
    total = sum(task.num_schedules for task in tasks)
    with (
        tqdm(total=total, desc="schedules", unit="schedule", disable=None, leave=False) as bar,
        ProcessPoolExecutor(num_processes, get_context("spawn")) as pool,
    ):
        for future in as_completed([pool.submit(run_task, task) for task in tasks]):
            result = future.result()
            bar.set_postfix_str(f"{SUBJECTS[result.task.subject].name}, {result.task.level}")
            bar.update(result.task.num_schedules)
            yield result


def _claims(found: Sequence[FuzzResult], most: dict[str, int]) -> Iterator[Claim]:
    """Claim for each kind of subject and each level that no answer differs."""
    for level, num_schedules in reversed(most.items()):
        of_level = [one for one in found if one.task.level == level]
        for kind, words in (("weights", "formats of weights"), ("KV", "formats of KV"), ("router", "routers")):
            those = [one.outcome for one in of_level if SUBJECTS[one.task.subject].kind == kind]
            what = f"differing answers at {level}, {len(those)} {words} with {num_schedules:,} schedules each"
            if those:
                yield Claim.equal(what, 0, sum(len(one.differing) for one in those))
    outcomes = [one.outcome for one in found]
    run = sum(one.num_schedules for one in outcomes)
    yield Claim.equal("schedules", sum(one.task.num_schedules for one in found), run)
    yield Claim.reported("answers compared", sum(one.num_answers for one in outcomes))
    yield Claim.reported("preemptions", sum(one.num_preemptions for one in outcomes))
    yield Claim.reported("tokens found in the prefix cache", sum(one.num_cached_tokens for one in outcomes))
    hashes: dict[int, set[str]] = defaultdict(set)
    for one in found:
        hashes[one.task.subject].add(one.hash)
    same = sum(len(of_subject) == 1 for of_subject in hashes.values())
    yield Claim.reported("subjects with the same answers at every level", same)
