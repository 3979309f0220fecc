"""The ideal schedule, against a simulation that moves every slot in every step."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.slots import SlotCount, SlotStep, continuous_schedule, static_schedule

LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=40)


def _step_by_step(lengths: list[int], num_slots: int, *, static: bool) -> list[tuple[int, int, bool]]:
    """Return (live slots, sum of ages, whether requests wait) of every step."""
    waiting = deque(lengths)
    running: list[list[int]] = []  # [tokens made, tokens wanted]
    steps: list[tuple[int, int, bool]] = []
    while waiting or running:
        if not (static and running):
            while waiting and len(running) < num_slots:
                running.append([0, waiting.popleft()])
        steps.append((len(running), sum(made for made, _ in running), bool(waiting)))
        for slot in running:
            slot[0] += 1
        running = [slot for slot in running if slot[0] < slot[1]]
    return steps


def _expanded(schedule: list[SlotStep]) -> list[tuple[int, int, bool]]:
    return [
        (part.live, part.first_ages + i * part.live, part.saturated) for part in schedule for i in range(part.num_steps)
    ]


@given(lengths=LENGTHS, num_slots=st.integers(1, 6))
def test_static_is_what_a_slot_by_slot_simulation_does(lengths: list[int], num_slots: int) -> None:
    assert _expanded(list(static_schedule(lengths, num_slots))) == _step_by_step(lengths, num_slots, static=True)


@given(lengths=LENGTHS, num_slots=st.integers(1, 6))
def test_continuous_is_what_a_slot_by_slot_simulation_does(lengths: list[int], num_slots: int) -> None:
    assert _expanded(list(continuous_schedule(lengths, num_slots))) == _step_by_step(lengths, num_slots, static=False)


def test_counts_of_the_hostage_example() -> None:
    lengths = [2000] + [20] * 9
    static = SlotCount.of(static_schedule(lengths, 10), 10)
    assert (static.num_steps, static.tokens) == (2000, 2180)
    assert static.useful_share == pytest.approx(0.109)


@given(lengths=LENGTHS, num_slots=st.integers(1, 6))
def test_continuous_wastes_nothing_while_somebody_waits(lengths: list[int], num_slots: int) -> None:
    count = SlotCount.of(continuous_schedule(lengths, num_slots), num_slots, saturated_only=True)
    assert count.tokens == count.num_steps * num_slots


def test_mean_age_is_over_slots_and_steps() -> None:
    # two slots with 3 and 5 tokens behind them, two steps: ages 3, 5, 4, 6
    assert SlotStep(2, 2, 8, True).mean_age == 4.5
