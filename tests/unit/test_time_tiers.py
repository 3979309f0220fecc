"""The record of how long the tests take: its counts, and what keeps a limit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.goals import goals_of
from time_tiers import LIMITS_S, Run, counts_of, keeps, main, result_of

RUN = Run(seconds=LIMITS_S["test"], exit_code=0, passed=10, failed=0, skipped=2)


def test_counts_are_the_sums_over_all_summaries() -> None:
    lines = [
        "tests/unit/test_log.py::test_3_passed_in_2s PASSED\n",
        "======== 3 failed, 1,2 words of others\n",
        "==== 4 failed, 7000 passed, 3 skipped, 2 warnings, 1 error in 301.25s (0:05:01) ====\n",
        "12 passed, 2 errors in 1.02s\n",
    ]
    assert counts_of(lines) == {"passed": 7012, "failed": 4, "skipped": 3, "error": 3}
    assert not counts_of(["no tests ran in 0.01s\n"])


def test_a_limit_is_kept_by_tests_that_ran_passed_and_took_no_longer() -> None:
    assert keeps("test", RUN)
    assert keeps("ci", replace(RUN, seconds=LIMITS_S["ci"]))
    for changes in ({"seconds": 360.1}, {"exit_code": 2}, {"passed": 0}, {"failed": 1}):
        assert not keeps("test", replace(RUN, **changes)), changes


def test_one_run_that_misses_is_told_with_the_others() -> None:
    result = result_of({"test": [RUN, replace(RUN, seconds=400.0)], "ci": [RUN]}, 2)
    goals = [(goal.what, goal.measured, goal.rule, goal.holds) for goal in goals_of(result)]
    assert goals == [
        ("test, s", 400.0, "<= 360", False),
        ("test, tests that fail", 0, "<= 0", True),
        ("ci, s", 360.0, "<= 2400", True),
        ("ci, tests that fail", 0, "<= 0", True),
    ]
    assert [run["seconds"] for run in result.results["runs"]["test"]] == [360.0, 400.0]
    assert result.command == 'make test-time ARGS="test ci --runs 2"'
    assert result.commit


@pytest.mark.parametrize("words", [["tests"], ["--runs", "0"], ["ci", "--only", "tests/unit"]], ids=" ".join)
def test_what_cannot_be_timed_is_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        main(words)


def test_a_run_in_which_nothing_ran_counts_as_failed() -> None:
    *_, failed = goals_of(result_of({"test": [replace(RUN, passed=0), replace(RUN, exit_code=2, failed=3)]}, 2))
    assert (failed.measured, failed.holds) == (4, False)
