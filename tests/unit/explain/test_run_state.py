"""The fold of a log says what the scheduler's own account says, and what each event has changed."""

from __future__ import annotations

import random

import pytest

from explain_loads import random_load, times_of
from pool_log import D, P, PoolLog, died_and_resumed
from twostroke.events import Event
from twostroke.explain.run_state import EventChanges, RunState
from twostroke.request import FinishReason, RequestStatus
from twostroke.scheduler.replay import scheduler_at_end


def taken(events: list[Event]) -> list[EventChanges]:
    run = RunState()
    return [run.take(event) for event in events]


@pytest.mark.parametrize("seed", range(20))
def test_requests_are_those_of_the_scheduler(seed: int) -> None:
    events = random_load(seed)
    for end in [*sorted(random.Random(seed).sample(range(2, len(events) + 1), 8)), len(events)]:
        place, scheduler = taken(events[:end])[-1].place, scheduler_at_end(events[:end])
        for request in place.requests.values():
            known = scheduler.get(request.request_id)
            assert known is not None
            assert (request.status, request.num_preemptions) == (known.status, known.num_preemptions)
            assert request.block_hashes == known.block_hashes
            if request.status is RequestStatus.RUNNING:
                assert place.num_tokens_held[request.request_id] >= request.num_computed_tokens
        assert len(place.requests) == place.num_here == scheduler.num_running + scheduler.num_waiting
        assert len(place.num_tokens_held) == place.num_running == scheduler.num_running


@pytest.mark.parametrize("seed", range(10))
def test_each_sequence_ends_once_with_its_times(seed: int) -> None:
    events = random_load(seed)
    ended = [sequence for one in taken(events) for sequence in one.ended]
    found = {sequence.request_id: sequence.times for sequence in ended}
    assert len(found) == len(ended)
    assert all(sequence.is_last for sequence in ended), "each request has one sequence"
    expected = times_of(events)
    assert {name: times.token_times_s for name, times in found.items()} == {
        name: times.token_times_s for name, times in expected.items()
    }
    assert {name: times.scheduled_s for name, times in found.items()} == {
        name: times.scheduled_s for name, times in expected.items()
    }


def test_a_sequence_goes_on_where_another_process_takes_it_in() -> None:
    log = PoolLog()
    died_and_resumed(log, "a#0.0")
    changes = taken(log.events)
    gone = [(one.place.name, request.request_id, reason) for one in changes for request, reason in one.gone]
    assert gone == [
        (P.partition(".")[0], "a#0.0", FinishReason.LENGTH),
        (D.partition(".")[0], "a#0.0", FinishReason.ERROR),
        (D.partition(".")[0], "a#0.0@1", FinishReason.LENGTH),
    ]
    ((last,),) = [one.ended for one in changes if one.ended]
    assert last.times.token_times_s == [1.0, 2.0, 6.0, 7.0]
    assert last.is_last
