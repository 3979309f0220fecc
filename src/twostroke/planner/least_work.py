"""An upper bound of goodput without a simulation: the workers' time over the least possible work of requests. Pure.

    requests a second  <=  workers x m / (least seconds of the m smallest requests)     m: how many must keep the limits

The least work of a request is its tokens at the best rate of any step (layers(n) / n), and what its decodes read.
Prompt tokens that some other request may have left in the prefix cache count nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from twostroke.cost.step_cost import Layers
from twostroke.cost.step_model import Curve, StepTimeModel
from twostroke.events import EngineStarted
from twostroke.planner.placement import LatencyLimits, num_that_must_keep
from twostroke.scheduler.replay import layers_of
from twostroke.simulation.requests import SimulatedRequest


def goodput_bound(
    requests: Sequence[SimulatedRequest],
    started: EngineStarted,
    step_times: StepTimeModel,
    limits: LatencyLimits,
    *,
    num_workers: int,
) -> float:
    """Return requests a second within the limits that workers cannot pass.

    Args:
        requests: requests of the workload.
        started: start-up event of each worker.
        step_times: step times of each worker.
        limits: limits that requests must keep.
        num_workers: number of workers that compute at once.
    """
    block_size: int = started.layout["block_size"]
    longest_prompt = max(request.arrival.num_prompt_tokens for request in requests)
    most = max(started.scheduler["max_num_batched_tokens"], longest_prompt)
    token_s = least_seconds_per_token(step_times.layers, most)
    seen = Counter(name for request in requests for name in set(request.arrival.block_hashes))
    seen.update(name for request in requests for name in request.output_hashes)
    layers = layers_of(started)
    least = sorted(_least_s(request, block_size, token_s, step_times, layers, seen) for request in requests)
    num_must = num_that_must_keep(len(least), limits)
    total_s = sum(least[:num_must])
    return num_workers * num_must / total_s if total_s > 0 else float("inf")


def least_seconds_per_token(curve: Curve, most: int) -> float:
    """Return the least of seconds(n) / n for n from 1 to `most`.

    Between two points of a curve seconds(n) / n rises or falls throughout, so the least is at a point or at the end.

    >>> least_seconds_per_token(Curve((1, 100), (1.0, 2.0)), 50) == Curve((1, 100), (1.0, 2.0)).at(50) / 50
    True
    """
    counts = {1, most, *(count for count in curve.counts if count <= most)}
    return min(curve.at(count) / count for count in counts)


def _least_s(
    request: SimulatedRequest,
    block_size: int,
    token_s: float,
    step_times: StepTimeModel,
    layers: Layers,
    seen: Counter[bytes],
) -> float:
    arrival = request.arrival
    num_shared = 0
    for name in arrival.block_hashes:
        if seen[name] < 2:
            break
        num_shared += 1
    num_prompt = max(1, arrival.num_prompt_tokens - num_shared * block_size)
    num_decodes = max(0, request.num_outputs - 1)
    reads = layers.work([(arrival.num_prompt_tokens, 1, 1)]).num_seen * num_decodes
    return (num_prompt + num_decodes) * token_s + reads * step_times.seen_s
