"""Mutated files of models, templates, logs, calibrations and batches: each ends in one of our errors, or is accepted.

typed      nothing but our own errors, and no process that ends
time       of each file, from its first byte to the error, or to an engine that has loaded it
memory     that reading it took, and all of the process that a template ran in
"""

from __future__ import annotations

from collections import Counter

from tqdm.auto import tqdm

from benchmarks.growth import MB
from benchmarks.reproduce.claim import Claim, ReproduceOptions, Reproduction
from benchmarks.reproduce.hostile_cases import Case, cases
from benchmarks.reproduce.hostile_kinds import KINDS

MOST_S = 2.0
MOST_MB = 500.0
_NUMBERS = {"template": 2500, "gguf": 2000, "safetensors": 1000, "config.json": 1000, "tokenizer.json": 1000}
"""Of the kinds that hold most; of each other there is an equal share of what is left of 10,000."""
_TOTAL = 10_000
_SMALL_SHARE = 50
"""A quick look reads every fiftieth."""


def reproduce(options: ReproduceOptions) -> Reproduction:
    """Reads them all."""
    title = "mutated files of every kind that comes from elsewhere"
    if not options.with_model:
        remarks = ("it loads models: nothing was run",)
        return Reproduction(name="hostile-files", title=title, claims=(), config={}, workload={}, remarks=remarks)
    others = (_TOTAL - sum(_NUMBERS.values())) // (len(KINDS) - len(_NUMBERS)) + 1
    numbers = {kind: _NUMBERS.get(kind, others) // (1 if options.full else _SMALL_SHARE) for kind in KINDS}
    found: list[Case] = []
    with tqdm(total=sum(numbers.values()), desc="files", disable=None, leave=False) as bar:
        for kind, number in numbers.items():
            for case in cases(kind, options.seed * _TOTAL, number):
                found.append(case)
                bar.update()
    wrong = [case for case in found if case.outcome.startswith("!")]
    slowest = max(found, key=lambda case: case.seconds)
    largest = max(found, key=lambda case: case.num_bytes)
    claims = (
        Claim.equal("files read", sum(numbers.values()), len(found)),
        Claim.equal("that ended in another error than ours, or never", 0, len(wrong)),
        Claim.at_most("seconds, the slowest", MOST_S, slowest.seconds).judged(options.full),
        Claim.at_most("MB, the largest", MOST_MB, largest.num_bytes / MB).judged(options.full),
        Claim.reported("templates that were stopped", sum("stopped" in case.outcome for case in found)),
    )
    return Reproduction(
        name="hostile-files",
        title=title,
        claims=claims,
        config={},
        workload={"files": numbers, "seed": options.seed},
        details={
            "kinds": {kind: _of_kind([case for case in found if case.kind == kind]) for kind in KINDS},
            "wrong": [f"{case.kind} {case.seed}: {case.outcome}" for case in wrong],
            "slowest": f"{slowest.kind} {slowest.seed}",
            "largest": f"{largest.kind} {largest.seed}",
        },
    )


def _of_kind(found: list[Case]) -> dict[str, object]:
    return {
        "outcomes": dict(Counter(case.outcome for case in found)),
        "most_seconds": round(max(case.seconds for case in found), 3),
        "most_mb": round(max(case.num_bytes for case in found) / MB, 1),
        "seconds": round(sum(case.seconds for case in found), 1),
    }
