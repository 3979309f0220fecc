"""R9: eviction of the least recently used block, against prefixes that are pinned, on real request traces.

Pinned blocks are evicted after all others. Which ones to pin is the question, so three answers are tried:

    shared by most   blocks in the prompts of more than half of all requests: the system prompt
    hindsight        those that most requests of the whole trace have, half of the cache's size: nobody knows them
    first tenth      the same, counted over the first tenth of the trace: what one could know

The scheduler and the KV accounts are the ones that serve (simulation/), one request at a time, sizes as in R10: a hash
id of the trace is a block of 8 tokens. Shares are of all prompt blocks of the trace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks.reproduce.claim import Claim, ReproduceOptions, Reproduction
from benchmarks.reproduce.r10_prefix_cache import CAPACITIES, PUBLISHED, SMALL
from twostroke.config.cache import CacheConfig
from twostroke.config.layer_spec import KVSpec
from twostroke.config.scheduler import SchedulerConfig
from twostroke.cost.step_model import Curve, StepTimeModel
from twostroke.engine.journal import engine_started
from twostroke.kv_cache.layout import KVLayout
from twostroke.measure.figure import MEASURED, PREDICTED, bars
from twostroke.simulation.requests import SimulatedRequest
from twostroke.simulation.simulate import simulate
from twostroke.simulation.trace import read_trace, requests_of_trace

DIVISOR, BLOCK_SIZE = 64, 8
LRU, SHARED, HINDSIGHT, EARLY = "least recently used", "shared by most", "hindsight", "first tenth"
COLOURS = {LRU: MEASURED, SHARED: "#7c9885", HINDSIGHT: PREDICTED, EARLY: "#3b6ea5"}
LARGEST = 10_000
"""Blocks; with more, little is ever evicted."""
STEP = StepTimeModel(layers=Curve((1,), (1.0,)), head=Curve((1,), (0.0,)), pair_s=0.0, seen_s=0.0)
"""Every step takes a second: what is found does not depend on it, one request at a time."""


def reproduce(options: ReproduceOptions) -> Reproduction:
    """Every capacity with every choice of pins; full traces, or their beginnings."""
    claims: list[Claim] = []
    details: dict[str, Any] = {}
    remarks: list[str] = []
    for trace, published in PUBLISHED.items():
        path = options.traces / f"mooncake_{trace}.jsonl"
        if not path.exists():
            remarks.append(f"{path.name} is not in {options.traces_name}: left out; --traces says where to look")
            continue
        entries = read_trace(path)[: None if options.full else SMALL]
        num_blocks = sum(len(entry.hash_ids) for entry in entries)
        requests, _ = requests_of_trace(entries, block_size=BLOCK_SIZE, divisor=DIVISOR)
        for capacity, known in zip(CAPACITIES, published, strict=True):
            if capacity is None or capacity > LARGEST:
                continue
            pins = _pins(requests, capacity // 2)
            found = {name: _blocks_found(requests, capacity, pinned) for name, pinned in pins.items()}
            share = {name: hits / num_blocks for name, hits in found.items()}
            details[f"{trace}-{capacity}"] = {
                "found": found,
                "share": share,
                "pinned": {name: len(pinned) for name, pinned in pins.items()},
                "published": known,
            }
            what = f"{trace}, {capacity:,} blocks"
            claims.append(Claim.reported(f"{what}, LRU (published)", share[LRU], known if options.full else None))
            hindsight = Claim.at_least(f"{what}, pinned: {HINDSIGHT}", round(share[LRU], 4), share[HINDSIGHT])
            claims.append(hindsight.judged(options.full))
            claims += [Claim.reported(f"{what}, pinned: {name}", share[name]) for name in (SHARED, EARLY)]
    return Reproduction(
        name="pinned-prefixes",
        title="R9: least recently used against pinned prefixes",
        claims=tuple(claims),
        config={"block_size": BLOCK_SIZE},
        workload={"traces": tuple(PUBLISHED), "divisor": DIVISOR, "requests": None if options.full else SMALL},
        details=details,
        remarks=tuple(remarks),
        draw=(lambda figure: _draw(figure, details)) if details else None,
        figure_size=(9.0, 4.0),
    )


def _pins(requests: Sequence[SimulatedRequest], at_most: int) -> dict[str, Sequence[bytes]]:
    """What is pinned, by how it was chosen. A block that only one request has is never worth it."""
    of_all = _uses(requests)
    early = _uses(requests[: len(requests) // 10])
    return {
        LRU: (),
        SHARED: [name for name, uses in of_all.items() if 2 * uses > len(requests)],
        HINDSIGHT: [name for name, uses in of_all.most_common(at_most) if uses > 1],
        EARLY: [name for name, uses in early.most_common(at_most) if uses > 1],
    }


def _uses(requests: Sequence[SimulatedRequest]) -> Counter[bytes]:
    return Counter(name for request in requests for name in request.arrival.block_hashes)


def _blocks_found(requests: Sequence[SimulatedRequest], capacity: int, pinned: Sequence[bytes]) -> int:
    longest = max(one.arrival.num_prompt_tokens + one.arrival.max_tokens for one in requests)
    started = engine_started(
        SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=longest),
        CacheConfig(block_size=BLOCK_SIZE),
        KVLayout.of([KVSpec(num_kv_heads=1, head_dim=1)], block_size=BLOCK_SIZE, kv_format="f32"),
        num_blocks=capacity,
        max_model_len=longest,
        model="",
        now_s=0.0,
    )
    run = simulate(started, requests, STEP, pinned=pinned)
    return sum(one.num_cached_tokens for one in run.requests) // BLOCK_SIZE


def _draw(figure: Any, details: dict[str, Any]) -> None:
    traces = [trace for trace in PUBLISHED if any(name.startswith(trace) for name in details)]
    for axes, trace in zip(figure.subplots(1, len(traces), squeeze=False)[0], traces, strict=True):
        cases = {name.removeprefix(f"{trace}-"): case for name, case in details.items() if name.startswith(trace)}
        groups = {
            name: ([100 * case["share"][name] for case in cases.values()], colour) for name, colour in COLOURS.items()
        }
        bars(axes, [f"{int(capacity):,}" for capacity in cases], groups, f"{trace}: % of prompt blocks found")
        axes.set_xlabel("KV blocks of 8 tokens")
