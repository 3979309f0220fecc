"""Engine with a real model, for benchmarks: token ids in, times out, no text.

`drive` runs a workload on any engine and records every step and the time of every token.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tqdm.auto import tqdm

from twostroke.batch import NewRequest, ScheduledBatch, StepResult
from twostroke.config.cache import CacheConfig
from twostroke.config.engine import EngineConfig
from twostroke.config.load import LoadConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.cost.step_model import StepTimeModel
from twostroke.engine.clock import Clock, monotonic_clock
from twostroke.engine.engine import Engine
from twostroke.engine.generation import GenerationRequest
from twostroke.events import EventLog
from twostroke.kv_check import KVCheck, KVDifference
from twostroke.measure.workload import Workload, WorkloadRequest
from twostroke.outputs import RequestTimes
from twostroke.runner.model_runner import Executor
from twostroke.sampling_params import SamplingParams
from twostroke.served_run import Run, ServedRequest, StepSample
from twostroke.startup.assembly import build_engine

Wait = Callable[[float], None]
"""Function that waits for this many seconds."""


class RecordingExecutor:
    """Executor that wraps another one and records its last batch and result.

    Args:
        inner: the wrapped executor.
        at_submit: called with each decided batch before it is accounted for, so that KV memory can be inspected
        before requests that end in this step release theirs.
    """

    def __init__(self, inner: Executor, at_submit: Callable[[ScheduledBatch], None] | None = None) -> None:
        self._inner = inner
        self._at_submit = at_submit
        self._submitted: deque[ScheduledBatch] = deque()
        self._collected: tuple[ScheduledBatch, StepResult] | None = None
        self.num_runs = 0
        """Number of workloads driven so far; part of the request ids, which must be unique in an engine."""

    @property
    def max_in_flight(self) -> int:
        return self._inner.max_in_flight

    def add_request(self, request: NewRequest) -> None:
        self._inner.add_request(request)

    def submit(self, batch: ScheduledBatch) -> None:
        if self._at_submit is not None:
            self._at_submit(batch)
        self._submitted.append(batch)
        self._inner.submit(batch)

    def collect(self) -> StepResult:
        result = self._inner.collect()
        self._collected = (self._submitted.popleft(), result)
        return result

    def check_kv(self, check: KVCheck, token_ids: Sequence[int]) -> tuple[KVDifference, ...] | None:
        return self._inner.check_kv(check, token_ids)

    def pop_collected(self) -> tuple[ScheduledBatch, StepResult] | None:
        """Return the last collected batch and its result, if collected since the last call."""
        collected, self._collected = self._collected, None
        return collected

    def close(self) -> None:
        self._inner.close()


def drive(
    engine: Engine,
    executor: RecordingExecutor,
    workload: Workload,
    *,
    clock: Clock = monotonic_clock,
    wait: Wait = time.sleep,
    progress: str | None = None,
) -> Run:
    """Run a workload to its end; requests arrive at their times even if the engine cannot keep up (open loop).

    Args:
        engine: an idle engine.
        executor: the executor that the engine was built with.
        workload: the requests with their arrival times; all at zero means a saturated queue.
        clock: the engine's clock.
        wait: waits if the engine is idle until the next arrival.
        progress: title of a progress bar; None shows none.
    """
    engine.begin_measurement()
    start_s = clock()
    executor.num_runs += 1
    pending = deque(enumerate(workload.requests))
    served: dict[str, ServedRequest] = {}
    steps: list[StepSample] = []
    with tqdm(
        total=workload.num_output_tokens, desc=progress, unit="tok", disable=None if progress else True, leave=False
    ) as bar:
        while pending or engine.has_work:
            now_s = clock() - start_s
            while pending and pending[0][1].arrival_s <= now_s:
                index, request = pending.popleft()
                request_id = f"{executor.num_runs}-{index}"
                served[request_id] = ServedRequest(request_id, RequestTimes(request.arrival_s))
                engine.add_request(_generation_request(request_id, request, start_s))
            if not engine.has_work:
                wait(pending[0][1].arrival_s - now_s)
                continue
            bar.update(_step(engine, executor, served, steps, clock, start_s))
    return Run(tuple(served.values()), tuple(steps), clock() - start_s)


def _step(
    engine: Engine,
    executor: RecordingExecutor,
    served: dict[str, ServedRequest],
    steps: list[StepSample],
    clock: Clock,
    start_s: float,
) -> int:
    """Run one step and record its results; return the number of tokens generated."""
    begin_s = time.perf_counter()
    updates = engine.step()
    wall_s = time.perf_counter() - begin_s
    collected = executor.pop_collected()
    if collected is not None:
        batch, result = collected
        end_s = clock() - start_s
        steps.append(StepSample.of(batch, end_s=end_s, wall_s=wall_s, operator_s=result.operator_time_s))
    num_tokens = 0
    for update in updates:
        request = served[update.request_id]
        times = request.times
        times.token_times_s.extend([update.time_s - start_s] * len(update.token_ids))
        status = update.status
        if status is not None:
            assert status.error is None, f"request {update.request_id} failed: {status.error}"
            assert status.scheduled_time_s is not None, f"{update.request_id} has a token but was never scheduled"
            if times.scheduled_s is None:
                times.scheduled_s = status.scheduled_time_s - start_s
                request.num_cached_tokens = status.num_cached_tokens
            times.num_preemptions = status.num_preemptions
            request.finish_reason = status.finish_reason
        num_tokens += len(update.token_ids)
    return num_tokens


def _generation_request(request_id: str, request: WorkloadRequest, start_s: float) -> GenerationRequest:
    params = SamplingParams(temperature=0.0, max_tokens=request.max_tokens, ignore_eos=request.ignore_eos)
    return GenerationRequest(
        NewRequest(request_id, request.prompt_token_ids, params, seed=request.seed),
        arrival_time_s=start_s + request.arrival_s,
        max_tokens=request.max_tokens,
        background=request.background,
    )


@dataclass(frozen=True, slots=True)
class ModelEngine:
    """Engine with a model, and access to its parts."""

    engine: Engine
    executor: RecordingExecutor
    startup_lines: tuple[str, ...]

    def run(self, workload: Workload, *, progress: str | None = None) -> Run:
        """Run a workload to its end."""
        return drive(self.engine, self.executor, workload, progress=progress)

    def close(self) -> None:
        """Release the memory of the model and the cache."""
        self.engine.close()


def model_engine(
    load: LoadConfig,
    scheduler: SchedulerConfig | None = None,
    cache: CacheConfig | None = None,
    listeners: Sequence[EventLog] = (),
    step_times: StepTimeModel | None = None,
    at_submit: Callable[[ScheduledBatch], None] | None = None,
) -> ModelEngine:
    """Load a model and build an engine.

    Args:
        load: the model; if max_model_len is set and the size of the KV cache is not, the cache has room for every
        running request at full length and no more, so that several engines fit side by side.
        scheduler: as for any engine.
        cache: as for any engine.
        listeners: receive every event.
        step_times: predicts step times for the scheduler's latency limits.
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
    built = build_engine(config, wrap_executor=record, listeners=listeners, step_times=step_times)
    return ModelEngine(built.engine, recorders[0], built.facts.startup_lines)
