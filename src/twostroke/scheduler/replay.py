"""Replay of a recorded run, to compare its decisions. The scheduler is pure, so its log determines them all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from twostroke.batch import ScheduledBatch, StepTimer
from twostroke.config.cache import CacheConfig
from twostroke.config.layer_spec import KVSpec
from twostroke.config.scheduler import SchedulerConfig
from twostroke.config.speculation import SpeculativeConfig
from twostroke.cost.step_cost import Layers
from twostroke.events import (
    EngineLost,
    EngineStarted,
    Event,
    EventsDropped,
    ExpertsMeasured,
    KVBlockChecked,
    KVHoldEnded,
    KVImportBegan,
    KVImportEnded,
    MeasurementBegan,
    MemorySampled,
    PoolScaled,
    PrefixCacheReset,
    RequestArrived,
    RequestFinishedByCaller,
    RequestRouted,
    StepCommitted,
    StepScheduled,
    TokensDelivered,
    gap_error,
)
from twostroke.kv_cache.layout import KVGroup, KVLayout
from twostroke.kv_cache.manager import KVCacheManager
from twostroke.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class DecisionDifference:
    """The first decision that differs."""

    recorded: ScheduledBatch
    decided: ScheduledBatch


def replay(events: Iterable[Event]) -> DecisionDifference | None:
    """Feed the inputs of a log to a new scheduler, in their order.

    Args:
        events: a log from its EngineStarted on. A later EngineStarted begins another run.

    Returns:
        The first difference, block ids included; None if every decision is the same.

    Raises:
        InvalidParameter: the log has a gap, after which the scheduler's state is unknown.
    """
    return _replay(events)[0]


def scheduler_at_end(events: Iterable[Event]) -> Scheduler:
    """Return the scheduler at the end of a log, with the blocks that requests still hold.

    Args:
        events: as in replay.

    Raises:
        AssertionError: a decision differs from the log's.
        InvalidParameter: the log has a gap.
    """
    difference, scheduler = _replay(events)
    assert difference is None, f"{difference}"
    assert scheduler is not None, "the log is empty"
    return scheduler


def _replay(events: Iterable[Event]) -> tuple[DecisionDifference | None, Scheduler | None]:
    scheduler: Scheduler | None = None
    timer = StepTimer()
    hashes: dict[int, tuple[bytes, ...]] = {}
    for event in events:
        if isinstance(event, EngineStarted):
            scheduler, timer, hashes = scheduler_of(event), StepTimer(), {}
            continue
        assert scheduler is not None, f"a log begins with EngineStarted, not {type(event).__name__}"
        if isinstance(event, StepScheduled):
            timer.decided(event.batch.step, event.time_s)
        difference = _feed(scheduler, event, timer, hashes)
        if difference is not None:
            return difference, scheduler
    return None, scheduler


def scheduler_of(started: EngineStarted) -> Scheduler:
    """Return a scheduler like the recorded one, before its first request."""
    kv = KVCacheManager(
        layout_of(started.layout), started.num_blocks, CacheConfig(**started.cache), started.max_model_len
    )
    drafts = None if started.speculation is None else SpeculativeConfig(**started.speculation)
    return Scheduler(
        SchedulerConfig(**started.scheduler),
        kv,
        max_model_len=started.max_model_len,
        speculation=drafts,
        max_drafts=started.max_drafts,
        step_times=started.step_times,
        layers=layers_of(started),
    )


def layers_of(started: EngineStarted) -> Layers:
    """Return the layers of the recorded model, with their windows."""
    groups = started.layout["groups"]
    return Layers([group["spec"]["window"] for group in groups for _ in group["layer_ids"]])


def layout_of(fields: dict[str, Any]) -> KVLayout:
    """Return the KV layout of an EngineStarted."""
    groups = tuple(
        KVGroup(tuple(group["layer_ids"]), KVSpec(**group["spec"]), group["pages_per_block"])
        for group in fields["groups"]
    )
    return KVLayout(groups, fields["block_size"], fields["kv_format"])


def _feed(
    scheduler: Scheduler, event: Event, timer: StepTimer, hashes: dict[int, tuple[bytes, ...]]
) -> DecisionDifference | None:
    match event:
        case RequestArrived():
            scheduler.add_request(event.arrival)
        case RequestFinishedByCaller():
            scheduler.finish(event.request_id, event.reason)
        case StepCommitted():
            seconds = timer.ended(event.step, event.time_s, event.draft_time_s)
            scheduler.update(event.step, event.commits, seconds)
        case StepScheduled():
            return _decide(scheduler, event)
        case PrefixCacheReset() | KVBlockChecked() | KVImportBegan() | KVImportEnded() | KVHoldEnded():
            _change_cache(scheduler, event, hashes)
        case MeasurementBegan() | EngineLost() | RequestRouted() | PoolScaled() | TokensDelivered():
            pass
        case MemorySampled() | ExpertsMeasured():
            pass
        case EventsDropped():
            raise gap_error(event)
        case EngineStarted():
            raise AssertionError("one run at a time")
    return None


def _decide(scheduler: Scheduler, event: StepScheduled) -> DecisionDifference | None:
    decided = scheduler.schedule(event.time_s)
    return None if decided == event.batch else DecisionDifference(event.batch, decided)


def _take_out_of_use(scheduler: Scheduler, event: KVBlockChecked) -> None:
    if event.quarantined:
        suspects = scheduler.quarantine(event.request_id, event.entry, event.quarantined)
        assert suspects == event.suspects, f"{suspects} here; recorded: {event.suspects}"


def _change_cache(
    scheduler: Scheduler,
    event: PrefixCacheReset | KVBlockChecked | KVImportBegan | KVImportEnded | KVHoldEnded,
    hashes: dict[int, tuple[bytes, ...]],
) -> None:
    match event:
        case PrefixCacheReset():
            scheduler.reset_prefix_cache()
        case KVBlockChecked():
            _take_out_of_use(scheduler, event)
        case KVImportBegan():
            begun = scheduler.handover.begin_import(event.import_id, event.block_hashes, event.num_tokens)
            assert begun is not None, f"no room for import {event.import_id}, which had some"
            assert begun.rows == event.rows, f"{begun.rows} here; recorded: {event.rows}"
            hashes[event.import_id] = event.block_hashes
        case KVImportEnded():
            if not event.problem:
                scheduler.handover.complete_import(event.import_id, hashes[event.import_id])
        case KVHoldEnded():
            scheduler.handover.end_hold(event.hold_id)
