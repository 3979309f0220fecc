"""The reproduction of random schedules: what it counts, and what it says of answers that differ."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.claim import MissingHardware, ReproduceOptions
from benchmarks.reproduce import schedules
from benchmarks.reproduce.run import reproduce
from benchmarks.reproduce.schedules import FuzzResult, FuzzTask
from benchmarks.schedules.fuzzer import FuzzOutcome
from benchmarks.schedules.requests import DrawnSchedule, draw_schedule
from benchmarks.schedules.subjects import SUBJECTS
from twostroke.kernels import native


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules, "ProcessPoolExecutor", lambda _num, _context: ThreadPoolExecutor(1))


def _options(tmp_path: Path) -> ReproduceOptions:
    return ReproduceOptions(results=tmp_path, plots=False)


@pytest.mark.usefixtures("in_this_process")
def test_every_level_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules, "SUBJECTS", SUBJECTS[:1])
    monkeypatch.setattr(schedules, "NUM_LOWER", {False: 1})
    (found,) = reproduce(["schedules"], _options(tmp_path), Console(quiet=True))
    assert found.holds
    assert [one["level"] for one in found.details["subjects"]] == list(reversed(native.levels()))
    assert [one["num_schedules"] for one in found.details["subjects"]] == [2, *[1] * (len(native.levels()) - 1)]
    assert (tmp_path / "schedules-small.json").is_file()


@pytest.mark.usefixtures("in_this_process")
def test_an_answer_that_differs_fails_a_claim_and_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_task(task: FuzzTask) -> FuzzResult:
        differing = ["schedule 1, request 2: {}"] * 7 if task.subject == 3 else []
        return FuzzResult(task, "abc", FuzzOutcome(task.num_schedules, 5, 1, 2, differing))

    monkeypatch.setattr(schedules, "run_task", run_task)
    (found,) = reproduce(["schedules"], _options(tmp_path), Console(quiet=True))
    assert [claim.measured for claim in found.claims if claim.holds is False] == [7]
    (shown,) = (one for one in found.details["subjects"] if one["differing"])
    assert (shown["name"], shown["num_differing"], len(shown["differing"])) == (SUBJECTS[3].name, 7, 5)
    assert len(found.details["subjects"]) == len(SUBJECTS), "a quick run is at the best level alone"


def test_without_native_kernels_nothing_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "levels", tuple)
    with pytest.raises(MissingHardware, match="native kernels were not built"):
        schedules.reproduce(_options(tmp_path))


def test_a_period_has_a_long_and_a_crowded_schedule() -> None:
    drawn: list[DrawnSchedule] = [draw_schedule(seed) for seed in range(48)]
    assert [len(one.arrivals) for one in drawn].count(64) == 1
    assert [one.settings["max_model_len"] for one in drawn].count(640) == 1
    assert draw_schedule(7) == draw_schedule(7)
