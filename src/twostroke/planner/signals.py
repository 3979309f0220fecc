"""What a history says of an engine in a few numbers: where its time went, what was full, who disturbed whom.

Read off the events of any log or flight-recorder dump, gaps and all: it is a look at what happened, and nothing is
decided again. Times are in seconds, shares of the time in which the engine worked.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from twostroke.batch import CacheEnd, Commit, Limit, ScheduledBatch, Stroke
from twostroke.bench.report import percentiles
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
from twostroke.kv_check import Verdict
from twostroke.request import Arrival, FinishReason
from twostroke.scheduler.replay import layout_of

_FEW = 2
"""Samples in a third of a half history: fewer show no trend."""


@dataclass(slots=True)
class Signals:
    """The numbers."""

    started: EngineStarted | None = None
    begin_s: float = 0.0
    end_s: float = 0.0
    busy_s: float = 0.0
    """While a step ran."""
    own_s: float = 0.0
    """Of these, outside of the model's operators."""
    compute_s: float = 0.0
    """Steps that arithmetic binds."""
    memory_s: float = 0.0
    """Steps that memory binds."""
    prompt_s: float = 0.0
    """Seconds of steps that arithmetic binds and that mostly compute prompts for the first time."""
    weight_bytes: float = 0.0
    """Bytes of the weights as the largest step read them; 0: the machine was not measured."""
    floor_s: float = 0.0
    """What the machine would have taken for these steps at best."""
    waiting_s: dict[Limit, float] = field(default_factory=dict[Limit, float])
    """Steps while somebody waited, by what kept them out."""
    slots_used: float = 0.0
    """Mean share of max_num_seqs that ran."""
    blocks_used: float = 0.0
    """Mean share of the KV blocks that somebody held."""
    most_blocks_used: float = 0.0
    num_steps: int = 0
    num_requests: int = 0
    """That ended."""
    num_served: int = 0
    """Number of sequences with a token, including those whose arrival a gap in the log has dropped."""
    num_outputs: int = 0
    num_prompt_tokens: int = 0
    """Computed in first strokes, what was computed again included."""
    num_recomputed_tokens: int = 0
    """Of these, after preemptions."""
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    num_evicted_hits: int = 0
    """Admissions whose prefix had been there and was evicted."""
    evicted_again: int = 0
    """Most often that this happened to prompts that begin alike, when they were first admitted."""
    ttft: dict[str, float] = field(default_factory=dict[str, float])
    queue: dict[str, float] = field(default_factory=dict[str, float])
    itl: dict[str, float] = field(default_factory=dict[str, float])
    decode_step: dict[str, float] = field(default_factory=dict[str, float])
    """Of steps without prompt tokens."""
    stalled_itl: dict[str, float] = field(default_factory=dict[str, float])
    """Gaps between tokens in steps that computed prompt tokens of others."""
    longest_ttft: tuple[float, str] = (0.0, "")
    """Seconds, and whose."""
    longest_itl: tuple[float, str] = (0.0, "")
    largest_chunk: int = 0
    decodes_per_step: float = 0.0
    """Mean requests that decode, in steps in which somebody does."""
    waiting_by_tenant: dict[str, int] = field(default_factory=dict[str, int])
    """Requests that arrived, by tenant."""
    blocks_slope: float = 0.0
    """Blocks that are held more, a second, over the last half of the history."""
    link_s: float = 0.0
    """While KV was awaited from other processes, with nothing of it coming."""
    link_busy_s: float = 0.0
    link_bytes: int = 0
    has_pools: bool = False
    """Whether prefill workers compute prompts."""
    num_corrupt: int = 0
    memory_growth: float = 0.0
    """Bytes a second by which the process grew over the last half of the history, without KV blocks used for the first
    time; 0 where it is not known, or did not grow steadily."""
    memory_bytes: int = 0
    """That the process took in the end."""
    num_lost: int = 0
    num_errors: int = 0
    num_aborted: int = 0

    @property
    def duration_s(self) -> float:
        """From the first event to the last."""
        return max(self.end_s - self.begin_s, 1e-9)

    @property
    def busy(self) -> float:
        """Share of the time in which a step ran."""
        return min(1.0, self.busy_s / self.duration_s)

    def waited(self, limit: Limit) -> float:
        """Share of the working time in which somebody waited for this."""
        return self.waiting_s.get(limit, 0.0) / self.busy_s if self.busy_s else 0.0


def signals_of(events: Iterable[Event]) -> Signals:
    """Reads a history."""
    reader = _Reader()
    for event in events:
        if isinstance(event, MeasurementBegan):  # what came before warmed the engine up
            reader = _Reader(reader.found.started)
        reader.take(event)
    return reader.finished()


