"""The real engine with an executor that only counts, in simulated time: one step is one second.

It serves for step counts, KV accounting and trace replays at full size. Everything else is the real engine; only the
model's numbers are missing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from twostroke.batch import NewRequest, RequestResult, ScheduledBatch, StepResult
from twostroke.config.cache import CacheConfig
from twostroke.config.layer_spec import KVSpec, LayerSpec
from twostroke.config.rope import DEFAULT_ROPE_THETA, RopeConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.cost.step_cost import ModelShape
from twostroke.engine.engine import Engine
from twostroke.engine.event_sinks import JsonlEventLog
from twostroke.engine.journal import Journal, engine_started
from twostroke.events import EventLog
from twostroke.kv_cache.layout import KVLayout
from twostroke.kv_cache.manager import KVCacheManager
from twostroke.kv_check import KVCheck, KVDifference
from twostroke.measure.model_engine import RecordingExecutor, drive
from twostroke.measure.workload import Workload
from twostroke.scheduler.scheduler import Scheduler
from twostroke.served_run import Run


class SimulatedClock:
    """Clock that only advances explicitly."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Advance the clock."""
        assert seconds >= 0, f"time cannot go back by {-seconds} s"
        self.now_s += seconds


class CountingExecutor:
    """Executor that samples the same token for every request at once.

    Args:
        token_id: that token.
        clock: advanced by `step_time_s` when a step's result is collected; None: no clock.
        step_time_s: duration of a step in simulated time.
    """

    max_in_flight = 1

    def __init__(self, token_id: int = 1, *, clock: SimulatedClock | None = None, step_time_s: float = 1.0) -> None:
        self._token_ids = (token_id,)
        self._clock = clock
        self._step_time_s = step_time_s
        self._results: deque[StepResult] = deque()

    def add_request(self, request: NewRequest) -> None:
        """Do nothing."""

    def submit(self, batch: ScheduledBatch) -> None:
        """Make the result at once: one token for each request that samples."""
        made = (RequestResult(r.request_id, self._token_ids if r.samples_token else ()) for r in batch.requests)
        self._results.append(StepResult(batch.step, tuple(made)))

    def collect(self) -> StepResult:
        if self._clock is not None:
            self._clock.advance(self._step_time_s)
        return self._results.popleft()

    def check_kv(self, check: KVCheck, token_ids: Sequence[int]) -> tuple[KVDifference, ...] | None:
        """Return no differences, since nothing is stored."""
        del check, token_ids
        return ()

    def close(self) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class CountingEngine:
    """An engine without a model, with access to its parts."""

    engine: Engine
    executor: RecordingExecutor
    kv: KVCacheManager
    clock: SimulatedClock

    def run(self, workload: Workload, *, progress: str | None = None) -> Run:
        """Run a workload to its end; times of the run are in steps."""
        return drive(self.engine, self.executor, workload, clock=self.clock, wait=self.clock.advance, progress=progress)


def counting_engine(
    scheduler: SchedulerConfig,
    cache: CacheConfig,
    *,
    max_model_len: int,
    event_log: Path | EventLog | None = None,
    at_submit: Callable[[KVCacheManager], None] | None = None,
    specs: Sequence[KVSpec] = (KVSpec(num_kv_heads=1, head_dim=1),),
    step_time_s: float = 1.0,
) -> CountingEngine:
    """Build an engine that counts.

    Args:
        scheduler: as for any engine.
        cache: as for any engine; without num_kv_blocks every running request fits at its longest.
        max_model_len: longest prompt plus output.
        event_log: a file for the event log, or an object that receives every event.
        at_submit: called with the KV memory's account when a step is decided.
        specs: KV of each layer of its model.
        step_time_s: duration of a step in simulated time.
    """
    layers = tuple(
        LayerSpec(num_heads=1, kv=spec, rope=RopeConfig(DEFAULT_ROPE_THETA), intermediate_size=1) for spec in specs
    )
    layout = KVLayout.of(specs, block_size=cache.block_size, kv_format="bf16")
    shape = ModelShape(hidden_size=1, vocab_size=1, layers=layers, bytes_per_weight=2, kv_format="bf16")
    num_blocks = cache.num_kv_blocks or layout.run_blocks(max_model_len) * scheduler.max_num_seqs
    kv = KVCacheManager(layout, num_blocks, cache, max_model_len)
    clock = SimulatedClock()

    def look(_: ScheduledBatch) -> None:
        if at_submit is not None:
            at_submit(kv)

    executor = RecordingExecutor(CountingExecutor(clock=clock, step_time_s=step_time_s), look)
    started = engine_started(
        scheduler,
        cache,
        layout,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        model="none: an executor that counts",
        now_s=clock(),
    )
    file = JsonlEventLog(event_log) if isinstance(event_log, Path) else None
    listeners = () if event_log is None or isinstance(event_log, Path) else (event_log,)
    engine = Engine(
        Scheduler(scheduler, kv, max_model_len=max_model_len),
        executor,
        block_size=layout.block_size,
        hashes_blocks=cache.enable_prefix_caching,
        journal=Journal(started, shape, file, listeners),
        clock=clock,
    )
    return CountingEngine(engine, executor, kv, clock)


def batching(mode: str, num_slots: int) -> tuple[SchedulerConfig, CacheConfig]:
    """Return the settings of an engine with static or continuous batching and without a prefix cache."""
    scheduler = SchedulerConfig(max_num_seqs=num_slots, batching="static" if mode == "static" else "continuous")
    return scheduler, CacheConfig(enable_prefix_caching=False)


def count_slots(mode: str, num_slots: int, workload: Workload, title: str) -> Run:
    """Run a workload with static or continuous batching, to count the slots of each step."""
    engine = counting_engine(*batching(mode, num_slots), max_model_len=workload.max_request_tokens)
    return engine.run(workload, progress=title)
