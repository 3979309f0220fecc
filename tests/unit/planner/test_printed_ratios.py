"""plan, doctor, explain and replay print no meaningless ratio and no `0.00`, for inputs of any size."""

from __future__ import annotations

import functools
import io
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from explain_loads import random_load
from tiers import examples
from timed_engine import STEP_TIMES, history
from twostroke.config.engine import EngineConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.cost.step_cost import MachineLimits
from twostroke.cost.step_model import scaled
from twostroke.events import Event, RequestArrived
from twostroke.explain.text import timeline_text
from twostroke.explain.timeline import timeline_of
from twostroke.measure.workload import with_arrivals, workload_of_lengths
from twostroke.plain_words import MOST_TIMES, deviation, exact_ms, multiple, significant
from twostroke.planner import machine
from twostroke.planner.doctor import diagnose
from twostroke.planner.options import PlanOptions
from twostroke.planner.plan import make_plan
from twostroke.planner.replay import replay_log
from twostroke.planner.show import print_plan
from twostroke.planner.show_doctor import print_diagnosis
from twostroke.planner.show_replay import print_replayed
from twostroke.planner.words import milliseconds
from twostroke.simulation.settings import WhatIf

SCALES = st.floats(-9, 9).map(lambda power: 10.0**power)
POSITIVE = st.floats(1e-30, 1e30)
_ZERO = re.compile(r"(?<![\d.,])0\.00+(?![\d.])")
_TIMES = re.compile(r"([\d,]+(?:\.\d+)?(?:e[+-]?\d+)?)(?: times|x the time)")
_PERCENT = re.compile(r"([\d,]+(?:\.\d+)?)%")
_COUNTED = re.compile(r"(preempted|computed again|evicted and computed again) ([\d,]+) times")


def assert_readable(text: str) -> None:
    """Check that a nonzero number is not printed as zero, and no ratio beyond the bound as a number."""
    assert not _ZERO.search(text), text
    text = _COUNTED.sub("", text)
    times = [float(number.replace(",", "")) for number in _TIMES.findall(text)]
    percent = [float(number.replace(",", "")) for number in _PERCENT.findall(text)]
    assert all(number <= MOST_TIMES for number in times), text
    assert all(number <= 100 * (MOST_TIMES - 1) for number in percent), text


def scaled_log(events: list[Event], factor: float) -> list[Event]:
    """Return the log of a machine on which everything takes `factor` times as long."""

    def changed(event: Event) -> dict[str, Any]:
        values = {one.name: getattr(event, one.name) for one in fields(event)}
        return {name: value * factor for name, value in values.items() if name.endswith("_s") and value is not None}

    return [replace(event, **changed(event)) for event in events]


@given(POSITIVE)
def test_no_helper_prints_zero_for_a_number_that_is_not(value: float) -> None:
    for text in (significant(value), milliseconds(value), multiple(value), exact_ms(value)):
        assert re.search("[1-9]", text), text


@given(st.floats(0, allow_nan=False))
def test_no_helper_prints_a_ratio_beyond_the_bound(ratio: float) -> None:
    assert_readable(f"{multiple(ratio)} times, off by {deviation(ratio - 1)}")


@pytest.mark.parametrize("text", ["0.00 times", "12,279 times", "0.000 ms", "off by +1,227,900.0%", "2e+05x the time"])
def test_the_check_bites(text: str) -> None:
    with pytest.raises(AssertionError):
        assert_readable(text)


LOADS: dict[str, dict[str, Any]] = {
    "little memory": {"workload": workload_of_lengths([(256, 200)] * 20), "num_blocks": 130},
    "few slots": {"workload": workload_of_lengths([(32, 64)] * 20), "scheduler": SchedulerConfig(max_num_seqs=4)},
    "long prompts": {
        "workload": with_arrivals(
            workload_of_lengths([(16, 200)] * 6 + [(1500, 4)] * 4), [0.0] * 6 + [1.0, 2.0, 3.0, 4.0]
        ),
        "scheduler": SchedulerConfig(max_num_batched_tokens=1024),
    },
    "short outputs": {"workload": workload_of_lengths([(300, 3)] * 20)},
    "idle": {"workload": with_arrivals(workload_of_lengths([(32, 8)] * 12), [30.0 * i for i in range(12)])},
}


@functools.cache
def log_of(load: str) -> list[Event]:
    return history(**LOADS[load])


def printed(show: Any, found: Any) -> str:
    console = Console(record=True, width=200, file=io.StringIO())
    show(found, console)
    return console.export_text()


@settings(max_examples=examples(20), deadline=None)
@given(st.sampled_from(sorted(LOADS)), SCALES, SCALES)
def test_the_doctor_on_machines_of_any_speed(load: str, factor: float, step_factor: float) -> None:
    events = scaled_log(log_of(load), factor)
    for step_times in (None, scaled(STEP_TIMES, step_factor)):
        assert_readable(printed(print_diagnosis, diagnose(events, step_times)))


@settings(max_examples=examples(20), deadline=None)
@given(st.sampled_from(sorted(LOADS)), SCALES, SCALES)
def test_a_replay_with_step_times_of_any_size(load: str, factor: float, step_factor: float) -> None:
    events = scaled_log(log_of(load), factor)
    what_ifs = [WhatIf(settings={"max_num_seqs": 8})]
    assert_readable(printed(print_replayed, replay_log(events, what_ifs, scaled(STEP_TIMES, step_factor))))


@settings(max_examples=examples(20), deadline=None)
@given(st.integers(0, 9), SCALES)
def test_explain_on_machines_of_any_speed(seed: int, factor: float) -> None:
    events = scaled_log(random_load(seed), factor)
    arrived = [event.request_id for event in events if isinstance(event, RequestArrived)]
    for request_id in arrived[:3]:
        assert_readable(timeline_text(timeline_of(events, request_id.split("#")[0])))


@pytest.mark.parametrize("flops", [1e3, 1e9, 1e15, 1e21])
@pytest.mark.parametrize("rate", [1e3, 1e9, 1e15])
def test_a_plan_for_machines_of_any_speed(
    flops: float, rate: float, random_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The what-ifs of published devices are compared with a machine that is far slower or faster."""
    monkeypatch.setattr(machine, "measure_machine_limits", lambda *_, **__: MachineLimits(flops, rate))
    config = EngineConfig.from_keywords(model=str(random_models["llama"]), threads=1)
    for prompt in (None, 100):
        options = PlanOptions(memory=1 << 30, price_per_hour=1e-6 if prompt else 1e6)
        assert_readable(printed(print_plan, make_plan(config, options)))
