"""Workloads through a model's engine, with everything that happened."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, field

from benchmarks.reproduce.claim import ReproduceOptions
from twostroke.config.cache import CacheConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.cost.step_model import StepTimeModel
from twostroke.events import Event
from twostroke.measure.drive import drive
from twostroke.measure.model_engine import model_engine
from twostroke.measure.workload import Workload, of_lengths

_WARM_UP = (48, 2)
"""Tokens of prompt and output."""


@dataclass(slots=True)
class _Heard:
    """The events of one engine."""

    events: list[Event] = field(default_factory=list[Event])

    def append(self, event: Event) -> None:
        self.events.append(event)


def recorded(
    options: ReproduceOptions,
    scheduler: SchedulerConfig,
    cache: CacheConfig,
    workload: Workload,
    *,
    max_model_len: int | None = None,
    step_times: StepTimeModel | None = None,
) -> list[Event]:
    """The log of a run.

    Args:
        options: of the command.
        scheduler: its settings.
        cache: its settings.
        workload: what arrives when.
        max_model_len: the context; default: that of the longest request.
        step_times: by which limits of time are kept.
    """
    heard = _Heard()
    load = options.load(max_model_len or max(workload.max_request_tokens, sum(_WARM_UP)))
    with closing(model_engine(load, scheduler, cache, [heard], step_times)) as engine:
        engine.run(of_lengths([_WARM_UP] * 2, vocab_size=options.vocab_size()))
        drive(engine.engine, engine.executor, workload)
    return heard.events
