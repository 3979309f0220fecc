"""Events that are kept until somebody asks: whenever that is, every figure is what folding each at once gives."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from explain_loads import random_load
from pool_log import PoolLog, died_and_resumed
from twostroke import event_codec
from twostroke.api.admission import QueueLimits, RequestCost, check_overload
from twostroke.client.load import EngineLoad, LoadMeter
from twostroke.event_codec import LazyEvents, pack
from twostroke.events import EngineLost, Event, RequestArrived
from twostroke.live.state import LiveState
from twostroke.metrics.engine_metrics import FleetMetrics
from twostroke.metrics.exposition import EngineCollector, exposition


def pools() -> list[Event]:
    log = PoolLog()
    died_and_resumed(log, "a#0.0")
    return log.events


def lost() -> list[Event]:
    """Make events of an engine that died with live requests, and of the next one."""
    first, second = random_load(3)[:100], random_load(4)
    return [*first, EngineLost(first[-1].time_s, first[-1].process, "it died"), *second[:100]]


LOGS = {"one engine": random_load(2)[:200], "an engine that died": lost(), "pools": pools()}


class Server:
    """Events that a server folds, from its engines."""

    def __init__(self) -> None:
        self.engines = EngineCollector()
        metrics = FleetMetrics("m", self.engines.add)
        self.live = LiveState(metrics)
        self.num_read = 0

        def fold(event: Event) -> None:
            self.num_read += 1
            self.live.observe(event, metrics.observe(event))

        self.unread: LazyEvents[Event] = LazyEvents(fold)

    def shown(self) -> tuple[bytes, dict[str, Any]]:
        self.unread.catch_up()
        return exposition(self.engines), self.live.whole("m", self.live.time_s)


@pytest.mark.parametrize("name", LOGS)
@settings(max_examples=15)
@given(data=st.data())
def test_folding_in_any_portions_gives_the_same(name: str, data: st.DataObject) -> None:
    events = LOGS[name]
    asked_at = data.draw(st.sets(st.integers(0, len(events) - 1), max_size=8))
    max_bytes = data.draw(st.sampled_from((0, 1000, 20_000, 1 << 30)))
    kept, at_once, packed = Server(), Server(), [pack(event) for event in events]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(event_codec, "MAX_UNREAD_BYTES", max_bytes)
        for number, event in enumerate(events):
            kept.unread.append(packed[number])
            at_once.unread.note(event)
            at_once.unread.catch_up()
            num_unread_bytes = sum(len(other) for other in packed[kept.num_read : number + 1])
            assert num_unread_bytes <= max_bytes, "memory is bounded though nobody asks"
            if number in asked_at:
                assert kept.shown() == at_once.shown()
    assert kept.shown() == at_once.shown()


def test_nothing_is_folded_while_nobody_asks() -> None:
    server = Server()
    for event in LOGS["one engine"][:50]:
        server.unread.append(pack(event))
    assert server.num_read == 0
    server.shown()
    assert server.num_read == 50


def _sent(meter: LoadMeter, event: RequestArrived) -> None:
    arrival = event.arrival
    meter.sent(event.request_id, arrival.tenant, num_tokens=arrival.num_prompt_tokens, max_tokens=arrival.max_tokens)


@settings(max_examples=15)
@given(data=st.data())
def test_the_load_is_the_same_however_late_it_is_asked_for(data: st.DataObject) -> None:
    """Requests that are sent and aborted between events count in their order among them."""
    events = LOGS["one engine"]
    ids = [event.request_id for event in events if isinstance(event, RequestArrived)]
    asked_at = data.draw(st.sets(st.integers(0, len(events) - 1), max_size=8))
    aborted_at = data.draw(st.dictionaries(st.integers(0, len(events) - 1), st.sampled_from(ids), max_size=4))
    late, at_once = LoadMeter(8, is_fair=True), LoadMeter(8, is_fair=True)
    for number, event in enumerate(events):
        for meter in (late, at_once):
            if isinstance(event, RequestArrived):
                _sent(meter, event)
            meter.keep([pack(event)])
            if number in aborted_at:
                meter.ended(aborted_at[number])
        now: EngineLoad = at_once.load("")
        if number in asked_at:
            assert late.load("") == now
            assert [late.is_waiting(i) for i in ids] == [at_once.is_waiting(i) for i in ids]
    assert late.load("") == at_once.load("")
    assert late.num_sequences == at_once.num_sequences


COUNTS = st.integers(1, 100)


@given(
    limits=st.builds(QueueLimits, COUNTS, COUNTS, st.floats(1e-6, 1e3), COUNTS),
    num_slots=COUNTS,
    estimates=st.tuples(*[st.floats(0.0, 1e3)] * 5),
    data=st.data(),
)
def test_an_idle_engine_lets_in_what_can_be_at_all(
    limits: QueueLimits, num_slots: int, estimates: Iterable[float], data: st.DataObject
) -> None:
    """Whatever was measured: a server that is idle need not read its estimates."""
    names = ("step_s", "prefill_s_per_token", "decode_step_s", "step_s_per_sequence", "num_output_tokens")
    load = EngineLoad(num_slots, **dict(zip(names, estimates, strict=True)))
    num_sequences = data.draw(st.integers(0, limits.max_queued_requests))
    num_tokens = data.draw(st.integers(0, limits.max_queued_tokens))
    cost = RequestCost(num_sequences, num_tokens, limits.max_answer_bytes)
    cost.check_fits_empty_queue(limits)
    check_overload(load, limits, cost)
