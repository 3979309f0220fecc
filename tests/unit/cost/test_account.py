"""Bound on the cost of drafting: the account against losses of every kind."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from twostroke.cost.account import MAX_CREDIT_STEPS, MAX_DEBT_STEPS, MAX_LOSS_SHARE, DraftAccount

_LOSSES = st.lists(st.tuples(st.floats(-2.0, 2.0), st.floats(0.1, 4.0)), max_size=400)


@given(_LOSSES)
def test_who_stops_when_it_is_stopped_never_loses_much(steps: list[tuple[float, float]]) -> None:
    account = DraftAccount()
    lost = seconds = 0.0
    for wanted, length in steps:
        lost_s = 0.0 if account.is_stopped else wanted
        account.book(length, lost_s, plain_s=1.0)
        lost, seconds = lost + lost_s, seconds + length
        assert lost <= MAX_LOSS_SHARE * seconds + MAX_DEBT_STEPS + 2.0, "the limit, and the step that went beyond it"


@given(st.floats(0.5, 20.0))
def test_what_was_lost_is_made_up_before_anything_is_tried(lost_s: float) -> None:
    account = DraftAccount()
    account.book(1.0, lost_s, plain_s=1.0)
    num_steps = 0
    while account.owes:
        assert account.is_stopped == (lost_s - MAX_LOSS_SHARE > MAX_DEBT_STEPS)
        account.book(1.0, 0.0, plain_s=1.0)
        num_steps += 1
    assert not account.is_stopped
    assert abs(MAX_LOSS_SHARE * (1 + num_steps) - lost_s) <= 1.01 * MAX_LOSS_SHARE


def test_what_is_won_pays_for_later_tries_up_to_a_limit() -> None:
    account = DraftAccount()
    account.book(1.0, MAX_DEBT_STEPS - 0.1, plain_s=1.0)
    account.book(1.0, -50.0, plain_s=1.0)
    account.book(1.0, MAX_CREDIT_STEPS - 0.1, plain_s=1.0)
    assert not account.owes
    account.book(1.0, MAX_DEBT_STEPS, plain_s=1.0)
    assert account.owes
    assert not account.is_stopped
    account.book(1.0, 0.2, plain_s=1.0)
    assert account.is_stopped
