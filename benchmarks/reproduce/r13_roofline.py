"""R13: the roofline of decode. A step that makes one token of one request reads every weight and its KV once.

Predicted is what must be read over the bandwidth measured in the same run. Measured is TPOT at several contexts. The
claim is that the measured limits hold. Where a step is faster than they allow, the limits are raised to fit it; the
claim's figure is the factor (1: they hold). The share of the floor that is reached is reported.
"""

from __future__ import annotations

import torch

from benchmarks.reproduce.claim import Claim, ReproduceOptions, Reproduction
from twostroke.config.cache import CacheConfig
from twostroke.config.load import LoadConfig
from twostroke.hardware import Hardware
from twostroke.kernels.dispatch import operators_for
from twostroke.measure.figure import MEASURED, PREDICTED, bar_chart
from twostroke.measure.limits import measure_limits
from twostroke.measure.sweep.run import SweepOptions, measure_sweep
from twostroke.model.model_files import find_model

_LARGEST_CACHE = 1 << 29
"""Bytes; a model that caches hold may well be faster than memory."""


def reproduce_roofline(options: ReproduceOptions) -> Reproduction:
    """Sweeps over contexts."""
    config = find_model(options.model).config()
    threads = options.threads or Hardware.of_this_machine().cores
    lengths = "64,256,512" if options.full else "16,32,64"
    sweep_options = SweepOptions(
        prompt_lengths=lengths, contexts=lengths, batch_sizes="1", batch_context=16, steps=24 if options.full else 6
    )
    operators = operators_for(torch.device("cpu"), getattr(torch, config.dtype))
    before = measure_limits(operators, threads)
    load = LoadConfig(model=options.model, threads=threads)
    sweep = measure_sweep(sweep_options, load, CacheConfig(enable_prefix_caching=False), config.max_context)
    limits = before.best_of(measure_limits(operators, threads))
    measured = limits.of(config.dtype)
    machine = sweep.raised(measured)
    floors = {point.context: point.floor_s(machine) for point in sweep.by_context}
    in_memory = all(point.cost.weight_bytes > _LARGEST_CACHE for point in sweep.by_context)
    # a small model's weights stay in the caches, so memory bandwidth is no bound
    is_judged = options.full and in_memory and not limits.is_estimate
    raised = machine.bytes_per_s / measured.bytes_per_s
    claims = [Claim.at_most("bandwidth that steps show, over the measured", 1.0, raised, 1.0).judged(is_judged)]
    for point in sweep.by_context:
        what = f"TPOT at context {point.context}, ms"
        floor_ms = 1e3 * floors[point.context]
        claims.append(Claim.reported(what, 1e3 * point.tpot_s, floor_ms))
        claims.append(
            Claim.reported(f"share of the floor at context {point.context}", floors[point.context] / point.tpot_s)
        )
    return Reproduction(
        claims=tuple(claims),
        config={"model": options.model_name, "dtype": config.dtype, "threads": threads},
        workload={"contexts": lengths, "batch": 1},
        details={"limits": limits.as_json()},
        remarks=_remarks(in_memory=in_memory, is_estimate=limits.is_estimate),
        draw=bar_chart(
            [str(context) for context in floors],
            {
                "floor": ([1e3 * floor_s for floor_s in floors.values()], PREDICTED),
                "measured": ([1e3 * point.tpot_s for point in sweep.by_context], MEASURED),
            },
            "TPOT, ms",
            "context",
        ),
    )


def _remarks(*, in_memory: bool, is_estimate: bool) -> tuple[str, ...]:
    remarks = () if in_memory else ("caches may hold this model: the floor of memory is reported, not claimed",)
    busy = "others were at work while the machine was measured: its limits are an estimate, reported, not claimed"
    return (*remarks, busy) if is_estimate else remarks
