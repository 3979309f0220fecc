"""Requests of a placement search: from a trace, from a recorded run, or at a rate. The first one arrives at 0 s."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from twostroke.engine.event_sinks import consistent_events, is_event_log, read_events
from twostroke.errors import InvalidParameter
from twostroke.plain_words import counted
from twostroke.planner.back_test import MIN_REQUESTS, TOO_FEW_REASON, too_few
from twostroke.planner.options import SearchOptions
from twostroke.planner.replay import since
from twostroke.request import Arrival
from twostroke.simulation.complete import check_usable
from twostroke.simulation.requests import SimulatedRequest, read_recording
from twostroke.simulation.settings import rehash_for_block_size
from twostroke.simulation.trace import is_trace, read_trace, trace_requests

_KINDS_OF_FILE = "Name a Mooncake trace, or an event log that serve --event-log wrote."


@dataclass(frozen=True, slots=True)
class SearchWorkload:
    """Requests with their lengths and arrivals."""

    name: str
    requests: tuple[SimulatedRequest, ...]
    num_too_long: int = 0
    """Number of requests left out because they are longer than a request may be."""
    num_without_tokens: int = 0
    """Number of a log's requests left out because they ended before the first token."""

    @property
    def span_s(self) -> float:
        """Seconds from the first arrival to the last."""
        return self.requests[-1].arrival.arrival_time_s

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens of all requests."""
        return sum(request.arrival.num_prompt_tokens for request in self.requests)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens of all requests."""
        return sum(request.num_outputs for request in self.requests)

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        return max(_num_tokens(request) for request in self.requests)


def read_workload(options: SearchOptions, *, block_size: int, longest: int) -> SearchWorkload:
    """Return the requests to simulate.

    Args:
        options: source of the requests.
        block_size: tokens of a KV block.
        longest: tokens of the longest request that a worker takes; longer ones are left out.

    Raises:
        InvalidParameter: a file that is neither a trace nor an event log, or too few of its requests fit.
    """
    path = options.workload
    if path is None:
        found = SearchWorkload("requests at a rate", _at_a_rate(options))
    elif is_trace(path):
        with _named(path):
            entries = read_trace(path)[: options.num_requests]
        requests, _ = trace_requests(entries, block_size=block_size, divisor=options.trace_divisor)
        found = SearchWorkload(path.name, requests)
    elif not is_event_log(path):
        limit = "is neither a Mooncake trace nor an event log" if path.read_bytes().strip() else "is empty"
        raise InvalidParameter("workload", str(path), limit, _KINDS_OF_FILE)
    else:
        found = _of_log(path, options, block_size)
    return _fitting(found, options, longest)


@contextmanager
def _named(path: Path) -> Generator[None]:
    """Report errors of a reader as errors of this file and of --workload."""
    try:
        yield
    except InvalidParameter as error:
        raise InvalidParameter("workload", str(path), error.limit, error.remedy or _KINDS_OF_FILE) from error


def _of_log(path: Path, options: SearchOptions, block_size: int) -> SearchWorkload:
    if options.trace_divisor != 1:
        raise InvalidParameter("trace_divisor", options.trace_divisor, "is for a trace; this is an event log")
    with _named(path), consistent_events((path,), "workload"):
        events = list(read_events(path))
        check_usable(events)
        recording = read_recording(events)
    ran = [replace(one, ended_after_s=None) for one in recording.requests if one.num_outputs]
    few = too_few(len(ran))
    if few:
        raise InvalidParameter("workload", str(path), f"is too short to conclude anything: {few.removesuffix('.')}")
    before = recording.started.layout["block_size"]
    if max(before, block_size) % min(before, block_size):
        limit = f"is recorded with blocks of {before} tokens, which {block_size} does not fit"
        raise InvalidParameter("workload", str(path), limit, f"Give --block-size {before}.")
    requests = rehash_for_block_size(ran[: options.num_requests], before, block_size)
    without = sum(not one.num_outputs for one in recording.requests)
    return SearchWorkload(path.name, requests, num_without_tokens=without)


def _at_a_rate(options: SearchOptions) -> tuple[SimulatedRequest, ...]:
    """Return requests with exponential gaps between arrivals."""
    assert options.request_rate is not None, "without a workload there is a rate"
    rng = np.random.default_rng(options.seed)
    gaps = rng.exponential(1 / options.request_rate, options.num_requests)
    arrivals = np.cumsum(gaps)
    prompts = options.lengths("input_len").draw(options.num_requests, rng)
    outputs = options.lengths("output_len").draw(options.num_requests, rng)
    return tuple(
        SimulatedRequest(Arrival(f"{i}", float(at), int(num_prompt), int(num_output)), int(num_output))
        for i, (at, num_prompt, num_output) in enumerate(zip(arrivals, prompts, outputs, strict=True))
    )


def _fitting(workload: SearchWorkload, options: SearchOptions, longest: int) -> SearchWorkload:
    """Return the requests that a worker takes, with the first arrival at 0 s."""
    fits = [request for request in workload.requests if _num_tokens(request) <= longest]
    if options.workload is not None:
        name, shorter = "workload", "shorten its requests (--trace-divisor)"
    else:
        name = "input_len" if options.lengths("input_len").mean >= options.lengths("output_len").mean else "output_len"
        shorter = "shorten requests (--input-len, --output-len)"
    remedy = f"Give more memory (--memory) or another model, or {shorter}."
    value = str(getattr(options, name))
    if not fits:
        shortest = min((_num_tokens(request) for request in workload.requests), default=0)
        limit = f"holds no request of at most {longest} tokens, the longest that a worker takes"
        if shortest:
            limit += f"; its shortest has {shortest}"
        raise InvalidParameter(name, value, limit, remedy)
    if len(fits) < MIN_REQUESTS:
        limit = f"has {counted(len(fits), 'request')} of at most {longest} tokens, the longest that a worker takes"
        limit += f"; {TOO_FEW_REASON}"
        if options.workload is not None and len(workload.requests) < MIN_REQUESTS:  # no setting adds requests
            remedy = f"Name a trace of {MIN_REQUESTS} requests or more."
        elif len(workload.requests) >= options.num_requests:  # the file may hold more
            remedy = f"Give more requests (--num-requests). {remedy}"
        raise InvalidParameter(name, value, limit, remedy)
    ordered = sorted(fits, key=lambda one: one.arrival.arrival_time_s)
    requests = since(ordered, ordered[0].arrival.arrival_time_s)
    return replace(workload, requests=requests, num_too_long=len(workload.requests) - len(fits))


def _num_tokens(request: SimulatedRequest) -> int:
    return request.arrival.num_prompt_tokens + request.arrival.max_tokens
