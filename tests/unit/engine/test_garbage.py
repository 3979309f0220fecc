"""Garbage is collected when no request waits for a token."""

import gc
from collections.abc import Generator

import pytest

from twostroke.batch import BlockTableUpdate, Commit, ScheduledRequest, Stroke
from twostroke.engine.garbage import IDLE_THRESHOLD, OLDER_THRESHOLDS, YOUNG_THRESHOLD, collect_when_idle, paused_gc
from twostroke.engine.token_update import SequenceStatus, TokenUpdate


@pytest.fixture
def young() -> Generator[list[list[int]]]:
    """Start without young objects, and with no collection but those that the test asks for."""
    before = gc.get_threshold()
    gc.collect()
    gc.set_threshold(0)
    yield []
    gc.set_threshold(*before)


def test_a_lull_is_used_where_a_look_is_due_soon(young: list[list[int]]) -> None:
    young.extend([] for _ in range(IDLE_THRESHOLD + 100))
    assert IDLE_THRESHOLD < gc.get_count()[0] < YOUNG_THRESHOLD
    collect_when_idle()
    assert gc.get_count()[0] < 100


def test_the_old_are_looked_through_in_their_turn(young: list[list[int]]) -> None:
    seen: list[int] = []
    gc.callbacks.append(lambda phase, found: seen.append(found["generation"]) if phase == "start" else None)
    try:
        for _ in range((OLDER_THRESHOLDS[0] + 2) * (OLDER_THRESHOLDS[1] + 2)):
            young.clear()
            young.extend([] for _ in range(IDLE_THRESHOLD + 100))
            collect_when_idle()
    finally:
        gc.callbacks.pop()
    assert seen.count(2) == 1
    assert seen.count(1) == OLDER_THRESHOLDS[1] + 1
    assert seen.count(0) > OLDER_THRESHOLDS[0] * (OLDER_THRESHOLDS[1] + 1)


def test_a_lull_is_left_alone_where_there_is_little_to_look_at(young: list[list[int]]) -> None:
    young.extend([] for _ in range(IDLE_THRESHOLD // 2))
    collect_when_idle()
    assert gc.get_count()[0] >= IDLE_THRESHOLD // 2


def test_a_tokens_share_of_a_step_is_never_looked_through() -> None:
    tables = (BlockTableUpdate(0, (1, 2)),)
    share = ScheduledRequest("a", Stroke.DECODE, 5, 1, 0, samples_token=True, block_tables=tables)
    update = TokenUpdate("a#0.0", 1.0, (3,), status=SequenceStatus(scheduled_time_s=0.5))
    for made in (*tables, share, update, update.status, Commit("a", 1)):
        assert not gc.is_tracked(made), made


def test_a_model_is_loaded_without_a_collection_and_collection_goes_on_afterwards() -> None:
    seen: list[bool] = []

    def fail() -> None:
        with paused_gc():
            seen.append(gc.isenabled())
            raise ZeroDivisionError

    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        fail()
    assert seen == [False]
    assert gc.isenabled()


def test_who_has_disabled_collection_finds_it_disabled() -> None:
    gc.disable()
    try:
        with paused_gc():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
