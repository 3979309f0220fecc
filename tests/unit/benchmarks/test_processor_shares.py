"""Processor time of other processes, and how a soak judges it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.claim import Claim
from benchmarks.processor_shares import (
    ProcessorTimes,
    UsedShare,
    read_processor_times,
    used_shares,
    worst_of_parts,
)
from benchmarks.reproduce.soak import contention_remarks, latency_claims

TICKS = os.sysconf("SC_CLK_TCK")


def proc_with(folder: Path, stat: str) -> Path:
    (folder / "stat").write_text(stat)
    (folder / "7").mkdir()
    before = "7 (a name) with) brackets) S 1 7 7 0 -1 0 0 0 0 0"
    (folder / "7" / "stat").write_text(f"{before} {3 * TICKS} {TICKS} {2 * TICKS} 0 20 0 1 0 99 0 0\n")
    return folder


def test_the_kernels_account_is_read(tmp_path: Path) -> None:
    """Only usable processors count. User, nice and system time is busy; interrupts count for no process."""
    line = f" {5 * TICKS} {2 * TICKS} {TICKS} 900 0 {50 * TICKS} {50 * TICKS} {4 * TICKS} 0 0\n"
    processors = sorted(os.sched_getaffinity(0))
    stat = "cpu 1 1 1 1 1 1 1 1 0 0\n" + "".join(f"cpu{i}{line}" for i in processors) + "cpu4096 9 9 9 9 9 9 9 9 0 0\n"
    found = read_processor_times([7, 8], proc_with(tmp_path, stat))
    assert found is not None
    assert found.busy_s == 8 * len(processors)
    assert found.stolen_s == 4 * len(processors)
    assert found.own_s == 6  # with children that have ended; process 8 has


@pytest.mark.parametrize("stat", ["", "cpu 1 2 3\n", "cpu0 0 0 0 0 0 0 0 0 0 0\n"])
def test_no_account_is_none(stat: str, tmp_path: Path) -> None:
    assert read_processor_times([7], proc_with(tmp_path, stat)) is None
    assert read_processor_times([7], tmp_path / "absent") is None


def test_this_machines_own_account() -> None:
    found = read_processor_times([os.getpid()])
    if found is None:
        pytest.skip("this system has no /proc/stat")
    assert 0 < found.own_s <= found.busy_s


def test_shares_of_two_processors() -> None:
    readings = [
        ProcessorTimes(0.0, 10.0, 0.0, 5.0),
        ProcessorTimes(1.0, 99.0, 0.0, 5.0),  # too soon
        ProcessorTimes(5.0, 18.0, 1.0, 10.0),
        ProcessorTimes(10.0, 20.0, 1.0, 14.0),  # own time is finer than the account of all
        ProcessorTimes(15.0, 25.0, 1.0, 2.0),  # a measured process has ended
    ]
    found = used_shares(readings, 2)
    assert [(part.others, part.stolen) for part in found] == [(0.3, 0.1), (0.0, 0.0), (0.5, 0.0)]
    assert found[0].share == pytest.approx(0.4)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40), st.integers(1, 12))
def test_every_interval_is_seen_in_a_part(shares: list[float], num_parts: int) -> None:
    intervals = [UsedShare(5.0 * i, 5.0 * (i + 1), share, 0.0) for i, share in enumerate(shares)]
    found = worst_of_parts(intervals, 0.0, 5.0 * len(shares), num_parts)
    assert len(found) == num_parts
    assert max(share for share in found if share is not None) == max(shares)
    assert worst_of_parts([], 0.0, 60.0, num_parts) == [None] * num_parts


def windows(p99: list[float]) -> dict[str, list[dict[str, float]]]:
    return {"ttft": [{"p99": value} for value in p99], "itl": [{"p99": 0.05}] * len(p99)}


def claim_of(what: str, taken: list[float | None], p99: list[float]) -> Claim:
    (found,) = [claim for claim in latency_claims(windows(p99), taken, full=True) if claim.what == what]
    return found


WORST = "p99 TTFT, the worst twelfth over it"
ONE_BAD = [1.0] * 5 + [1.99] + [1.0] * 6


def test_a_bad_twelfth_fails_where_the_machine_was_ours() -> None:
    assert claim_of(WORST, [0.02] * 12, ONE_BAD).holds is False
    assert claim_of(WORST, [None] * 12, ONE_BAD).holds is False
    assert claim_of(WORST, [0.02] * 5 + [0.1] + [0.02] * 6, ONE_BAD).holds is False
    assert contention_remarks([0.02] * 12) == ()


def test_a_twelfth_that_others_disturbed_is_left_out_and_named() -> None:
    taken = [0.02] * 5 + [0.41] + [0.02] * 6
    found = claim_of(WORST, taken, ONE_BAD)
    assert (found.holds, found.measured) == (True, 1.0)
    assert claim_of("twelfths that are judged by their p99", taken, ONE_BAD).measured == 11
    everywhere = claim_of("p99 TTFT, the worst of all twelfths over their median", taken, ONE_BAD)
    assert (everywhere.holds, everywhere.measured) == (None, 1.99)
    (remark,) = contention_remarks(taken)
    assert "in twelfth 6 (41%): p99 is not judged there" in remark


def test_a_run_beside_others_is_not_judged_at_all() -> None:
    taken = [0.5] * 7 + [0.0] * 5
    assert claim_of(WORST, taken, [1.0] * 12).holds is None
    assert "p99 is not judged at all: 5 twelfths are left" in contention_remarks(taken)[1]


def test_a_machine_that_does_not_say_is_named() -> None:
    assert contention_remarks([None] * 12) == (
        "this machine does not say what other processes take, so p99 is judged in every twelfth",
    )
