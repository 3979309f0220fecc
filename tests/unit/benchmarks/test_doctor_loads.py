"""The five loads of `benchmarks reproduce doctor-loads`, on an engine in simulated time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.claim import ReproduceOptions
from benchmarks.reproduce import planner as loads
from timed_engine import STEP_TIMES, history
from twostroke.config.cache import CacheConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.cost.step_model import scaled
from twostroke.errors import InvalidParameter
from twostroke.events import Event
from twostroke.measure.workload import Workload
from twostroke.planner.doctor import diagnose


def log_of(
    load: loads.DoctorLoad, noise: float, pace: float, slow_steps: Mapping[int, float] | None = None
) -> list[Event]:
    return history(
        load.workload(4096),
        load.scheduler,
        load.cache,
        num_blocks=load.cache.num_kv_blocks or 4096,
        max_model_len=load.context,
        step_times=scaled(STEP_TIMES, pace),
        noise=noise,
        slow_steps=slow_steps,
    )


@pytest.mark.parametrize("name", loads.LOADS)
@pytest.mark.parametrize(
    ("noise", "pace"), [(0.05, 0.5), (2.0, 1.0)], ids=["a quiet machine", "a slow one that others use"]
)
def test_each_load_gets_its_verdict(name: str, noise: float, pace: float) -> None:
    load = loads.LOADS[name]
    found = diagnose(log_of(load, noise, pace))
    assert load.is_right(found), (found.constraint, found.evidence, found.levers, found.remark)


@pytest.mark.parametrize("name", loads.LOADS)
def test_a_first_step_that_somebody_slowed_changes_no_verdict(name: str) -> None:
    """The first step has more prompt tokens than any other in some loads, so nothing says what it usually takes."""
    load = loads.LOADS[name]
    found = diagnose(log_of(load, 0.05, 0.5, slow_steps={0: 4.0}))
    assert load.is_right(found), (found.constraint, found.evidence, found.levers, found.remark)


def test_a_wrong_verdict_fails_the_reproduction(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given = loads.LOADS

    def recorded(
        _: ReproduceOptions, scheduler: SchedulerConfig, cache: CacheConfig, workload: Workload, **__: Any
    ) -> list[Event]:
        load = next(load for load in given.values() if load.workload(4096) == workload)
        assert (scheduler, cache) == (load.scheduler, load.cache)
        return log_of(load, 0.05, 0.5)

    monkeypatch.setattr(loads, "recorded", recorded)
    monkeypatch.setattr(ReproduceOptions, "vocab_size", lambda _: 4096)
    monkeypatch.setattr(loads, "LOADS", {"idle": given["idle"], "too few slots": given["too few slots"]})
    found = loads.reproduce(ReproduceOptions(results=tmp_path))
    assert found.holds
    assert [claim.holds for claim in found.claims] == [True, True]
    assert found.details["verdicts"]["too few slots"][0]["levers"][0]["name"] == "twice the slots"
    wrong = given["idle"].__class__(
        constraint=given["idle"].constraint,
        lever="twice the slots",
        context=512,
        lengths=given["idle"].lengths,
        arrivals_s=given["idle"].arrivals_s,
    )
    monkeypatch.setattr(loads, "LOADS", {"idle": wrong})
    assert not loads.reproduce(ReproduceOptions(results=tmp_path)).holds


def test_a_label_that_is_no_file_name_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="becomes part of a file name"):
        ReproduceOptions(label="../x")
