"""`LiveEngine`: one process that runs steps, as the page shows it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from twostroke.batch import ScheduledBatch, ScheduledRequest
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
    StepCommitted,
    StepScheduled,
)
from twostroke.explain.run_state import EventChanges, PlaceState, RequestState
from twostroke.explain.step import DecidedStep
from twostroke.kv_cache.block_pool import BlockTable
from twostroke.live.block_map import BlockMap
from twostroke.live.rows import (
    WINDOW_S,
    SequenceRow,
    figures_of,
    histograms_of,
    row_of_request,
    row_of_step,
    waiting_by_reason,
)
from twostroke.metrics.engine_metrics import EngineMetrics
from twostroke.request import FinishReason, RequestStatus

NUM_STEPS = 240
"""Number of recent steps that are kept."""
NUM_ENDED = 60
"""Number of ended requests that are still shown."""
_NORMAL_ENDS = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(slots=True)
class _Changes:
    """Changes that no viewer has received yet."""

    requests: set[str] = field(default_factory=set[str])
    ended: list[SequenceRow] = field(default_factory=list[SequenceRow])
    grown: dict[str, list[list[Any]]] = field(default_factory=dict[str, list[list[Any]]])
    """Block table changes by request. Per KV group: the entry from which the row is replaced, its first held entry, and
    the blocks that follow."""
    gone: list[str] = field(default_factory=list[str])
    steps: set[int] = field(default_factory=set[int])
    """Numbers of steps that were decided or whose result arrived."""
    stamp: int = 0
    is_settled: bool = False
    """Whether rates have been reported as 0 after a pause."""
    needs_whole: bool = True
    """Whether a complete state must be sent, because the engine began anew."""

    def note_growth(self, share: ScheduledRequest, firsts: Sequence[int]) -> None:
        """Record that a request's block table is cut and continues with other blocks."""
        known = self.grown.get(share.request_id) or [[update.start, 0, []] for update in share.block_tables]
        self.grown[share.request_id] = [
            [min(start, update.start), first, [*ids[: max(0, update.start - start)], *update.block_ids]]
            for (start, _, ids), update, first in zip(known, share.block_tables, firsts, strict=True)
        ]


