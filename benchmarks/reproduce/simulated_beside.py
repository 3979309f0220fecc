"""A workload through a model's engine, and the same in simulated time."""

from __future__ import annotations

from benchmarks.reproduce.claim import ReproduceOptions
from benchmarks.reproduce.recorded import recorded
from twostroke.config.cache import CacheConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.cost.step_model import StepTimeModel
from twostroke.measure.from_log import run_of_log
from twostroke.measure.workload import Workload
from twostroke.served_run import Run
from twostroke.simulation.requests import recording_of
from twostroke.simulation.simulate import simulate


def serve_and_simulate(
    options: ReproduceOptions,
    config: SchedulerConfig,
    workload: Workload,
    step_times: StepTimeModel,
    num_kv_blocks: int | None = None,
) -> tuple[Run, Run]:
    """As it was, and as it was predicted.

    Args:
        options: of the command.
        config: of the scheduler.
        workload: what arrives when.
        step_times: fitted on this machine.
        num_kv_blocks: of 16 tokens; default: as many as all requests take together.
    """
    needed = sum(-(-request.num_tokens // 16) + 1 for request in workload.requests)
    cache = CacheConfig(enable_prefix_caching=False, num_kv_blocks=num_kv_blocks or needed)
    events = recorded(options, config, cache, workload, step_times=step_times)
    recording = recording_of(events)
    return run_of_log(events), simulate(recording.started, recording.requests, step_times)
