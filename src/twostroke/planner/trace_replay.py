"""Replay of a Mooncake trace in simulated time, on a machine that need not be present.

requests     from the trace, with its arrivals and shared prefixes; requests longer than the engine takes are left out
step times   as calibrated on this machine, or the floors of a device with published figures
KV blocks    as many as the engine would have, by the memory plan or as given
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tqdm.auto import tqdm

from twostroke.config.engine import EngineConfig
from twostroke.cost.roofline import roofline
from twostroke.cost.step_model import StepTimeModel
from twostroke.errors import InvalidParameter
from twostroke.plain_words import counted
from twostroke.planner.back_test import MIN_REQUESTS, TOO_FEW_REASON
from twostroke.planner.machine import memory_here, prepared_for, published_machine
from twostroke.planner.memory import MemoryPlan, plan_memory
from twostroke.planner.options import TraceOptions
from twostroke.planner.replay import Predicted, predict
from twostroke.planner.worker_kinds import calibrated_steps, not_calibrated, simulated_start
from twostroke.simulation.requests import RecordedRun
from twostroke.simulation.settings import WhatIf, check_rate_factor
from twostroke.simulation.trace import num_tokens_of, read_trace, trace_requests
from twostroke.startup.prepared import Prepared


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceReplayResult:
    """Results of a trace replay."""

    trace: str
    machine: str
    predicted_by: str
    """Source of the step times, in words."""
    are_floors: bool
    """Whether step times are floors; real steps take longer."""
    memory: MemoryPlan
    num_requests: int
    """Number of requests that ran."""
    num_prompt_tokens: int
    """Prompt tokens of the requests that ran."""
    max_context: int
    """Tokens of the longest allowed request: the model's context, or the given limit."""
    num_beyond_context: int
    """Number of requests left out because they exceed `max_context`."""
    num_beyond_kv: int
    """Number of requests left out because they exceed all KV memory."""
    predicted: Predicted
    what_ifs: tuple[Predicted, ...]


def replay_trace(
    path: Path, config: EngineConfig, options: TraceOptions | None = None, what_ifs: Sequence[WhatIf] = ()
) -> TraceReplayResult:
    """Replay a whole trace, once with the settings as they are and once for each what-if.

    Args:
        path: path of the trace.
        config: settings of the engine.
        options: the machine, and the divisor of lengths.
        what_ifs: other settings, one prediction each.

    Raises:
        InvalidParameter: the file is no trace, sizes do not divide, the machine has no step times, or there are
        what-ifs on too few requests.
        SetupError: there is no such model, or it does not fit.
    """
    options = options or TraceOptions()
    entries = read_trace(path)
    divisor = options.trace_divisor
    # check that sizes divide before reading a model
    trace_requests((), block_size=config.cache.block_size, divisor=divisor)
    prepared = prepared_for(config, options.device_name)
    machine, memory, step_times, words = _machine(prepared, options)
    longest = memory.max_model_len
    block_size = prepared.layout.block_size
    requests, num_left_out = trace_requests(entries, block_size=block_size, divisor=divisor, longest=longest)
    if not requests:
        shortest = min(sum(num_tokens_of(entry, divisor)) for entry in entries)
        limit = f"holds no request of at most {longest} tokens, the longest that fits; its shortest has {shortest}"
        remedy = "Divide lengths (--trace-divisor), give more memory (--num-kv-blocks), or another model."
        raise InvalidParameter("trace", str(path), limit, remedy)
    if what_ifs and len(requests) < MIN_REQUESTS:
        held = counted(len(requests), "request")
        limit = f"has {held} of at most {longest} tokens, the longest that fits; {TOO_FEW_REASON}"
        remedy = f"Name a trace of {MIN_REQUESTS} requests or more that fit, or leave --set out."
        raise InvalidParameter("trace", str(path), limit, remedy)
    max_context = prepared.longest_request
    num_beyond_context = sum(sum(num_tokens_of(entry, divisor)) > max_context for entry in entries)
    started = simulated_start(prepared, memory)
    recording = RecordedRun(started, requests, unfinished=0)
    predicted = _with_progress(recording, step_times, WhatIf())
    for what_if in what_ifs:
        check_rate_factor(what_if, requests, predicted.run.duration_s)
    return TraceReplayResult(
        trace=path.name,
        machine=machine,
        predicted_by=words,
        are_floors=options.device_name is not None,
        memory=memory,
        num_requests=len(requests),
        num_prompt_tokens=sum(request.arrival.num_prompt_tokens for request in requests),
        max_context=max_context,
        num_beyond_context=num_beyond_context,
        num_beyond_kv=num_left_out - num_beyond_context,
        predicted=predicted,
        what_ifs=tuple(_with_progress(recording, step_times, what_if) for what_if in what_ifs),
    )


def _with_progress(recording: RecordedRun, step_times: StepTimeModel, what_if: WhatIf) -> Predicted:
    with tqdm(total=len(recording.requests), desc=what_if.words, unit="req", disable=None, leave=False) as bar:
        return predict(recording, step_times, what_if, partial(bar.update, 1))


def _machine(prepared: Prepared, options: TraceOptions) -> tuple[str, MemoryPlan, StepTimeModel, str]:
    """Return the machine's name, the memory plan, the step times, and their source."""
    if options.device_name is None:
        step_times, words = calibrated_steps(prepared)
        if step_times is None:
            raise not_calibrated(prepared, words)
        memory_bytes, others_bytes = memory_here(prepared, options.memory)
        return "this machine", plan_memory(prepared, memory_bytes, others_bytes=others_bytes), step_times, words
    machine = published_machine(options.device_name, prepared, options.memory)
    most_tokens = prepared.settings.scheduler.max_num_batched_tokens
    step_times = roofline(prepared.shape, machine.limits, most_tokens=most_tokens)
    words = "published figures, so step times are floors: bytes at its bandwidth, operations at its rate"
    return machine.name, plan_memory(prepared, machine.memory_bytes), step_times, words
