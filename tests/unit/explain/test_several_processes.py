"""A sequence that runs in several processes has one lane, which leaves nothing out."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from fractions import Fraction

import pytest

from explain_loads import random_load
from pool_log import PROMPT, D, P, PoolLog, died_and_resumed
from twostroke.event_codec import pack
from twostroke.events import EventsDropped
from twostroke.explain.lane_reader import LaneReader
from twostroke.explain.recorder import FlightRecorder
from twostroke.explain.segments import Culprit, Label, Lane
from twostroke.explain.text import timeline_text
from twostroke.explain.timeline import timeline_for_tenant, timeline_of
from twostroke.explain.trace import trace_of
from twostroke.request import FinishReason


def the_lane(log: PoolLog, name: str = "a") -> Lane:
    (lane,) = timeline_of(log.events, name).lanes
    for before, after in itertools.pairwise(lane.segments):
        assert before.end_s == after.start_s, f"a gap behind {before}"
    total = sum(Fraction(s.end_s) - Fraction(s.start_s) for s in lane.segments)
    assert total == Fraction(lane.end_s) - Fraction(lane.begin_s)
    assert all(segment.reason for segment in lane.segments)
    return lane


def pieces(lane: Lane) -> list[tuple[Label, float, str]]:
    return [(segment.label, segment.end_s, segment.process) for segment in lane.segments]


def test_a_request_that_is_handed_over() -> None:
    log = PoolLog()
    log.handed_over("a#0.0", 0.0)
    lane = the_lane(log)
    assert pieces(lane) == [
        (Label.PREPARE, 0.25, P),
        (Label.PREFILL, 1.0, P),
        (Label.TRANSFER, 1.5, D),
        (Label.RECOMPUTE, 2.0, D),
        (Label.DECODE, 3.0, D),
    ]
    told = "4.000 MB from prefill-0.1 in 500.000 ms (0.00800 GB/s while bytes came), 50% of it during the prefill"
    assert lane.segments[2].reason == told
    assert (lane.begin_s, lane.end_s, lane.first_token_s, lane.finish_reason) == (0.0, 3.0, 1.0, FinishReason.LENGTH)
    assert (lane.num_prompt_tokens, lane.num_cached_tokens, lane.num_output_tokens) == (PROMPT, 4, 3)
    assert lane.is_complete
    assert lane.sequence_id == "a#0.0"
    assert lane.processes == (P, D)
    text = timeline_text(timeline_of(log.events, "a"))
    assert "what       where        why" in text
    assert f"transfer   {D}   {told}" in text


def waiting_for_the_receiver(*, prefilled_s: float = 1.0, first_s: float = 0.75, last_s: float, step_s: float) -> Lane:
    """Return a history whose receiver decodes for another request from `step_s` until 3 s, then looks for news."""
    log = PoolLog()
    log.arrive(D, "other#0.0", 0.0, arrival_s=0.0, max_tokens=9)
    log.prefill(D, "other#0.0", 0.0, 0.25)
    log.arrive(P, "a#0.0", 0.25, arrival_s=0.0, lend_as=1)
    log.prefill(P, "a#0.0", 0.25, prefilled_s, reason=FinishReason.LENGTH)
    log.decode(D, "other#0.0", step_s, 3.0)
    log.fetch("a#0.0", 1, 0.25, first_s, 3.0, last_s=last_s)
    log.arrive(D, "a#0.0", 3.0, arrival_s=0.0, num_tokens=PROMPT + 1, max_tokens=2, import_id=1)
    log.prefill(D, "a#0.0", 3.125, 4.0, cached=8, num_tokens=PROMPT + 1)
    log.events.sort(key=lambda event: event.time_s)
    return the_lane(log)


def test_the_receivers_running_step_is_no_transfer() -> None:
    lane = waiting_for_the_receiver(last_s=1.25, step_s=0.5)
    assert pieces(lane)[1:] == [
        (Label.PREFILL, 1.0, P),
        (Label.TRANSFER, 1.25, D),
        (Label.WAIT_STEP, 3.125, D),
        (Label.RECOMPUTE, 4.0, D),
    ]
    transfer, waited = lane.segments[2:4]
    assert transfer.reason.startswith(
        "4.000 MB from prefill-0.1 in 500.000 ms (0.00800 GB/s while bytes came), 50% of it"
    )
    assert waited.reason == "at decode-0.1 a step was running that decoded 1 request"


def test_a_step_that_began_later_is_waited_for_from_then_on() -> None:
    """Until then the notice of it was in transit, because no step of the receiver was running."""
    lane = waiting_for_the_receiver(last_s=1.25, step_s=2.0)
    assert pieces(lane)[2:4] == [(Label.TRANSFER, 2.0, D), (Label.WAIT_STEP, 3.125, D)]


def test_kv_that_came_during_the_prefill_leaves_the_step_alone() -> None:
    lane = waiting_for_the_receiver(last_s=0.875, step_s=0.5)
    assert pieces(lane)[1:3] == [(Label.PREFILL, 1.0, P), (Label.WAIT_STEP, 3.125, D)]
    (note,) = lane.notes
    assert note.startswith("transfer: 4.000 MB from prefill-0.1 in 125.000 ms")
    assert note.endswith("100% of it during the prefill")


def test_a_log_that_does_not_say_when_the_last_byte_came_leaves_all_of_it_to_the_transfer() -> None:
    assert pieces(waiting_for_the_receiver(last_s=0.0, step_s=0.5))[2] == (Label.TRANSFER, 3.0, D)


def test_waits_before_the_transfer_have_their_causes() -> None:
    """The receiver notes the request after one step, and has blocks for it after another two."""
    log = PoolLog()
    log.arrive(D, "other#0.0", 0.0, arrival_s=0.0, max_tokens=9)
    log.prefill(D, "other#0.0", 0.0, 2.0, num_tokens=7)
    log.arrive(P, "a#0.0", 0.25, arrival_s=0.0, lend_as=1)
    log.prefill(P, "a#0.0", 0.25, 1.0, reason=FinishReason.LENGTH)
    for begin_s in (2.0, 3.0):
        log.decode(D, "other#0.0", begin_s, begin_s + 1)
    log.fetch("a#0.0", 1, 2.0, 4.25, 4.5, last_s=4.5)
    began, ended = log.events[-2:]
    log.events[-2:] = [replace(began, time_s=4.0), ended]
    log.arrive(D, "a#0.0", 4.5, arrival_s=0.0, num_tokens=PROMPT + 1, max_tokens=2, import_id=1)
    log.prefill(D, "a#0.0", 4.5, 5.0, cached=8, num_tokens=PROMPT + 1)
    lane = the_lane(log)
    assert pieces(lane)[1:] == [
        (Label.PREFILL, 1.0, P),
        (Label.WAIT_STEP, 2.0, D),
        (Label.WAIT_KV, 4.0, D),
        (Label.TRANSFER, 4.5, D),
        (Label.RECOMPUTE, 5.0, D),
    ]
    waited = lane.segments[3]
    assert (waited.reason, waited.because_of) == (f"for blocks at {D}", (Culprit("other#0.0", PROMPT + 2),))


def test_one_whose_transfer_failed_computes_its_prompt_again() -> None:
    log = PoolLog()
    log.handed_over("a#0.0", 0.0, problem="the other side has closed the connection.")
    lane = the_lane(log)
    transfer, again = lane.segments[2:4]
    assert transfer.reason == "from prefill-0.1, failed: the other side has closed the connection."
    assert (again.label, again.num_tokens) == (Label.RECOMPUTE, PROMPT + 1)
    assert lane.num_cached_tokens == 4, "what its first process found"


def test_one_whose_process_died_goes_on_elsewhere() -> None:
    log = PoolLog()
    died_and_resumed(log, "a#0.0")
    lane = the_lane(log)
    assert pieces(lane)[2:] == [
        (Label.RECOMPUTE, 2.0, D),
        (Label.RESUME, 5.0, ""),
        (Label.RECOMPUTE, 6.0, "decode-0.2"),
        (Label.DECODE, 7.0, "decode-0.2"),
    ]
    assert lane.segments[3].reason == "decode-0.1 was ended by signal 9; it goes on from what was delivered"
    assert (lane.num_prompt_tokens, lane.num_output_tokens, lane.finish_reason) == (PROMPT, 4, FinishReason.LENGTH)
    assert lane.first_token_s == 1.0


def test_a_step_that_its_process_did_not_end() -> None:
    log = PoolLog()
    log.arrive(P, "a#0.0", 0.0, arrival_s=0.0, lend_as=1)
    log.prefill(P, "a#0.0", 0.0, 1.0)
    del log.events[-1]  # its result
    log.lose(P, 3.0)
    assert pieces(the_lane(log)) == [(Label.PREFILL, 3.0, P)]
    log.arrive(D, "a#0.0@1", 4.0, arrival_s=0.0, max_tokens=5)
    lane = the_lane(log)
    assert pieces(lane) == [(Label.PREFILL, 3.0, P), (Label.RESUME, 4.0, "")]
    assert lane.finish_reason is None


def test_tokens_that_came_too_late_are_not_counted_twice() -> None:
    """The decode process that was to go on with it dies during its prefill, which ends all the same."""
    log = PoolLog()
    log.arrive(P, "a#0.0", 0.0, arrival_s=0.0, lend_as=1)
    log.prefill(P, "a#0.0", 0.0, 1.0, reason=FinishReason.LENGTH)
    log.start("decode-1.1", 1.0)
    log.arrive("decode-1.1", "a#0.0@1", 2.0, arrival_s=0.0, max_tokens=5)
    log.prefill("decode-1.1", "a#0.0@1", 2.0, 3.0)
    log.decode("decode-1.1", "a#0.0@1", 3.0, 4.0, FinishReason.STOP)
    lane = the_lane(log)
    assert (lane.num_output_tokens, lane.first_token_s) == (2, 3.0)
    assert lane.notes == ("1 token came too late and not counted",)


def test_a_withdrawn_attempt_is_no_end_and_an_abort_is() -> None:
    log = PoolLog()
    log.arrive(P, "a#0.0", 0.0, arrival_s=0.0, lend_as=1)
    log.prefill(P, "a#0.0", 0.0, 4.0)
    result = log.events.pop()
    log.fetch("a#0.0", 1, 0.0, 0.0, 0.5)
    del log.events[-1]  # it is on its way
    log.lose(D, 1.0)
    log.end(P, "a#0.0", 1.5, FinishReason.ABORT)
    log.arrive(P, "a#0.0@1", 2.0, arrival_s=0.0, lend_as=2)
    log.end_everywhere("a#0.0", 3.0, FinishReason.ABORT)
    log.end(P, "a#0.0@1", 3.5, FinishReason.ABORT)
    log.events.append(result)
    lane = the_lane(log)
    assert pieces(lane) == [(Label.PREFILL, 1.0, P), (Label.RESUME, 2.0, ""), (Label.WAIT_STEP, 3.5, P)]
    assert lane.finish_reason is FinishReason.ABORT


@pytest.mark.parametrize(
    ("reason", "num_tokens", "end_s"),
    [(FinishReason.STOP, 1, 1.0), (FinishReason.LENGTH, None, 1.0), (FinishReason.ABORT, None, 2.0)],
)
def test_one_that_ends_on_its_way(reason: FinishReason, num_tokens: int | None, end_s: float) -> None:
    """By a stop string in its first token, because that was all it wanted, or because its caller has left."""
    for is_told_before in (False, True):
        log = PoolLog()
        log.arrive(P, "a#0.0", 0.0, arrival_s=0.0, lend_as=1)
        log.prefill(P, "a#0.0", 0.0, 1.0, reason=FinishReason.LENGTH)
        log.end_everywhere("a#0.0", 2.0, reason, num_tokens)
        if is_told_before:
            log.events[-2:] = reversed(log.events[-2:])
        log.arrive(D, "a#0.0", 2.5, arrival_s=0.0, num_tokens=PROMPT + 1, max_tokens=2, import_id=1)
        log.end(D, "a#0.0", 2.5, FinishReason.ABORT)
        if is_told_before:
            del log.events[-2:]  # then they cannot be told apart
        lane = the_lane(log)
        assert (lane.finish_reason, lane.end_s, lane.num_output_tokens) == (reason, end_s, 1)


def test_processes_are_not_mixed_up() -> None:
    """Two requests in four processes, events one between the other; a fifth dies and starts again meanwhile."""
    log, other = PoolLog(), PoolLog()
    log.handed_over("a#0.0", 0.0)
    other.handed_over("b#1.0", 0.125)
    elsewhere = {P: "prefill-1.1", D: "decode-1.1"}
    alone = the_lane(log)
    mixed = PoolLog()
    mixed.events = [*log.events, *(replace(event, process=elsewhere[event.process]) for event in other.events)]
    mixed.lose("decode-2.1", 1.7)
    mixed.start("decode-2.2", 1.8)
    mixed.events.sort(key=lambda event: event.time_s)
    assert the_lane(mixed) == alone
    reader = LaneReader(lambda _: True)
    ended = [lane.sequence_id for event in mixed.events for lane in reader.take(event)]
    assert ended == ["a#0.0", "b#1.0"]
    assert not reader.living()


def test_json_and_the_trace_say_where() -> None:
    log = PoolLog()
    died_and_resumed(log, "a#0.0")
    (lane,) = json.loads(json.dumps(timeline_of(log.events, "a").to_dict()))["lanes"]
    assert [segment["process"] for segment in lane["segments"]] == [P, D, D, "", "decode-0.2", "decode-0.2"]
    records = json.loads(json.dumps(trace_of(log.events)))["traceEvents"]
    processes = {r["args"]["name"]: r["pid"] for r in records if r["name"] == "process_name"}
    assert set(processes) == {"requests", "steps of prefill-0", "steps of decode-0"}
    slices = [record for record in records if record["ph"] == "X"]
    assert sum(record["pid"] == processes["steps of prefill-0"] for record in slices) == 1
    assert sum(record["pid"] == processes["steps of decode-0"] for record in slices) == 3
    tracks = [record for record in records if record["name"] == "thread_name"]
    assert len(tracks) == 1, "one lane for all attempts"


def test_a_tenant_sees_all_attempts_as_its_own() -> None:
    log = PoolLog()
    died_and_resumed(log, "a#0.0")
    (lane,) = timeline_for_tenant(log.events, "a", "").lanes
    assert lane == the_lane(log)


def test_a_recorder_that_lost_its_beginning_knows_every_process() -> None:
    log = PoolLog()
    recorder = FlightRecorder(minutes=1.0)
    for number in range(60):
        log.handed_over(f"r{number}#{number}.0", number * 4.0)
    for event in log.events:
        recorder.append(pack(event))
    first, second, gap, *_ = recorder.events()
    assert [first, second] == log.events[:2]
    assert isinstance(gap, EventsDropped)
    (lane,) = timeline_of(recorder.events(), "r59").lanes
    assert lane.is_complete


def test_one_process_is_as_before() -> None:
    (lane,) = timeline_of(random_load(3), "r3").lanes
    assert len(lane.processes) == 1
    assert " where " not in timeline_text(timeline_of(random_load(3), "r3"))


def test_a_lane_tells_why_the_gateway_chose_its_workers() -> None:
    """Each attempt counts once, and no other request's."""
    log = PoolLog()
    log.route("b#0.0", 0.0, "of another")
    log.route("a#0.0", 0.0, "the hand-over is predicted to pay")
    log.route("a#0.0@1", 4.0, "no prefill worker is ready")
    died_and_resumed(log, "a#0.0")
    log.events.sort(key=lambda event: event.time_s)
    assert [note for note in the_lane(log).notes if note.startswith("routed")] == [
        "routed: the hand-over is predicted to pay",
        "routed: no prefill worker is ready",
    ]
