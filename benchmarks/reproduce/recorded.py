"""Workloads through a model's engine, with all events, and the same workloads in simulated time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, fields, replace
from typing import Any

from benchmarks.claim import ReproduceOptions
from twostroke.config.cache import CacheConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.cost.step_cost import Layers
from twostroke.cost.step_fit import fit_step_model
from twostroke.cost.step_model import StepTimeModel
from twostroke.events import Event
from twostroke.measure.from_log import run_from_log
from twostroke.measure.model_engine import drive, model_engine
from twostroke.measure.steps import measure_steps
from twostroke.measure.workload import Workload, workload_of_lengths
from twostroke.model.model_files import find_model
from twostroke.served_run import Run
from twostroke.simulation.requests import read_recording
from twostroke.simulation.simulate import simulate


@dataclass(frozen=True, slots=True)
class FittedSteps:
    """Step times of a model on this machine, measured just before."""

    model: StepTimeModel
    layers: Layers

    @classmethod
    def measured(
        cls,
        options: ReproduceOptions,
        scheduler: SchedulerConfig,
        cache: CacheConfig | None = None,
        *,
        repeats: int = 10,
    ) -> FittedSteps:
        """Time steps of all sizes, in contexts of up to 2,048 tokens, and fit a model to them; see `measure_steps`."""
        load = options.load(min(2048, find_model(options.model).config().max_context))
        found = measure_steps(load, scheduler, cache or CacheConfig(), repeats=repeats)
        return cls(fit_step_model(found.steps), found.layers)

    def seconds(self, shares: Iterable[tuple[int, int, int]]) -> float:
        """Return the seconds of a step, from each request's computed tokens, query tokens and rows of logits."""
        return self.model.seconds(self.layers.work(shares))


_WARM_UP = (48, 2)
"""Prompt and output tokens of the warm-up requests."""


def with_values(values: Mapping[str, Any], *configs: Any) -> tuple[Any, ...]:
    """Return configs with these values, each in the config that has the field."""
    known = [{field.name for field in fields(config)} for config in configs]
    unknown = values.keys() - set().union(*known)
    assert not unknown, f"no setting is called {unknown}"
    return tuple(
        replace(config, **{name: value for name, value in values.items() if name in names})
        for config, names in zip(configs, known, strict=True)
    )


def recorded(
    options: ReproduceOptions,
    scheduler: SchedulerConfig,
    cache: CacheConfig,
    workload: Workload,
    *,
    max_model_len: int | None = None,
    step_times: StepTimeModel | None = None,
) -> list[Event]:
    """Return the log of a run.

    Args:
        options: of the command.
        scheduler: its settings.
        cache: its settings.
        workload: requests and their arrivals.
        max_model_len: the context; default: that of the longest request.
        step_times: model that keeps time limits.
    """
    events: list[Event] = []
    load = options.load(max_model_len or max(workload.max_request_tokens, sum(_WARM_UP)))
    with closing(model_engine(load, scheduler, cache, [events], step_times)) as engine:
        engine.run(workload_of_lengths([_WARM_UP] * 2, vocab_size=options.vocab_size()))
        drive(engine.engine, engine.executor, workload)
    return events


def served(
    options: ReproduceOptions,
    scheduler: SchedulerConfig,
    cache: CacheConfig,
    workload: Workload,
    *,
    warm_up: Workload | None = None,
    title: str | None = None,
) -> Run:
    """Return the run of a workload through its own engine.

    Args:
        options: of the command.
        scheduler: its settings.
        cache: its settings.
        workload: requests and their arrivals.
        warm_up: workload to run before.
        title: of a progress bar.
    """
    with closing(model_engine(options.load(workload.max_request_tokens), scheduler, cache)) as engine:
        if warm_up is not None:
            engine.run(warm_up)
        return engine.run(workload, progress=title)


def serve_and_simulate(
    options: ReproduceOptions,
    config: SchedulerConfig,
    workload: Workload,
    step_times: StepTimeModel,
    num_kv_blocks: int | None = None,
) -> tuple[Run, Run]:
    """Return the measured run and the predicted one.

    Args:
        options: of the command.
        config: of the scheduler.
        workload: requests and their arrivals.
        step_times: fitted on this machine.
        num_kv_blocks: of 16 tokens; default: as many as all requests need together.
    """
    needed = sum(-(-request.num_tokens // 16) + 1 for request in workload.requests)
    cache = CacheConfig(enable_prefix_caching=False, num_kv_blocks=num_kv_blocks or needed)
    events = recorded(options, config, cache, workload, step_times=step_times)
    recording = read_recording(events)
    return run_from_log(events), simulate(recording.started, recording.requests, step_times)
