"""The engine around a real model, for benchmarks: token ids in, times out, no text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from twostroke.batch import ScheduledBatch
from twostroke.config.cache import CacheConfig
from twostroke.config.engine import EngineConfig
from twostroke.config.load import LoadConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.cost.step_model import StepTimeModel
from twostroke.engine.engine import Engine
from twostroke.events import EventLog
from twostroke.measure.drive import RecordingExecutor, drive
from twostroke.measure.workload import Workload
from twostroke.runner.executor import Executor
from twostroke.served_run import Run
from twostroke.startup.assembly import build_engine


@dataclass(frozen=True, slots=True)
class ModelEngine:
    """An engine with a model, with its parts within reach."""

    engine: Engine
    executor: RecordingExecutor
    startup_lines: tuple[str, ...]

    def run(self, workload: Workload, *, progress: str | None = None) -> Run:
        """Runs a workload to its end."""
        return drive(self.engine, self.executor, workload, progress=progress)

    def close(self) -> None:
        """Gives back the model's and the cache's memory."""
        self.engine.close()


def model_engine(
    load: LoadConfig,
    scheduler: SchedulerConfig | None = None,
    cache: CacheConfig | None = None,
    listeners: Sequence[EventLog] = (),
    step_times: StepTimeModel | None = None,
    at_submit: Callable[[ScheduledBatch], None] | None = None,
) -> ModelEngine:
    """Loads a model.

    Args:
        load: which model; with max_model_len and without a size of the KV cache there is room for every running request
            at its longest, and no more, so that several engines fit side by side.
        scheduler: as for any engine.
        cache: as for any engine.
        listeners: hear every event.
        step_times: what limits of time are kept by, where the scheduler has some.
        at_submit: called with each batch before it is computed.
    """
    scheduler, cache = scheduler or SchedulerConfig(), cache or CacheConfig()
    if load.max_model_len is not None and cache.num_kv_blocks is None and cache.kv_cache_memory is None:
        blocks_each = -(-load.max_model_len // cache.block_size)
        cache = replace(cache, num_kv_blocks=blocks_each * scheduler.max_num_seqs)
    recorders: list[RecordingExecutor] = []

    def record(executor: Executor) -> Executor:
        recorders.append(RecordingExecutor(executor, at_submit))
        return recorders[-1]

    config = EngineConfig(load=load, cache=cache, scheduler=scheduler)
    built = build_engine(config, around_executor=record, listeners=listeners, step_times=step_times)
    return ModelEngine(built.engine, recorders[0], built.facts.startup_lines)
