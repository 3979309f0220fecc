"""The doctor's report on the limits that a server was given."""

from __future__ import annotations

from dataclasses import replace

import pytest

from explain_loads import random_load
from twostroke.config.scheduler import SchedulerConfig
from twostroke.event_codec import plain
from twostroke.events import EngineStarted
from twostroke.planner.constraint import Binding, constraint_of, limit_lines
from twostroke.planner.levers import levers_of
from twostroke.planner.signals import Signals


def history(*, alone_ms: float, itl_ms: float, ttft_ms: float, count: int = 500, **limits: str) -> Signals:
    started = random_load(0)[0]
    assert isinstance(started, EngineStarted)
    scheduler = plain(SchedulerConfig(**limits))
    return Signals(
        started=replace(started, scheduler=scheduler),
        decode_step={"p99": alone_ms / 1e3, "count": count},
        itl={"p99": itl_ms / 1e3, "count": count},
        ttft={"p99": ttft_ms / 1e3, "count": count},
    )


@pytest.mark.parametrize(
    ("alone_ms", "itl_ms", "ttft_ms", "told"),
    [
        (15.0, 22.9, 100.0, ["itl_slo 18.6 ms was missed: the time between tokens is 22.9 ms"]),
        (
            23.1,
            30.0,
            100.0,
            ["itl_slo 18.6 ms cannot be kept: a step without any prompt takes 23.1 ms at the 99th percentile"],
        ),
        (15.0, 18.0, 400.0, ["ttft_slo 300 ms was missed: the TTFT is 400 ms"]),
        (15.0, 18.0, 100.0, []),
        (20.4, 20.4, 329.0, []),  # up to 1.1 times a limit counts as kept
    ],
)
def test_a_limit_that_was_missed_or_cannot_be_kept(
    alone_ms: float, itl_ms: float, ttft_ms: float, told: list[str]
) -> None:
    found = limit_lines(history(alone_ms=alone_ms, itl_ms=itl_ms, ttft_ms=ttft_ms, itl_slo="18.6ms", ttft_slo="300ms"))
    assert len(found) == len(told)
    for line, words in zip(found, told, strict=True):
        assert words in line


def test_no_tighter_limit_is_offered_where_none_can_be_kept() -> None:
    cannot, can = (history(alone_ms=ms, itl_ms=60, ttft_ms=100, itl_slo="20ms") for ms in (23.1, 15.0))
    cannot.decode_step["p50"] = can.decode_step["p50"] = 0.005
    offered = [[lever.name for lever in levers_of(Binding.PROMPTS, found, None)] for found in (cannot, can)]
    assert "a tighter limit between tokens" not in offered[0]
    assert "a tighter limit between tokens" in offered[1]
    assert "cannot be kept" in limit_lines(cannot)[0]


@pytest.mark.parametrize(("itl_ms", "is_idle"), [(60, False), (21.9, True)])
def test_a_server_that_misses_its_limit_is_not_bound_by_nothing(itl_ms: float, is_idle: bool) -> None:
    found = history(alone_ms=5, itl_ms=itl_ms, ttft_ms=100, itl_slo="20ms")
    found.num_served, found.end_s, found.busy_s, found.memory_s = 50, 10.0, 3.0, 2.0
    assert (constraint_of(found)[0] is Binding.NONE) is is_idle
    assert bool(limit_lines(found)) is not is_idle


def test_nothing_is_said_without_limits_or_with_few_steps() -> None:
    assert limit_lines(history(alone_ms=90, itl_ms=90, ttft_ms=900)) == ()
    few = limit_lines(history(alone_ms=90, itl_ms=90, ttft_ms=1, count=20, itl_slo="50ms"))
    assert "cannot" not in few[0]
