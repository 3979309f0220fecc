"""The record of how long a first answer takes: where the answer begins, and what keeps a limit."""

from __future__ import annotations

import pytest

from benchmarks.goals import goals_of
from time_first_run import LIMITS_S, has_answer, main, result_of


@pytest.mark.parametrize(
    ("said", "answered"),
    [
        ("> Explain in two sentences why the sky is blue.\nThe", True),
        ("def f():\n\n> Explain it.\n \n T", True),
        ("> Explain it.\n", False),
        ("> Explain it.\n \n", False),
        ("I can > Explain it.\nNo", False),
        ("", False),
    ],
)
def test_an_answer_is_what_comes_behind_the_question(said: str, answered: bool) -> None:
    assert has_answer(said) is answered


def test_the_slowest_run_is_held_to_the_limit() -> None:
    result = result_of({"first": [100.0, LIMITS_S["first"]], "second": [9.0, LIMITS_S["second"] + 1]})
    assert [(goal.measured, goal.rule, goal.holds) for goal in goals_of(result)] == [
        (240.0, "<= 240", True),
        (16.0, "<= 15", False),
    ]
    assert result.command == 'make run-time ARGS="--runs 2"'


def test_no_run_is_refused() -> None:
    with pytest.raises(SystemExit):
        main(["--runs", "0"])