@dataclass(slots=True)
class _Watched:
    arrival: Arrival
    scheduled_s: float | None = None
    last_token_s: float | None = None
    preempted_at: int = 0
    """Tokens that it had computed when it last gave its blocks back."""


class _Reader:
    def __init__(self, started: EngineStarted | None = None) -> None:
        self.found = Signals(started=started)
        self._has_begun = False
        self._requests: dict[str, _Watched] = {}
        self._decided: dict[int, StepScheduled] = {}
        self._last_s: float | None = None
        self._ttft: list[float] = []
        self._queue: list[float] = []
        self._itl: list[float] = []
        self._stalled: list[float] = []
        self._decode_steps: list[float] = []
        self._slots: list[tuple[float, float]] = []
        self._blocks: list[tuple[float, float, float]] = []
        """Time, seconds of the step, blocks held."""
        self._decodes: list[int] = []
        self._evicted: Counter[bytes] = Counter()
        self._touched: set[int] = set()
        """KV blocks that were ever used."""
        self._served: set[str] = set()
        self._memory: list[tuple[float, int]] = []
        """Time, bytes without those of the blocks touched."""

    def take(self, event: Event) -> None:
        found = self.found
        if not self._has_begun:
            self._has_begun, found.begin_s = True, event.time_s
        found.end_s = max(found.end_s, event.time_s)
        match event:
            case EngineStarted():
                found.started = event
                self._decided, self._requests, self._last_s = {}, {}, None
            case RequestArrived():
                self._requests[event.request_id] = _Watched(event.arrival)
                tenant = event.arrival.tenant
                found.waiting_by_tenant[tenant] = found.waiting_by_tenant.get(tenant, 0) + 1
            case StepScheduled() if not event.batch.is_empty:
                self._scheduled(event)
            case StepCommitted():
                self._committed(event)
            case RequestFinishedByCaller():
                self._requests.pop(event.request_id, None)
                found.num_aborted += event.reason is FinishReason.ABORT
            case _:
                self._rare(event)

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
                found.memory_bytes = event.anonymous_bytes
                self._memory.append((event.time_s, event.anonymous_bytes - len(self._touched) * self._block_bytes()))
            case _:
                pass

    def finished(self) -> Signals:
        found = self.found
        found.ttft, found.queue, found.itl = (percentiles(v) for v in (self._ttft, self._queue, self._itl))
        found.decode_step, found.stalled_itl = percentiles(self._decode_steps), percentiles(self._stalled)
        weight = sum(seconds for seconds, _ in self._slots) or 1.0
        found.slots_used = sum(seconds * share for seconds, share in self._slots) / weight
        found.decodes_per_step = sum(self._decodes) / len(self._decodes) if self._decodes else 0.0
        found.memory_growth = _steady_growth(self._memory[len(self._memory) // 2 :])
        found.evicted_again = max(self._evicted.values(), default=0)
        if found.started is not None and self._blocks:
            held = [blocks for _, _, blocks in self._blocks]
            weight = sum(seconds for _, seconds, _ in self._blocks) or 1.0
            mean = sum(seconds * blocks for _, seconds, blocks in self._blocks) / weight
            found.blocks_used = mean / found.started.num_blocks
            found.most_blocks_used = max(held) / found.started.num_blocks
            found.blocks_slope = _slope([(at, held) for at, _, held in self._blocks[len(self._blocks) // 2 :]])
        return found

    def _block_bytes(self) -> int:
        return 0 if self.found.started is None else layout_of(self.found.started.layout).bytes_per_block

    def _scheduled(self, event: StepScheduled) -> None:
        batch, found = event.batch, self.found
        self._decided[batch.step] = event
        self._touched.update(
            block for share in batch.requests for update in share.block_tables for block in update.block_ids
        )
        for preemption in batch.preemptions:
            watched = self._requests.get(preemption.request_id)
            found.num_preemptions += 1
            if watched is not None:
                watched.preempted_at = max(watched.preempted_at, 1)
        for admitted in batch.admitted:
            watched = self._requests.get(admitted.request_id)
            if watched is None:
                continue
            found.num_cached_tokens += admitted.num_cached_tokens
            if admitted.cache_end is CacheEnd.EVICTED:
                found.num_evicted_hits += 1
                hashes = watched.arrival.block_hashes
                if hashes and watched.scheduled_s is None:  # a preempted one misses its own blocks, which nobody shares
                    self._evicted[hashes[0]] += 1
            if watched.scheduled_s is None:
                watched.scheduled_s = event.time_s
                self._queue.append(event.time_s - watched.arrival.arrival_time_s)

    def _committed(self, event: StepCommitted) -> None:
        decided = self._decided.pop(event.step, None)
        if decided is None:
            return
        batch = decided.batch
        begin_s = decided.time_s if self._last_s is None else max(self._last_s, decided.time_s)
        seconds = max(0.0, event.time_s - begin_s)
        # the engine's own work between two steps counts where it kept somebody waiting for it
        if self._last_s is not None and len(batch.admitted) < batch.num_running:
            seconds = event.time_s - self._last_s
        self._last_s = event.time_s
        self._time(decided, event, seconds)
        self._count(batch)
        self._tokens(batch, event)

    def _time(self, decided: StepScheduled, event: StepCommitted, seconds: float) -> None:
        found, batch, cost = self.found, decided.batch, decided.cost
        found.num_steps += 1
        found.busy_s += seconds
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
        head = self._requests.get(batch.head_request_id or "")
        if batch.num_waiting and not (head is not None and head.arrival.background):  # it waits because it may
            found.waiting_s[batch.limited_by] = found.waiting_s.get(batch.limited_by, 0.0) + seconds
        if not batch.num_prefill_tokens:
            self._decode_steps.append(seconds)
        if found.started is not None:
            self._slots.append((seconds, batch.num_running / found.started.scheduler["max_num_seqs"]))
            self._blocks.append((event.time_s, seconds, found.started.num_blocks - batch.num_free_blocks))

    def _is_prompt_step(self, batch: ScheduledBatch) -> bool:
        """Return whether most tokens of a step are prompt tokens that were not computed before a preemption."""
        num_new = num_tokens = 0
        for share in batch.requests:
            num_tokens += share.num_scheduled_tokens
            watched = self._requests.get(share.request_id)
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
            watched = self._requests.get(share.request_id)
            if watched is not None and watched.preempted_at:
                found.num_recomputed_tokens += share.num_scheduled_tokens
        if num_decodes:
            self._decodes.append(num_decodes)

    def _tokens(self, batch: ScheduledBatch, event: StepCommitted) -> None:
        strokes = {share.request_id: share.stroke for share in batch.requests}
        is_mixed = batch.num_prefill_tokens > 0
        for commit in event.commits:
            self._count_served(commit)
            watched = self._requests.get(commit.request_id)
            if watched is None:
                continue
            self.found.num_outputs += commit.num_tokens
            if commit.num_tokens:
                self._token(watched, event.time_s, is_mixed and strokes.get(commit.request_id) is Stroke.DECODE)
                watched.preempted_at = 0
            if commit.finish_reason is not None:
                self.found.num_requests += 1
                self.found.num_errors += commit.finish_reason is FinishReason.ERROR
                del self._requests[commit.request_id]

    def _count_served(self, commit: Commit) -> None:
        if commit.num_tokens and commit.request_id not in self._served:
            self._served.add(commit.request_id)
            self.found.num_served += 1
        if commit.finish_reason is not None:
            self._served.discard(commit.request_id)  # a later request may use the name again

    def _token(self, watched: _Watched, time_s: float, beside_prompts: bool) -> None:
        if watched.last_token_s is None:
            ttft_s = time_s - watched.arrival.arrival_time_s
            self._ttft.append(ttft_s)
            self.found.longest_ttft = max(self.found.longest_ttft, (ttft_s, watched.arrival.request_id))
        else:
            gap_s = time_s - watched.last_token_s
            self._itl.append(gap_s)
            self.found.longest_itl = max(self.found.longest_itl, (gap_s, watched.arrival.request_id))
            if beside_prompts:
                self._stalled.append(gap_s)
        watched.last_token_s = time_s


def _slope(points: Sequence[tuple[float, float]]) -> float:
    """Of the line through times and values, by least squares."""
    count = len(points)
    if count < 2:
        return 0.0
    mean_t = sum(t for t, _ in points) / count
    mean_v = sum(v for _, v in points) / count
    spread = sum((t - mean_t) ** 2 for t, _ in points)
    return sum((t - mean_t) * (v - mean_v) for t, v in points) / spread if spread else 0.0


def _steady_growth(points: Sequence[tuple[float, float]]) -> float:
    """The slope, where values rise over and over: each third of the points lies above the one before."""
    third = len(points) // 3
    if third < _FEW:
        return 0.0
    parts = [[v for _, v in points[i * third : (i + 1) * third]] for i in range(3)]
    rises = all(min(later) > max(earlier) for earlier, later in itertools.pairwise(parts))
    return max(0.0, _slope(points)) if rises else 0.0


def plain_signals(found: Signals) -> dict[str, Any]:
    """For JSON: every number, without the settings."""
    names = [name for name in Signals.__slots__ if name != "started"]
    return {name: getattr(found, name) for name in names} | {
        "waiting_s": {k.value: v for k, v in found.waiting_s.items()}
    }
