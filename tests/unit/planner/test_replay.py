"""Replay answers what-ifs only where the simulated run matches the measured one."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
from rich.console import Console

from timed_engine import STEP_TIMES, history
from twostroke.config.scheduler import SchedulerConfig
from twostroke.cost.step_model import scaled
from twostroke.errors import InvalidParameter
from twostroke.events import Event, MeasurementBegan
from twostroke.measure.workload import with_arrivals, workload_of_lengths
from twostroke.planner.back_test import refusal
from twostroke.planner.replay import figures, measured_steps, replay_log
from twostroke.planner.show_replay import print_replayed, replayed_json
from twostroke.simulation.observed import observed_steps
from twostroke.simulation.settings import WhatIf

MORE_SLOTS = WhatIf(settings={"max_num_seqs": 8})
FASTER = WhatIf(settings={"request_rate_factor": 2})


@functools.cache
def log_of(num_requests: int = 16, apart_s: float = 0.1, noise: float = 0.0) -> list[Event]:
    workload = workload_of_lengths([(32, 24)] * num_requests)
    arrivals = [apart_s * i for i in range(num_requests)]
    return history(with_arrivals(workload, arrivals), SchedulerConfig(max_num_seqs=4), noise=noise)


def test_a_back_test_that_holds_lets_what_ifs_through() -> None:
    found = replay_log(log_of(), [MORE_SLOTS])
    assert found.refusal == ""
    assert len(found.what_ifs) == 1


def test_a_machine_that_others_use_does_not_spoil_the_back_test() -> None:
    """Steps take up to four times as long by chance; predictions add up to the measured time."""
    found = replay_log(log_of(40, noise=3.0), [MORE_SLOTS])
    assert found.refusal == ""
    assert figures(found.back_test.run)["output_tok_s"] == pytest.approx(figures(found.measured)["output_tok_s"], 0.05)


@pytest.mark.parametrize(("factor", "is_refused"), [(1.2, False), (1.35, True), (0.85, False), (0.7, True)])
def test_a_back_test_off_by_more_than_a_quarter_refuses_what_ifs(factor: float, is_refused: bool) -> None:
    found = replay_log(log_of(apart_s=0.0), [MORE_SLOTS], scaled(STEP_TIMES, factor))
    assert bool(found.refusal) is is_refused
    assert len(found.what_ifs) == (0 if is_refused else 1)
    if is_refused:
        assert "the back-test is off by" in found.refusal
        assert "more than the 25% allowed" in found.refusal
        assert "Record a longer run" in found.refusal
        assert replayed_json(found)["refusal"] == found.refusal
        assert replayed_json(found)["what_if"] == []
        console = Console(record=True, width=200)
        print_replayed(found, console)
        assert found.refusal in console.export_text()
        assert "what if A" not in console.export_text()


def test_what_ifs_of_a_figure_that_the_back_test_misses_are_withheld() -> None:
    """Other figures are within the limit, so they are shown."""
    stalled = [replace(event, time_s=event.time_s + 0.2) if event.time_s > 1.0 else event for event in log_of()]
    found = replay_log(stalled, [MORE_SLOTS], STEP_TIMES)
    off_by = replayed_json(found)["back_test"]["error"]
    missed = {name for name, error in off_by.items() if abs(error) > 0.25}
    assert found.refusal == ""
    assert "itl_max" in missed
    assert "itl_p50" not in missed
    (what_if,) = replayed_json(found)["what_if"]
    assert {name for name in off_by if what_if[name] is None} == missed
    console = Console(record=True, width=200)
    print_replayed(found, console)
    text = console.export_text()
    rows = {line[:16].strip(): line.split()[-1] for line in text.splitlines()}
    assert (rows["ITL max ms"], rows["ITL p50 ms"]) == ("-", f"{float(rows['ITL p50 ms']):g}")
    (note,) = [line for line in text.splitlines() if line.startswith("note: no what-if of ")]
    assert "ITL max ms" in note
    assert note.endswith("the back-test is off by more than 25% there")


def test_the_figure_that_is_off_most_is_named() -> None:
    measured = {"ttft_p50": 1.0, "tpot_p50": 0.1, "output_tok_s": 100.0, "itl_max": 1.0}
    assert refusal(measured | {"itl_max": 9.0}, measured) == "", "one gap is nothing to judge by"
    assert "+30.0% (tpot_p50)" in refusal(measured | {"tpot_p50": 0.13, "ttft_p50": 1.26}, measured)
    assert refusal(measured | {"output_tok_s": 75.0}, measured) == "", "a quarter is allowed"


def test_a_handful_of_requests_refuses_what_ifs() -> None:
    few, enough = (replay_log(log_of(count), [MORE_SLOTS]) for count in (9, 10))
    assert few.what_ifs == ()
    assert "9 requests with a token, fewer than the 10 needed" in few.refusal
    assert len(enough.what_ifs) == 1


def test_requests_that_came_at_once_have_no_rate() -> None:
    with pytest.raises(InvalidParameter, match="changes nothing: all 16 requests came at once"):
        replay_log(log_of(apart_s=0.0), [FASTER])
    with pytest.raises(InvalidParameter, match=r"came within 0\.0015 s of a run of"):
        replay_log(log_of(apart_s=0.0001), [FASTER])
    assert len(replay_log(log_of(apart_s=0.0), [WhatIf(settings={"request_rate_factor": 1})]).what_ifs) == 1
    assert len(replay_log(log_of(), [FASTER]).what_ifs) == 1
    barely = WhatIf(settings={"request_rate_factor": 1.001})
    assert len(replay_log(log_of(), [barely]).what_ifs) == 1, "they came over time, whatever the factor"
    slower = WhatIf(settings={"request_rate_factor": 0.0001})
    assert len(replay_log(log_of(apart_s=0.0001), [slower]).what_ifs) == 1, "then they come over time"


def test_steps_that_warmed_the_engine_up_are_not_fitted() -> None:
    events = log_of()
    begin = next(i for i, event in enumerate(events) if isinstance(event, MeasurementBegan))
    again = [*events, MeasurementBegan(events[-1].time_s, events[0].process), *events[begin + 1 :]]
    assert len(measured_steps(again)) == len(measured_steps(events)) == len(observed_steps(events))
