"""LiveEngine: one process that runs steps, as the page shows it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from twostroke.batch import Commit, ScheduledRequest
from twostroke.events import (
    EngineLost,
    EngineStarted,
    Event,
    KVBlockChecked,
    KVHoldEnded,
    KVImportBegan,
    KVImportEnded,
    PrefixCacheReset,
    RequestArrived,
    RequestFinishedByCaller,
    StepCommitted,
    StepScheduled,
)
from twostroke.live.block_map import BlockMap, Table
from twostroke.live.rows import (
    WINDOW_S,
    LiveRequest,
    LiveStep,
    SequenceRow,
    StepRow,
    figures_of,
    histograms_of,
    waiting_by_reason,
)
from twostroke.metrics.engine_metrics import EngineMetrics
from twostroke.request import FinishReason, RequestStatus

NUM_STEPS = 240
"""Steps that are remembered."""
NUM_ENDED = 60
"""Requests that have ended and are still shown."""
_BY_ITSELF = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(slots=True)
class _Unseen:
    """What nobody has been told of yet."""

    requests: set[str] = field(default_factory=set[str])
    ended: list[SequenceRow] = field(default_factory=list[SequenceRow])
    grown: dict[str, list[list[Any]]] = field(default_factory=dict[str, list[list[Any]]])
    """By request, per KV group: the entry where its row is cut, its first held one, the blocks that follow."""
    gone: list[str] = field(default_factory=list[str])
    stamp: int = 0
    is_settled: bool = False
    """Nothing has come for so long that rates are 0, and that was told."""
    has_all: bool = True
    """It began anew: only the whole will do."""

    def note_growth(self, share: ScheduledRequest, firsts: Sequence[int]) -> None:
        """A row is cut and goes on with other blocks."""
        known = self.grown.get(share.request_id) or [[update.start, 0, []] for update in share.block_tables]
        self.grown[share.request_id] = [
            [min(start, update.start), first, [*ids[: max(0, update.start - start)], *update.block_ids]]
            for (start, _, ids), update, first in zip(known, share.block_tables, firsts, strict=True)
        ]


class LiveEngine:
    """Follows one place, event by event; `whole` is what is there, `changes` what is new since they were asked for.

    Hearing an event costs little whether or not anybody looks: what can be made of it is made when somebody asks.

    Args:
        metrics: that have counted every event when it comes here.
    """

    def __init__(self, metrics: EngineMetrics) -> None:
        self._metrics = metrics
        self._started: EngineStarted | None = None
        self._blocks: BlockMap | None = None
        self._config: dict[str, Any] = {}
        self._lost = ""
        self._requests: dict[str, LiveRequest] = {}
        self._ended: deque[SequenceRow] = deque()
        self._steps: deque[LiveStep] = deque(maxlen=NUM_STEPS)
        self._in_flight: deque[LiveStep] = deque()
        self._holds: dict[int, Table] = {}
        self._stamp = 0
        self._last_s = 0.0
        """Of the last event."""
        self._unseen = _Unseen()
        self.is_watched = False
        """Whether changes are noted; the whole is there in any case."""
        self.tenants: dict[str, str] = {}
        """Of the requests that are shown."""

    @property
    def started(self) -> EngineStarted | None:
        """What runs here; None before it has said so."""
        return self._started

    def observe(self, event: Event) -> None:
        """One event, in order."""
        self._stamp += 1
        self._last_s = event.time_s
        match event:
            case StepScheduled():
                self._scheduled(event)
            case StepCommitted():
                self._committed(event)
            case RequestArrived():
                self._arrived(event)
            case RequestFinishedByCaller():
                self._end(event.request_id, event.reason, event.time_s)
            case EngineStarted():
                self._begin(event)
            case EngineLost():
                self._clear()
                self._lost = event.cause
            case _ if self._blocks is not None:
                self._memory_changed(event, self._blocks)
            case _:
                pass

    def kv_shares(self, name_of: Callable[[str], str]) -> dict[str, float]:
        """Return the share of the usable KV blocks that running requests hold, by `name_of(tenant)`."""
        held: dict[str, set[int]] = {}
        for request in self._requests.values():
            if request.is_running:
                tenant = "" if request.arrival is None else request.arrival.tenant
                held.setdefault(name_of(tenant), set()).update(request.table.held())
        num_usable = 0 if self._blocks is None else self._blocks.num_usable
        return {name: len(blocks) / num_usable for name, blocks in held.items()} if num_usable else {}

    @property
    def labels(self) -> Mapping[str, str]:
        """Labels of its metrics."""
        return self._metrics.labels

    # ------------------------------------------------------------------ what the page gets

    def whole(self, now_s: float) -> dict[str, Any]:
        """All of it; "Engine" in docs/page.md."""
        started, blocks = self._started, self._blocks
        return {
            "process": "" if started is None else started.process,
            "lost": self._lost,
            "config": self._config,
            **self._figures(now_s),
            "steps": [step.row() for step in self._steps],
            "requests": [*self._ended, *(request.row() for request in self._requests.values())],
            "rows": {
                request.request_id: [
                    [first, row] for first, row in zip(request.table.first_held, request.table.rows, strict=True)
                ]
                for request in self._requests.values()
                if request.is_running
            },
            "blocks": {"runs": [] if blocks is None else blocks.runs(), "written": self._written()},
        }

    def watch(self) -> None:
        """From now on changes are noted; whoever asks first gets the whole."""
        self.is_watched = True
        self.seen()
        self._unseen.has_all = True

    def seen(self) -> None:
        """Whoever looks has been told everything."""
        if self._blocks is not None:
            self._blocks.changed.clear()
        self._unseen = _Unseen(stamp=self._stamp, has_all=False)

    def changes(self, now_s: float) -> dict[str, Any] | None:
        """What is new; None where nothing is."""
        unseen, blocks = self._unseen, self._blocks
        if unseen.has_all:
            whole = {"whole": True, **self.whole(now_s)}
            self.seen()
            return whole
        if unseen.stamp == self._stamp:
            return self._settled(now_s)
        steps: list[StepRow] = [step.row() for step in self._steps if step.stamp > unseen.stamp]
        touched = {request.request_id for request in self._requests.values() if request.is_running} | unseen.requests
        changes: dict[str, Any] = {
            **self._figures(now_s),
            "steps": steps,
            "requests": [
                *unseen.ended,
                *(self._requests[request_id].row() for request_id in sorted(touched) if request_id in self._requests),
            ],
            "gone": unseen.gone,
            "rows": unseen.grown,
            "blocks": {"set": [] if blocks is None else blocks.take_changes(), "written": self._written()},
        }
        self.seen()
        return changes

    def _settled(self, now_s: float) -> dict[str, Any] | None:
        """Told once when nothing has come for as long as rates reach back: they are 0 now."""
        if self._unseen.is_settled or not self._steps or now_s < self._last_s + WINDOW_S:
            return None
        self._unseen.is_settled = True
        return {**self._figures(now_s), "steps": [], "requests": [], "gone": [], "rows": {}}

    def _figures(self, now_s: float) -> dict[str, Any]:
        num_preempted = sum(r.status is RequestStatus.PREEMPTED for r in self._requests.values())
        return {
            "figures": {**figures_of(self._metrics, self._steps, now_s), "preempted": num_preempted},
            "waiting_by_reason": waiting_by_reason(self._metrics),
            "histograms": histograms_of(self._metrics),
        }

    def _written(self) -> list[int]:
        """Blocks that the last step with tokens writes to."""
        if not self._steps or self._blocks is None:
            return []
        sizes = self._blocks.block_tokens
        written: set[int] = set()
        for share in self._steps[-1].batch.requests:
            request = self._requests.get(share.request_id)
            if request is not None and request.is_running:
                begin, last = share.token_range.start, share.token_range.stop - 1
                for row, first, size in zip(request.table.rows, request.table.first_held, sizes, strict=True):
                    written.update(row[max(first, begin // size) : last // size + 1])
        return sorted(written)

    # ------------------------------------------------------------------ events

    def _begin(self, event: EngineStarted) -> None:
        self._clear()
        self._steps.clear()  # another process counts from 0
        self._started, self._config = event, _config_of(event)
        self._blocks = BlockMap(event)
        self._lost = ""
        self._unseen.has_all = True

    def _clear(self) -> None:
        """Nobody runs here any more."""
        for request_id in list(self._requests):
            self._end(request_id, FinishReason.ERROR, self._steps[-1].time_s if self._steps else None, told="lost")
        self._holds.clear()
        self._in_flight.clear()
        if self._started is not None:
            self._blocks = BlockMap(self._started)
        self._unseen.has_all = True

    def _arrived(self, event: RequestArrived) -> None:
        if self._blocks is None:
            return
        table = self._blocks.table(event.arrival.block_hashes)
        journey = self._metrics.sequence(event.request_id)
        self._requests[event.request_id] = LiveRequest(event.request_id, event.arrival, journey, table)
        self.tenants[event.request_id] = event.arrival.tenant
        self._touch(event.request_id)

    def _scheduled(self, event: StepScheduled) -> None:
        batch, blocks = event.batch, self._blocks
        if blocks is None:
            return
        blocks.arrive()
        for preemption in batch.preemptions:
            self._lose_blocks(preemption.request_id, RequestStatus.PREEMPTED, batch.step)
        blocks.moved(batch.kv_moves)
        cached: Mapping[str, int] = {}
        if batch.admitted:
            cached = {admitted.request_id: admitted.num_cached_tokens for admitted in batch.admitted}
            for request_id, num_cached in cached.items():
                self._admitted(request_id, num_cached)
        for share in batch.requests:  # this is done for every token
            for update in share.block_tables:
                if update.block_ids:
                    self._grown(share, cached.get(share.request_id, 0), blocks)
                    break
        step = LiveStep(event.time_s, batch, event.cost, self._stamp)
        if not batch.is_empty:
            self._in_flight.append(step)
            self._steps.append(step)
        elif self._steps:  # nothing runs, but somebody may wait for another reason
            self._steps[-1].stamp = self._stamp

    def _admitted(self, request_id: str, num_cached: int) -> None:
        request = self._requests.get(request_id)
        if request is not None:
            if request.status is not RequestStatus.PREEMPTED:  # then it finds what it had computed itself
                request.num_cached = num_cached
            request.status = RequestStatus.RUNNING
            arrival = request.arrival
            if arrival is not None and arrival.import_id is not None:
                self._end_hold(arrival.import_id)

    def _grown(self, share: ScheduledRequest, num_cached: int, blocks: BlockMap) -> None:
        request = self._requests.get(share.request_id)
        if request is None:  # it came before the history begins
            request = LiveRequest(share.request_id, None, None, blocks.table(()), RequestStatus.RUNNING)
            self._requests[share.request_id] = request
        blocks.grow(request.table, share.block_tables, share.num_computed_tokens, num_cached)
        if self.is_watched:
            self._unseen.note_growth(share, request.table.first_held)

    def _committed(self, event: StepCommitted) -> None:
        step = self._take_done(event.step)
        if step is None or self._blocks is None:
            return
        step.done_s, step.stamp = event.time_s, self._stamp
        blocks, requests, number = self._blocks, self._requests, step.batch.step
        num_generated = 0
        running, error = RequestStatus.RUNNING, FinishReason.ERROR  # looked up once: it takes as long as a call
        for share, commit in _paired(step.batch.requests, event.commits):  # this is done for every token
            num_generated += commit.num_tokens
            request = requests.get(commit.request_id)
            if request is None:
                continue
            if commit.block_hashes:
                request.table.hashes.extend(commit.block_hashes)
            if request.status is not running or request.preempted_at > number:
                # it has given its blocks back, and its token counts all the same
                self._touch(commit.request_id)
            elif commit.finish_reason is not error:
                request.stroke = share.stroke
                end = share.num_computed_tokens + share.num_scheduled_tokens
                if share.num_draft_tokens:
                    end = share.num_computed_tokens + commit.num_tokens
                    blocks.roll_back(request.table, end)
                request.num_computed = end
                blocks.computed(request.table, end)
            if commit.finish_reason is not None:
                self._end(commit.request_id, commit.finish_reason, event.time_s)
        blocks.arrive()
        step.num_generated = num_generated

    def _take_done(self, number: int) -> LiveStep | None:
        """The step of this number, which is in flight no more; None of one that the history does not know."""
        step = None
        while self._in_flight and self._in_flight[0].batch.step <= number:
            step = self._in_flight.popleft()
        return step

    def _memory_changed(self, event: Event, blocks: BlockMap) -> None:
        match event:
            case PrefixCacheReset():
                blocks.forget_names()
            case KVBlockChecked():
                for request_id in event.suspects.ended:
                    self._end(request_id, FinishReason.ERROR, event.time_s)
                for request_id in event.suspects.started_over:
                    self._lose_blocks(request_id, RequestStatus.WAITING, self._next_step)
                if event.quarantined:
                    blocks.quarantine(block_id for block_id in event.quarantined if block_id is not None)
            case KVImportBegan():
                self._holds[event.import_id] = blocks.open_import(event.block_hashes, event.rows, event.num_tokens)
            case KVImportEnded():
                self._import_ended(event, blocks)
            case KVHoldEnded():
                self._end_hold(event.hold_id)
            case _:
                pass

    def _import_ended(self, event: KVImportEnded, blocks: BlockMap) -> None:
        table = self._holds.get(event.import_id)
        if table is None:
            return
        if event.problem:
            self._end_hold(event.import_id)
        else:
            blocks.computed(table, len(table.rows[0]) * blocks.block_tokens[0])

    @property
    def _next_step(self) -> int:
        """Behind all that were decided."""
        return self._steps[-1].batch.step + 1 if self._steps else 0

    # ------------------------------------------------------------------ requests

    def _touch(self, request_id: str) -> None:
        """Its row is another."""
        if self.is_watched:
            self._unseen.requests.add(request_id)

    def _lose_blocks(self, request_id: str, status: RequestStatus, step: int) -> None:
        """It waits again, from the beginning."""
        request = self._requests.get(request_id)
        if request is None or self._blocks is None:
            return
        self._blocks.close(request.table)
        request.status, request.num_computed, request.preempted_at = status, 0, step
        request.num_preemptions += status is RequestStatus.PREEMPTED
        self._touch(request_id)
        self._unseen.grown.pop(request_id, None)

    def _end(self, request_id: str, reason: FinishReason, time_s: float | None, told: str = "") -> None:
        request = self._requests.pop(request_id, None)
        if request is None or self._blocks is None:
            return
        lend_as = None if request.arrival is None else request.arrival.lend_as
        moves = lend_as is not None and reason is FinishReason.LENGTH
        if lend_as is not None and request.is_running and reason in _BY_ITSELF:
            self._holds[lend_as] = self._blocks.lend(request.table, request.num_computed)
        else:
            self._blocks.close(request.table)
        if request.arrival is not None and request.arrival.import_id is not None:
            self._end_hold(request.arrival.import_id)
        row = request.row(told or ("moved" if moves else str(reason)), time_s)
        self._ended.append(row)
        self._unseen.grown.pop(request_id, None)
        if self.is_watched:
            self._unseen.ended.append(row)
        if len(self._ended) > NUM_ENDED:
            gone = self._ended.popleft().id
            if gone not in self._requests:
                self.tenants.pop(gone, None)
            if self.is_watched:
                self._unseen.gone.append(gone)

    def _end_hold(self, hold_id: int) -> None:
        table = self._holds.pop(hold_id, None)
        if table is not None and self._blocks is not None:
            self._blocks.close_hold(table)


def _paired(shares: Sequence[ScheduledRequest], commits: Sequence[Commit]) -> Iterable[tuple[ScheduledRequest, Commit]]:
    """Shares and their commits, which are in the same order; of those who have ended since there is none."""
    if len(shares) == len(commits):
        return zip(shares, commits, strict=True)
    by_id = {share.request_id: share for share in shares}
    return [(by_id[commit.request_id], commit) for commit in commits]


def _config_of(started: EngineStarted) -> dict[str, Any]:
    groups: list[dict[str, Any]] = started.layout["groups"]
    return {
        "num_blocks": started.num_blocks,
        "block_size": started.layout["block_size"],
        "block_tokens": [group["pages_per_block"] * started.layout["block_size"] for group in groups],
        "num_groups": len(groups),
        "windows": [group["spec"]["window"] for group in groups],
        "max_num_seqs": started.scheduler["max_num_seqs"],
        "max_num_batched_tokens": started.scheduler["max_num_batched_tokens"],
        "max_model_len": started.max_model_len,
        "kv_cache_dtype": started.layout["kv_format"],
        "enable_prefix_caching": started.cache["enable_prefix_caching"],
        "speculation": None if started.speculation is None else started.speculation.get("method"),
    }
