"""R3: KV memory that is allocated and holds nothing, paged against contiguous, sampled at every step.

Contiguous reservation gives everybody room for the longest request: 1 - mean/max of it is empty. Paged memory wastes
only the unfilled end of each request's last block: about 7.5 slots of 16.
"""

from __future__ import annotations

from typing import Any, Literal

from benchmarks.counting_engine import counting_engine
from benchmarks.reproduce.claim import Claim, ReproduceOptions, Reproduction
from benchmarks.reproduce.skewed import Residence, skewed_workloads
from twostroke.config.cache import CacheConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.kv_cache.manager import KVCacheManager
from twostroke.measure.figure import MEASURED, PREDICTED, bars
from twostroke.measure.workload import Workload

BLOCK_SIZE = 16
NUM_SEQS = 32
Reservation = Literal["paged", "contiguous"]


class WasteSampler:
    """Adds up the bytes of used blocks, and those that hold something, over all steps."""

    def __init__(self) -> None:
        self.allocated = self.used = 0

    def __call__(self, kv: KVCacheManager) -> None:
        usage = kv.usage()
        self.allocated += usage.allocated_bytes
        self.used += usage.filled_bytes

    @property
    def waste(self) -> float:
        """Share of the allocated bytes that held nothing."""
        return 1 - self.used / self.allocated


def reproduce(options: ReproduceOptions) -> Reproduction:
    """Predicts from the lengths alone, then counts."""
    claims: list[Claim] = []
    details: dict[str, Any] = {}
    workloads = skewed_workloads(options)
    for name, workload in workloads.items():
        residence = Residence.of(workload, BLOCK_SIZE)
        measured = {kind: _measure(workload, kind) for kind in ("paged", "contiguous")}
        rule_of_thumb = (BLOCK_SIZE - 1) / 2 / residence.mean_len
        claims += [
            Claim.within(f"{name}: paged, predicted to the slot", residence.paged_waste, measured["paged"], 1e-9),
            Claim.at_most(f"{name}: paged, predicted as 7.5 / mean", 0.04, measured["paged"], rule_of_thumb),
            Claim.within(f"{name}: contiguous", residence.contiguous_waste, measured["contiguous"], 1e-9),
            Claim.at_least(f"{name}: contiguous, of max_model_len", 0.60, measured["contiguous"]),
        ]
        details[name] = {"mean_len": residence.mean_len, "max_len": residence.max_len, "waste": measured}
    return Reproduction(
        name="r3",
        title="R3: share of allocated KV slots that hold nothing",
        claims=tuple(claims),
        config={"block_size": BLOCK_SIZE, "max_num_seqs": NUM_SEQS},
        workload={name: workload.description for name, workload in workloads.items()},
        details=details,
        remarks=()
        if "trace" in workloads
        else (f"no trace in {options.traces_name}: only the imitated workload was run",),
        draw=lambda figure: _draw(figure, claims),
        figure_size=(9.0, 4.0),
    )


def _measure(workload: Workload, kind: Reservation) -> float:
    sampler = WasteSampler()
    # every prompt in one step, so that a request's tokens are known from its age
    scheduler = SchedulerConfig(max_num_seqs=NUM_SEQS, enable_chunked_prefill=False)
    cache = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=False, kv_reservation=kind)
    engine = counting_engine(scheduler, cache, max_model_len=workload.max_request_tokens, at_submit=sampler)
    engine.run(workload, progress=f"R3, {kind}")
    return sampler.waste


def _draw(figure: Any, claims: list[Claim]) -> None:
    shown = [claim for claim in claims if claim.predicted is not None]
    groups = {
        "predicted": ([claim.predicted or 0.0 for claim in shown], PREDICTED),
        "measured": ([claim.measured for claim in shown], MEASURED),
    }
    labels = [claim.what.replace(": ", "\n").replace(", ", ",\n") for claim in shown]
    bars(figure.add_subplot(), labels, groups, "share of allocated slots that is empty")
