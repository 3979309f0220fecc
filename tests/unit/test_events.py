from __future__ import annotations

import json

import pytest

from factories import uniform_layout
from twostroke.batch import (
    AdmittedRequest,
    BlockTableUpdate,
    CacheEnd,
    Commit,
    Limit,
    Preemption,
    ScheduledBatch,
    ScheduledRequest,
    Stroke,
)
from twostroke.config.cache import CacheConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.cost.expert_shares import ExpertShare
from twostroke.cost.step_cost import StepCost
from twostroke.errors import UnreadableEvent
from twostroke.event_codec import EVENT_LOG_VERSION, from_json, join, pack, plain, split, to_json, unpack
from twostroke.events import (
    EngineStarted,
    Event,
    EventRing,
    EventsDropped,
    ExpertsMeasured,
    MeasurementBegan,
    RequestArrived,
    RequestFinishedByCaller,
    StepCommitted,
    StepScheduled,
)
from twostroke.request import Arrival, FinishReason

LAYOUT = uniform_layout([None, 8], block_size=16, num_kv_heads=2, head_dim=8, kv_format="bf16")
SCHEDULED = ScheduledRequest("a", Stroke.DECODE, 9, 3, 2, True, (BlockTableUpdate(0, (4, 5)), BlockTableUpdate(1, ())))
COST = StepCost(1.5, 2.0, 3.0, 4.0, 0.5, "memory", 0.25)
BATCH = ScheduledBatch(
    step=3,
    requests=(SCHEDULED,),
    limited_by=Limit.KV,
    preemptions=(Preemption("b", "a"),),
    finished_request_ids=("c",),
    num_waiting=2,
    wait_reason="kv: …",
    head_request_id="b",
    admitted=(AdmittedRequest("a", 9, 4, CacheEnd.EVICTED),),
    num_running=1,
    num_free_blocks=7,
)
EVENTS: list[Event] = [
    EngineStarted(0.0, "p", plain(SchedulerConfig()), plain(CacheConfig()), plain(LAYOUT), 64, 128, "m"),
    MeasurementBegan(0.5, "p"),
    RequestArrived(1.0, "p", "a", Arrival("a", 0.5, 9, 4, -1, (b"\x00\xff" * 8,)), 7, "salt", 0.75),
    StepScheduled(2.0, "p", BATCH, COST),
    StepCommitted(3.0, "p", 3, (Commit("a", 2, (b"\x01" * 16,), FinishReason.STOP, 1), Commit("d", 0)), 0.25),
    RequestFinishedByCaller(4.0, "p", "a", FinishReason.STOP, 3),
    ExpertsMeasured(4.5, "p", ((ExpertShare(3, 0.5), ExpertShare(60, 1e-3)), (ExpertShare(8, 1.0),))),
    EventsDropped(5.0, "p", 12),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_a_line_gives_the_event_back(event: Event) -> None:
    line = to_json(event)
    assert "\n" not in line
    assert json.loads(line)["v"] == EVENT_LOG_VERSION
    read = from_json(line)
    assert read == event
    assert type(read) is type(event)


def test_packed_events_are_the_events() -> None:
    packed = [pack(event) for event in EVENTS]
    assert [unpack(event) for event in packed] == list(EVENTS)
    assert list(split(join(packed))) == list(EVENTS)


def test_states_come_back_as_their_types() -> None:
    read = from_json(to_json(EVENTS[3]))
    assert isinstance(read, StepScheduled)
    assert read.batch.limited_by is Limit.KV
    assert read.batch.requests[0].stroke is Stroke.DECODE


@pytest.mark.parametrize(
    "line",
    [
        "",
        "nonsense",
        "[]",
        "{}",
        '{"v":1,"event":"Party"}',
        '{"v":1,"event":"RequestArrived"}',
        '{"v":2,"event":"RequestArrived"}',
        '{"v":1,"event":"RequestFinishedByCaller","time_s":1,"process":"p","request_id":"a","reason":"bored"}',
    ],
)
def test_anything_else_is_refused(line: str) -> None:
    with pytest.raises(UnreadableEvent):
        from_json(line)


def test_the_ring_keeps_the_latest() -> None:
    ring = EventRing(2)
    for event in EVENTS:
        ring.append(event)
    assert list(ring) == EVENTS[-2:]
    assert len(ring) == 2
