"""Reader that computes `Signals` from the events of any log or flight-recorder dump.

The events may be incomplete, as no decision is replayed.

The logs of the processes of one server may be read as one. Each process numbers its steps from 0, and has its own
steps, memory and KV blocks (`_Engine`). Several processes may run a sequence, one after the other (`_SequenceState`):

    prefill-0.1   arrives ── prompt, first token ── ends, its KV is lent ┐
    decode-0.1                                              arrives ─────┴─ second token … last token

This is one sequence with one arrival, one wait for the first token, and one end.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from twostroke.batch import CacheEnd, Commit, ScheduledBatch, Stroke
from twostroke.events import (
    EngineLost,
    EngineStarted,
    Event,
    KVBlockChecked,
    KVHoldEnded,
    KVImportEnded,
    MeasurementBegan,
    MemorySampled,
    RequestArrived,
    RequestFinishedByCaller,
    RequestRouted,
    StepCommitted,
    StepScheduled,
)
from twostroke.explain.names import is_pool_process, sequence_of
from twostroke.kv_check import Verdict
from twostroke.measure.report import percentiles
from twostroke.planner.signals import Signals
from twostroke.request import Arrival, FinishReason
from twostroke.scheduler.replay import layout_of

_FEW = 2
"""Fewest samples in a third of half a history that show a trend."""


def signals_of(events: Iterable[Event]) -> Signals:
    """Return the signals of a history."""
    reader = _Reader()
    for event in events:
        if isinstance(event, MeasurementBegan):  # earlier events are the warm-up
            reader = _Reader({process: _Engine(one.started) for process, one in reader.engines.items()})
        reader.take(event)
    return reader.finished()


@dataclass(slots=True)
class _Engine:
    """State of one process."""

    started: EngineStarted | None = None
    decided: dict[int, StepScheduled] = field(default_factory=dict[int, StepScheduled])
    last_s: float | None = None
    """Time of its last result."""
    busy_s: float = 0.0
    num_steps: int = 0
    blocks: list[tuple[float, float, float]] = field(default_factory=list[tuple[float, float, float]])
    """Time of the sample, seconds of the step, and blocks held."""
    touched: set[int] = field(default_factory=set[int])
    """KV blocks that were used at least once."""
    memory: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    """Time, and bytes of the process without those of its used blocks."""
    memory_bytes: int = 0

    @property
    def num_blocks(self) -> int:
        return 1 if self.started is None else self.started.num_blocks

    @property
    def most_used(self) -> float:
        """Largest share of its blocks that was held."""
        return max((held for _, _, held in self.blocks), default=0.0) / self.num_blocks

    @property
    def memory_growth(self) -> float:
        return _steady_growth(self.memory[len(self.memory) // 2 :])

    def sample(self, event: MemorySampled) -> None:
        block_bytes = 0 if self.started is None else layout_of(self.started.layout).bytes_per_block
        self.memory_bytes = event.anonymous_bytes
        self.memory.append((event.time_s, event.anonymous_bytes - len(self.touched) * block_bytes))


@dataclass(slots=True)
class _SequenceState:
    """State of one sequence, on any process."""

    arrival: Arrival
    """Arrival at its current process."""
    process: str
    name: str
    """Name at its current process."""
    has_history: bool = False
    """Whether another process ran it before, outside of this history."""
    scheduled_s: float | None = None
    last_token_s: float | None = None
    preempted_at: int = 0
    """Tokens that it had computed when it was last preempted."""


class _Reader:
    def __init__(self, engines: dict[str, _Engine] | None = None) -> None:
        self.found = Signals()
        self.engines = engines or {}
        """Processes by name."""
        self._has_begun = self._has_work = False
        self._requests: dict[str, _SequenceState] = {}
        """Live sequences by id."""
        self._aborted: set[str] = set()
        """Sequences of pools that the caller ended and that no other process has continued."""
        self._ttft: list[float] = []
        self._queue: list[float] = []
        self._itl: list[float] = []
        self._stalled: list[float] = []
        self._decode_steps: list[float] = []
        self._slots: list[tuple[float, float]] = []
        self._decodes: list[int] = []
        self._evicted: Counter[bytes] = Counter()
        self._served: set[str] = set()

    def take(self, event: Event) -> None:
        self._at(event)
        match event:
            case EngineStarted():
                self.engines[event.process] = _Engine(event)
                if not is_pool_process(event.process):  # sequences of a pool process go on elsewhere
                    self._requests = {}
            case RequestArrived():
                self._arrived(event)
            case StepScheduled() if not event.batch.is_empty:
                self._scheduled(event)
            case StepCommitted():
                self._committed(event)
            case RequestFinishedByCaller():
                self._ended_by_caller(event)
            case _:
                self._rare(event)

    def _at(self, event: Event) -> None:
        """Update begin and end; time before the first work does not count as idle."""
        found = self.found
        is_work = isinstance(event, RequestArrived | StepScheduled | StepCommitted)
        if not self._has_begun or (is_work and not self._has_work):
            found.begin_s = event.time_s
        self._has_begun, self._has_work = True, self._has_work or is_work
        found.end_s = max(found.end_s, event.time_s)

    def _rare(self, event: Event) -> None:
        found = self.found
        match event:
            case RequestRouted() | KVHoldEnded():
                found.has_pools = True
            case KVImportEnded():
                found.has_pools = True
                found.link_bytes += event.num_bytes
                found.link_busy_s += event.busy_s
                found.link_s += max(0.0, event.time_s - event.begin_s)
            case KVBlockChecked():
                found.num_corrupt += event.verdict is Verdict.CORRUPTION
            case EngineLost():
                found.num_lost += 1
            case MemorySampled():
                self._engine(event).sample(event)
            case _:
                pass

    def finished(self) -> Signals:
        found, engines = self.found, list(self.engines.values())
        found.ttft, found.queue, found.itl = (percentiles(v) for v in (self._ttft, self._queue, self._itl))
        found.decode_step, found.stalled_itl = percentiles(self._decode_steps), percentiles(self._stalled)
        weight = sum(seconds for seconds, _ in self._slots) or 1.0
        found.slots_used = sum(seconds * share for seconds, share in self._slots) / weight
        found.decodes_per_step = sum(self._decodes) / len(self._decodes) if self._decodes else 0.0
        found.evicted_again = max(self._evicted.values(), default=0)
        found.num_aborted += len(self._aborted)
        found.num_processes = sum(engine.num_steps > 0 for engine in engines)
        begun = [engine for engine in engines if engine.started is not None]
        if begun:
            busiest = max(reversed(begun), key=lambda engine: engine.busy_s)
            found.started = busiest.started
        found.busiest_s = max((engine.busy_s for engine in engines), default=0.0)
        if engines:
            grown = max(engines, key=lambda engine: (engine.memory_growth, engine.memory_bytes))
            found.memory_growth, found.memory_bytes = grown.memory_growth, grown.memory_bytes
        _count_blocks(found, [engine for engine in engines if engine.blocks])
        return found

    def _engine(self, event: Event) -> _Engine:
        return self.engines.setdefault(event.process, _Engine())

    def _of(self, name: str | None) -> _SequenceState | None:
        return None if name is None else self._requests.get(sequence_of(name))

    def _arrived(self, event: RequestArrived) -> None:
        name, arrival = sequence_of(event.request_id), event.arrival
        self._aborted.discard(name)
        known = self._requests.get(name) if is_pool_process(event.process) else None
        if known is not None:
            known.arrival, known.process, known.name = arrival, event.process, event.request_id
            return
        has_history = arrival.import_id is not None or name != event.request_id
        self._requests[name] = _SequenceState(arrival, event.process, event.request_id, has_history)
        waiting = self.found.waiting_by_tenant
        waiting[arrival.tenant] = waiting.get(arrival.tenant, 0) + 1

    def _ended_by_caller(self, event: RequestFinishedByCaller) -> None:
        """Record an end by the caller.

        With pools, the gateway and a worker both report it. A worker also reports it for a sequence that another
        worker will run.
        """
        name, is_abort = sequence_of(event.request_id), event.reason is FinishReason.ABORT
        watched = self._requests.get(name)
        if is_pool_process(event.process):
            if watched is None or (watched.process, watched.name) != (event.process, event.request_id):
                return
            if is_abort:  # the next attempt to run it may follow
                self._aborted.add(name)
                return
        self._requests.pop(name, None)
        self.found.num_aborted += is_abort
        self._aborted.discard(name)
        self.found.num_requests += watched is not None and not is_abort

    def _scheduled(self, event: StepScheduled) -> None:
        batch, found, engine = event.batch, self.found, self._engine(event)
        engine.decided[batch.step] = event
        engine.touched.update(
            block for share in batch.requests for update in share.block_tables for block in update.block_ids
        )
        for preemption in batch.preemptions:
            watched = self._of(preemption.request_id)
            found.num_preemptions += 1
            if watched is not None:
                watched.preempted_at = max(watched.preempted_at, 1)
        for admitted in batch.admitted:
            watched = self._of(admitted.request_id)
            if watched is None:
                continue
            is_first = watched.scheduled_s is None and not watched.has_history
            found.num_cached_tokens += admitted.num_cached_tokens
            if admitted.cache_end is CacheEnd.EVICTED:
                found.num_evicted_hits += 1
                hashes = watched.arrival.block_hashes
                if hashes and is_first:  # a preempted request misses its own blocks, not shared ones
                    self._evicted[hashes[0]] += 1
            if is_first:
                watched.scheduled_s = event.time_s
                self._queue.append(event.time_s - watched.arrival.arrival_time_s)

    def _committed(self, event: StepCommitted) -> None:
        engine = self._engine(event)
        decided = engine.decided.pop(event.step, None)
        if decided is None:
            return
        batch, last_s = decided.batch, engine.last_s
        begin_s = decided.time_s if last_s is None else max(last_s, decided.time_s)
        seconds = max(0.0, event.time_s - begin_s)
        # the engine's own work between two steps counts if requests waited for it
        if last_s is not None and len(batch.admitted) < batch.num_running:
            seconds = event.time_s - last_s
        engine.last_s = event.time_s
        self._time(engine, decided, event, seconds)
        self._count(batch)
        self._tokens(batch, event)

    def _time(self, engine: _Engine, decided: StepScheduled, event: StepCommitted, seconds: float) -> None:
        found, batch, cost = self.found, decided.batch, decided.cost
        found.num_steps += 1
        engine.num_steps += 1
        found.busy_s += seconds
        engine.busy_s += seconds
        found.own_s += max(0.0, seconds - event.operator_time_s - event.draft_time_s)
        if self._is_prompt_step(batch) and (cost is None or cost.bound == "compute"):
            found.prompt_s += seconds
        if cost is not None:
            found.floor_s += cost.seconds
            found.weight_bytes = max(found.weight_bytes, cost.weight_bytes)
            if cost.bound == "compute":
                found.compute_s += seconds
            else:
                found.memory_s += seconds
        head = self._of(batch.head_request_id)
        if batch.num_waiting and not (head is not None and head.arrival.background):  # background work may wait
            found.waiting_s[batch.limited_by] = found.waiting_s.get(batch.limited_by, 0.0) + seconds
        if not batch.num_prefill_tokens:
            self._decode_steps.append(seconds)
        if engine.started is not None:
            self._slots.append((seconds, batch.num_running / engine.started.scheduler["max_num_seqs"]))
            engine.blocks.append((event.time_s, seconds, engine.num_blocks - batch.num_free_blocks))

    def _is_prompt_step(self, batch: ScheduledBatch) -> bool:
        """Return whether most tokens of a step are prompt tokens that were not computed before a preemption."""
        num_new = num_tokens = 0
        for share in batch.requests:
            num_tokens += share.num_scheduled_tokens
            watched = self._of(share.request_id)
            if share.stroke is Stroke.PREFILL and not (watched is not None and watched.preempted_at):
                num_new += share.num_scheduled_tokens
        return 2 * num_new > num_tokens

    def _count(self, batch: ScheduledBatch) -> None:
        found = self.found
        num_decodes = 0
        for share in batch.requests:
            if share.stroke is Stroke.DECODE:
                num_decodes += 1
                continue
            found.num_prompt_tokens += share.num_scheduled_tokens
            found.largest_chunk = max(found.largest_chunk, share.num_scheduled_tokens)
            watched = self._of(share.request_id)
            if watched is not None and watched.preempted_at:
                found.num_recomputed_tokens += share.num_scheduled_tokens
        if num_decodes:
            self._decodes.append(num_decodes)

    def _tokens(self, batch: ScheduledBatch, event: StepCommitted) -> None:
        strokes = {share.request_id: share.stroke for share in batch.requests}
        is_mixed = batch.num_prefill_tokens > 0
        for commit in event.commits:
            self._count_served(commit, event.process)
            watched = self._of(commit.request_id)
            if watched is None or watched.name != commit.request_id:
                continue
            self.found.num_outputs += commit.num_tokens
            if commit.num_tokens:
                self._token(watched, event.time_s, is_mixed and strokes.get(commit.request_id) is Stroke.DECODE)
                watched.preempted_at = 0
            if commit.finish_reason is not None and not _continues_elsewhere(watched, commit, event.process):
                self.found.num_requests += 1
                self.found.num_errors += commit.finish_reason is FinishReason.ERROR
                del self._requests[sequence_of(commit.request_id)]

    def _count_served(self, commit: Commit, process: str) -> None:
        name = sequence_of(commit.request_id)
        if commit.num_tokens and name not in self._served:
            self._served.add(name)
            self.found.num_served += 1
        if commit.finish_reason is not None and not is_pool_process(process):
            self._served.discard(name)  # a later request may use the name again; in a pool, another process goes on

    def _token(self, watched: _SequenceState, time_s: float, beside_prompts: bool) -> None:
        if watched.last_token_s is not None:
            gap_s = time_s - watched.last_token_s
            self._itl.append(gap_s)
            self.found.longest_itl = max(self.found.longest_itl, (gap_s, watched.arrival.request_id))
            if beside_prompts:
                self._stalled.append(gap_s)
        elif not watched.has_history:
            ttft_s = time_s - watched.arrival.arrival_time_s
            self._ttft.append(ttft_s)
            self.found.longest_ttft = max(self.found.longest_ttft, (ttft_s, watched.arrival.request_id))
        watched.last_token_s = time_s


def _continues_elsewhere(watched: _SequenceState, commit: Commit, process: str) -> bool:
    """Return whether the sequence goes on at another process of its pool, which fetches its KV or already runs it."""
    is_lent = watched.arrival.lend_as is not None and commit.finish_reason is FinishReason.LENGTH
    return is_lent or watched.process != process


def _count_blocks(found: Signals, engines: Sequence[_Engine]) -> None:
    """Record the use of KV memory: the mean over all processes, and that of the fullest process."""
    if not engines:
        return
    weight = sum(seconds for engine in engines for _, seconds, _ in engine.blocks) or 1.0
    held = (seconds * blocks / engine.num_blocks for engine in engines for _, seconds, blocks in engine.blocks)
    found.blocks_used = sum(held) / weight
    fullest = max(engines, key=lambda engine: engine.most_used)
    found.most_blocks_used, found.num_blocks = fullest.most_used, fullest.num_blocks
    found.blocks_slope = _slope([(at, held) for at, _, held in fullest.blocks[len(fullest.blocks) // 2 :]])


def _slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the slope of the least-squares line through times and values."""
    count = len(points)
    if count < 2:
        return 0.0
    mean_t = sum(t for t, _ in points) / count
    mean_v = sum(v for _, v in points) / count
    spread = sum((t - mean_t) ** 2 for t, _ in points)
    return sum((t - mean_t) * (v - mean_v) for t, v in points) / spread if spread else 0.0


def _steady_growth(points: Sequence[tuple[float, float]]) -> float:
    """Return the slope if values rise steadily, with each third of the points above the one before; otherwise 0.0."""
    third = len(points) // 3
    if third < _FEW:
        return 0.0
    parts = [[v for _, v in points[i * third : (i + 1) * third]] for i in range(3)]
    rises = all(min(later) > max(earlier) for earlier, later in itertools.pairwise(parts))
    return max(0.0, _slope(points)) if rises else 0.0
