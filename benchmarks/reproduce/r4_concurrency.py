"""R4: how many requests run at once in the same bytes of KV memory, paged against contiguous.

Contiguous: bytes / room for the longest request. Paged: bytes / mean length of a live request. So the ratio is
max_len / mean_len, less what waits at the head of the queue for room that is not there yet.
"""

from __future__ import annotations

from typing import Any

from benchmarks.counting_engine import counting_engine
from benchmarks.reproduce.claim import Claim, ReproduceOptions, Reproduction
from benchmarks.reproduce.r3_kv_waste import BLOCK_SIZE, Reservation
from benchmarks.reproduce.skewed import Residence, skewed_workloads
from twostroke.config.cache import CacheConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.measure.figure import MEASURED, PREDICTED, bars
from twostroke.measure.report import percentiles
from twostroke.measure.workload import Workload
from twostroke.served_run import Run

LONGEST_THAT_FIT = 8
"""Requests of the greatest length for which there is KV memory."""


def reproduce(options: ReproduceOptions) -> Reproduction:
    """Predicts from the lengths, then counts running requests while somebody waits for KV memory."""
    claims: list[Claim] = []
    details: dict[str, Any] = {}
    workloads = skewed_workloads(options)
    for name, workload in workloads.items():
        residence = Residence.of(workload, BLOCK_SIZE)
        blocks_of_longest = -(-residence.max_len // BLOCK_SIZE)
        num_blocks = LONGEST_THAT_FIT * blocks_of_longest
        # the mean over requests and steps of what is filled, by what it takes to hold it
        predicted = residence.max_len / (residence.mean_len / (1 - residence.paged_waste))
        running = {kind: _running(_run(workload, kind, num_blocks)) for kind in ("paged", "contiguous")}
        mean = {kind: percentiles(counts)["mean"] for kind, counts in running.items()}
        claims += [
            Claim.within(f"{name}: running at once, contiguous", LONGEST_THAT_FIT, mean["contiguous"], 1e-9),
            Claim.within(
                f"{name}: running at once, paged / contiguous", predicted, mean["paged"] / mean["contiguous"], 0.2
            ),
            Claim.at_least(f"{name}: most at once, paged / contiguous", 5.0, max(running["paged"]) / LONGEST_THAT_FIT),
        ]
        details[name] = {
            "num_blocks": num_blocks,
            "max_len": residence.max_len,
            "mean_len": residence.mean_len,
            "max_over_mean": residence.max_len / residence.mean_len,
            "running": {kind: percentiles(counts) for kind, counts in running.items()},
        }
    return Reproduction(
        name="r4",
        title="R4: requests running at once in equal KV memory",
        claims=tuple(claims),
        config={"block_size": BLOCK_SIZE, "longest_that_fit": LONGEST_THAT_FIT},
        workload={name: workload.description for name, workload in workloads.items()},
        details=details,
        remarks=()
        if "trace" in workloads
        else (f"no trace in {options.traces_name}: only the imitated workload was run",),
        draw=lambda figure: _draw(figure, details, claims),
    )


def _run(workload: Workload, kind: Reservation, num_blocks: int) -> Run:
    scheduler = SchedulerConfig(max_num_seqs=4096, max_num_batched_tokens=1 << 20)
    cache = CacheConfig(
        block_size=BLOCK_SIZE, num_kv_blocks=num_blocks, enable_prefix_caching=False, kv_reservation=kind
    )
    engine = counting_engine(scheduler, cache, max_model_len=workload.max_request_tokens)
    return engine.run(workload, progress=f"R4, {kind}")


def _running(run: Run) -> list[float]:
    """Requests in each step in which somebody waited."""
    return [s.num_seqs for s in run.steps if s.num_waiting]


def _draw(figure: Any, details: dict[str, Any], claims: list[Claim]) -> None:
    ratios = [claim for claim in claims if claim.rule.startswith("within") and "/" in claim.what]
    groups = {
        "predicted: max / mean length": ([claim.predicted or 0.0 for claim in ratios], PREDICTED),
        "measured": ([claim.measured for claim in ratios], MEASURED),
    }
    bars(figure.add_subplot(), list(details), groups, "requests at once, paged / contiguous")
