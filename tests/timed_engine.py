"""The real engine without a model, in simulated time: its steps take what a model of step times says."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from benchmarks.counting_engine import CountingExecutor, SimulatedClock
from factories import uniform_layout, uniform_shape
from twostroke.batch import ScheduledBatch, StepResult
from twostroke.config.cache import CacheConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.cost.step_cost import Layers, MachineLimits
from twostroke.cost.step_model import Curve, StepTimeModel
from twostroke.engine.engine import Engine
from twostroke.engine.journal import Journal, engine_started
from twostroke.events import Event
from twostroke.kv_cache.manager import KVCacheManager
from twostroke.measure.model_engine import RecordingExecutor, drive
from twostroke.measure.workload import Workload
from twostroke.scheduler.scheduler import Scheduler

STEP_TIMES = StepTimeModel(
    layers=Curve((1, 16, 512), (0.020, 0.022, 0.420)), head=Curve((1, 64), (0.002, 0.006)), pair_s=5e-8, seen_s=1e-7
)
SHAPE = uniform_shape(
    hidden_size=1024,
    intermediate_size=3072,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=32000,
    windows=(None,) * 4,
    bytes_per_weight=2,
)
LIMITS = MachineLimits(flops_per_s=2e11, bytes_per_s=2e10)


class _TimedExecutor(CountingExecutor):
    """Takes as long as it should; a little more or less, where there is noise."""

    def __init__(
        self,
        clock: SimulatedClock,
        layers: Layers,
        step_times: StepTimeModel,
        noise: float,
        own_s: float,
        slow_steps: Mapping[int, float],
    ) -> None:
        super().__init__()
        self._slow_steps, self._num_collected = slow_steps, 0
        self._time, self._layers, self._step_times = clock, layers, step_times
        self._noise, self._own_s, self._dice = noise, own_s, random.Random(0)
        self._seconds: list[float] = []

    def submit(self, batch: ScheduledBatch) -> None:
        self._seconds.append(self._step_times.seconds(self._layers.work_of(batch)))
        super().submit(batch)

    def collect(self) -> StepResult:
        seconds = self._seconds.pop(0) * (1 + self._noise * self._dice.random())
        seconds *= self._slow_steps.get(self._num_collected, 1.0)
        self._num_collected += 1
        self._time.advance(seconds + self._own_s)
        return replace(super().collect(), operator_time_s=seconds)


class Listener:
    """Keeps every event."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def append(self, event: Event) -> None:
        self.events.append(event)


def history(
    workload: Workload,
    scheduler: SchedulerConfig | None = None,
    cache: CacheConfig | None = None,
    *,
    num_blocks: int = 1024,
    max_model_len: int = 2048,
    step_times: StepTimeModel = STEP_TIMES,
    noise: float = 0.0,
    own_s: float = 0.0,
    slow_steps: Mapping[int, float] | None = None,
    tenants: Sequence[str] = (),
    memory_bytes: Callable[[float], int] | None = None,
) -> list[Event]:
    """The log of a workload.

    `noise` is how much longer a step may take by chance, `own_s` its seconds outside of the model, `slow_steps` factors
    on the times of some steps, by their numbers. Of `tenants` there is one per request, by default the same for all.
    `memory_bytes` is what the process takes at a time.
    """
    scheduler, cache = scheduler or SchedulerConfig(), cache or CacheConfig()
    layout = uniform_layout(SHAPE.windows, block_size=cache.block_size, num_kv_heads=8, head_dim=128, kv_format="bf16")
    kv = KVCacheManager(layout, num_blocks, cache, max_model_len)
    clock, layers, listener = SimulatedClock(), Layers(SHAPE.windows), Listener()
    executor = RecordingExecutor(_TimedExecutor(clock, layers, step_times, noise, own_s, slow_steps or {}))
    started = engine_started(
        scheduler, cache, layout, num_blocks=num_blocks, max_model_len=max_model_len, model="none", now_s=clock()
    )
    started = replace(started, machine=LIMITS, step_times=step_times if scheduler.has_slo else None)
    sampled = None if memory_bytes is None else lambda: memory_bytes(clock())
    engine = Engine(
        Scheduler(scheduler, kv, max_model_len=max_model_len, step_times=step_times, layers=layers),
        executor,
        block_size=cache.block_size,
        hashes_blocks=cache.enable_prefix_caching,
        journal=Journal(started, SHAPE, None, [listener], sampled),
        clock=clock,
    )
    if tenants:
        add, names = engine.add_request, iter(tenants)
        engine.add_request = lambda request: add(replace(request, tenant=next(names)))  # type: ignore[method-assign]
    drive(engine, executor, workload, clock=clock, wait=clock.advance)
    return listener.events
