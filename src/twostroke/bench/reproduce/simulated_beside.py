"""A workload through a model's engine, and the same in simulated time."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, field

from twostroke.bench.drive import drive
from twostroke.bench.model_engine import model_engine
from twostroke.bench.reproduce.claim import ReproduceOptions
from twostroke.bench.workload import Workload, of_lengths
from twostroke.config.cache import CacheConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.cost.step_model import StepTimeModel
from twostroke.events import Event
from twostroke.served_run import Run
from twostroke.simulation.requests import recording_of
from twostroke.simulation.simulate import simulate


@dataclass(slots=True)
class _Heard:
    """The events of one engine."""

    events: list[Event] = field(default_factory=list[Event])

    def append(self, event: Event) -> None:
        self.events.append(event)


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
    heard = _Heard()
    needed = sum(-(-request.num_tokens // 16) + 1 for request in workload.requests)
    cache = CacheConfig(enable_prefix_caching=False, num_kv_blocks=num_kv_blocks or needed)
    load = options.load(workload.max_request_tokens)
    with closing(model_engine(load, config, cache, [heard], step_times)) as engine:
        engine.run(of_lengths([(64, 2)] * 2, vocab_size=options.vocab_size()))
        run = drive(engine.engine, engine.executor, workload)
    recording = recording_of(heard.events)
    return run, simulate(recording.started, recording.requests, step_times)