class LiveEngine:
    """State of one process, updated event by event; `whole` returns all of it, `changes` the changes since the last
    call.

    Observing an event is cheap whether or not a viewer is connected. Rows and figures are computed on request.

    Args:
        metrics: metrics that must count each event before it is passed here.
        place: the process's part of the folded run state.
    """

    def __init__(self, metrics: EngineMetrics, place: PlaceState) -> None:
        self._metrics = metrics
        self._place = place
        self._blocks: BlockMap | None = None
        self._config: dict[str, Any] = {}
        self._lost = ""
        self._ended: deque[SequenceRow] = deque()
        self._steps: deque[DecidedStep] = deque(maxlen=NUM_STEPS)
        self._stamp = 0
        self._last_s = 0.0
        """Time of the last event."""
        self._changes = _Changes()
        self.is_watched = False
        """Whether changes are recorded; the complete state is kept in any case."""
        self.tenants: dict[str, str] = {}
        """Tenants of the shown requests, by request id."""

    def observe(self, event: Event, taken: EventChanges) -> None:
        """Apply the next event and the changes derived from it."""
        self._stamp += 1
        self._last_s = event.time_s
        blocks = self._blocks
        match event:
            case StepScheduled() if blocks is not None:
                self._scheduled(event.batch, taken, blocks)
            case StepCommitted() if blocks is not None:
                self._committed(taken, blocks)
            case RequestArrived() if blocks is not None:
                blocks.open(event.request_id)
                self.tenants[event.request_id] = event.arrival.tenant
                self._mark_changed(event.request_id)
            case EngineStarted():
                self._clear(taken)
                self._steps.clear()  # a new process numbers its steps from 0
                self._config, self._lost = _config_of(event), ""
            case EngineLost():
                self._clear(taken)
                self._lost = event.cause
            case _ if blocks is not None:
                self._memory_changed(event, blocks)
            case _:
                pass
        for request, reason in taken.gone:
            self._end(request, reason, event.time_s)

    def kv_shares(self, name_of: Callable[[str], str]) -> dict[str, float]:
        """Return the share of the usable KV blocks that running requests hold, by `name_of(tenant)`."""
        held: dict[str, set[int]] = {}
        if self._blocks is None or not self._blocks.num_usable:
            return {}
        for request in self._shown():
            if request.is_running:
                tenant = "" if request.arrival is None else request.arrival.tenant
                held.setdefault(name_of(tenant), set()).update(self._tables[request.request_id].tail_first())
        return {name: len(blocks) / self._blocks.num_usable for name, blocks in held.items()}

    @property
    def labels(self) -> Mapping[str, str]:
        """Labels of its metrics."""
        return self._metrics.labels

    # ------------------------------------------------------------------ what the page gets

    def whole(self, now_s: float) -> dict[str, Any]:
        """Return the complete state: "Engine" in docs/page.md."""
        started, blocks = self._place.started, self._blocks
        requests = self._shown()
        tables = {request.request_id: self._tables[request.request_id] for request in requests if request.is_running}
        return {
            "process": "" if started is None else started.process,
            "lost": self._lost,
            "config": self._config,
            **self._figures(now_s),
            "steps": list(map(row_of_step, self._steps)),
            "requests": [*self._ended, *map(row_of_request, requests)],
            "rows": {
                request_id: [[first, row] for first, row in zip(table.first_held, table.rows, strict=True)]
                for request_id, table in tables.items()
            },
            "blocks": {"runs": [] if blocks is None else blocks.runs(), "written": self._written()},
        }

    def watch(self) -> None:
        """Start recording changes; the first viewer gets the complete state."""
        self.is_watched = True
        self.clear_changes()
        self._changes.needs_whole = True

    def clear_changes(self) -> None:
        """Forget the recorded changes: all viewers have them."""
        if self._blocks is not None:
            self._blocks.take_changes()
        self._changes = _Changes(stamp=self._stamp, needs_whole=False)

    def changes(self, now_s: float) -> dict[str, Any] | None:
        """Return the changes since the last call, or None if there are none."""
        unseen, blocks = self._changes, self._blocks
        if unseen.needs_whole:
            whole = {"whole": True, **self.whole(now_s)}
            self.clear_changes()
            return whole
        if unseen.stamp == self._stamp:
            return self._settled(now_s)
        # a request that lost its blocks may still get the result of a step that was running then
        touched = [
            request
            for request in self._shown()
            if request.status is not RequestStatus.WAITING or request.request_id in unseen.requests
        ]
        changes: dict[str, Any] = {
            **self._figures(now_s),
            "steps": [row_of_step(step) for step in self._steps if step.batch.step in unseen.steps],
            "requests": [*unseen.ended, *map(row_of_request, sorted(touched, key=lambda one: one.request_id))],
            "gone": unseen.gone,
            "rows": unseen.grown,
            "blocks": {"set": [] if blocks is None else blocks.take_changes(), "written": self._written()},
        }
        self.clear_changes()
        return changes

    def _settled(self, now_s: float) -> dict[str, Any] | None:
        """Return the figures once after a pause as long as the window of the rates, which are then 0."""
        if self._changes.is_settled or not self._steps or now_s < self._last_s + WINDOW_S:
            return None
        self._changes.is_settled = True
        return {**self._figures(now_s), "steps": [], "requests": [], "gone": [], "rows": {}}

    def _figures(self, now_s: float) -> dict[str, Any]:
        num_preempted = sum(request.status is RequestStatus.PREEMPTED for request in self._shown())
        return {
            "figures": {**figures_of(self._metrics, self._steps, now_s), "preempted": num_preempted},
            "waiting_by_reason": waiting_by_reason(self._metrics),
            "histograms": histograms_of(self._metrics),
        }

    def _written(self) -> list[int]:
        """Return the ids of the blocks that the last step with tokens writes."""
        if not self._steps or self._blocks is None:
            return []
        sizes = self._blocks.block_tokens
        written: set[int] = set()
        for share in self._steps[-1].batch.requests:
            request, table = self._place.requests.get(share.request_id), self._blocks.tables.get(share.request_id)
            if request is not None and table is not None and request.is_running:
                begin, last = share.token_range.start, share.token_range.stop - 1
                for row, first, size in zip(table.rows, table.first_held, sizes, strict=True):
                    written.update(row[max(first, begin // size) : last // size + 1])
        return sorted(written)

    @property
    def _tables(self) -> Mapping[str, BlockTable]:
        return {} if self._blocks is None else self._blocks.tables

    def _shown(self) -> list[RequestState]:
        """Return the requests that are here and have a block table."""
        tables = self._tables
        return [request for name, request in self._place.requests.items() if name in tables]

    # ------------------------------------------------------------------ events

    def _clear(self, taken: EventChanges) -> None:
        """End all requests of a process that started anew or was lost."""
        time_s = self._steps[-1].time_s if self._steps else None
        for request, reason in taken.gone:
            self._end(request, reason, time_s, told="lost")
        self._blocks = None if self._place.started is None else BlockMap(self._place.started)
        self._changes.needs_whole = True

    def _memory_changed(self, event: Event, blocks: BlockMap) -> None:
        match event:
            case PrefixCacheReset():
                blocks.forget_hashes()
            case KVBlockChecked():
                for request_id in event.suspects.started_over:
                    self._lose_blocks(request_id, blocks)
                if event.quarantined:
                    blocks.quarantine([block_id for block_id in event.quarantined if block_id is not None])
            case KVImportBegan():
                blocks.begin_import(event)
            case KVImportEnded():
                if event.problem:
                    blocks.end_hold(event.import_id)
                else:
                    blocks.complete_import(event.import_id)
            case KVHoldEnded():
                blocks.end_hold(event.hold_id)
            case _:
                pass

    def _scheduled(self, batch: ScheduledBatch, taken: EventChanges, blocks: BlockMap) -> None:
        blocks.cache_prefetched()
        for preemption in batch.preemptions:
            self._lose_blocks(preemption.request_id, blocks)
        if batch.kv_moves is not None:
            blocks.moved(batch.kv_moves)
        cached: dict[str, int] = {}
        for admitted in batch.admitted:
            cached[admitted.request_id] = admitted.num_cached_tokens
            arrival = self._place.arrival_of(admitted.request_id)
            blocks.end_hold(None if arrival is None else arrival.import_id)
        for share in taken.grown:
            table = blocks.grow(share, cached.get(share.request_id, 0))
            if self.is_watched:
                self._changes.note_growth(share, table.first_held)
        if taken.step is not None and not batch.is_empty:
            self._steps.append(taken.step)
        if self.is_watched and self._steps:  # even after an empty step: the wait reason may have changed
            self._changes.steps.add(self._steps[-1].batch.step)

    def _committed(self, taken: EventChanges, blocks: BlockMap) -> None:
        for request, share in taken.computed:
            if share.num_draft_tokens:
                blocks.roll_back(request.request_id, request.num_computed_tokens)
            blocks.computed(request.request_id, request.block_hashes, request.num_computed_tokens)
        blocks.cache_prefetched()
        if self.is_watched and taken.step is not None:
            self._changes.steps.add(taken.step.batch.step)

    # ------------------------------------------------------------------ requests

    def _mark_changed(self, request_id: str) -> None:
        """Mark a request's row as changed."""
        if self.is_watched:
            self._changes.requests.add(request_id)

    def _lose_blocks(self, request_id: str, blocks: BlockMap) -> None:
        """Release a request's blocks after a preemption or a failed block check; it waits and starts over."""
        if request_id in blocks.tables:
            blocks.close(request_id)
            blocks.open(request_id)
            self._mark_changed(request_id)
            self._changes.grown.pop(request_id, None)

    def _end(self, request: RequestState, reason: FinishReason, time_s: float | None, told: str = "") -> None:
        blocks, request_id = self._blocks, request.request_id
        if blocks is None or request_id not in blocks.tables:
            return
        arrival = request.arrival
        lend_as = None if arrival is None else arrival.lend_as
        if lend_as is not None and request.is_running and reason in _NORMAL_ENDS:
            blocks.lend(request_id, lend_as, request.num_computed_tokens)
        else:
            blocks.close(request_id)
        blocks.end_hold(None if arrival is None else arrival.import_id)
        moves = lend_as is not None and reason is FinishReason.LENGTH
        row = row_of_request(request, told or ("moved" if moves else str(reason)), time_s)
        self._ended.append(row)
        self._changes.grown.pop(request_id, None)
        if self.is_watched:
            self._changes.ended.append(row)
        if len(self._ended) > NUM_ENDED:
            gone = self._ended.popleft().id
            if gone not in self._place.requests:
                self.tenants.pop(gone, None)
            if self.is_watched:
                self._changes.gone.append(gone)


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
        "floors_are_estimates": started.machine is not None and started.machine.is_estimate,
    }
