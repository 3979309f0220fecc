"""Links: by hand, and against a queue that carries one byte after the other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.simulation.link import Link, Transfer

pieces = st.lists(st.tuples(st.floats(0, 50), st.integers(0, 400)), max_size=6).map(sorted)


def transfer(*given: tuple[float, int], sender: str = "p", receiver: str = "d") -> Transfer:
    made = Transfer(sender, receiver, has_all_pieces=True)
    made.add(given)
    return made


def ends(link: Link) -> dict[Transfer, float]:
    """Return the end time of each transfer that has begun."""
    found: dict[Transfer, float] = {}
    now_s = 0.0
    while True:
        found.update(dict.fromkeys(link.advance(now_s), now_s))
        if (next_s := link.next_s) is None:
            return found
        now_s = next_s


def test_two_that_begin_at_different_times_share_what_there_is() -> None:
    link, first, second = Link(10.0), transfer((0.0, 100)), transfer((0.0, 100))
    link.begin(first, 0.0)
    link.begin(second, 5.0)  # first has sent 50; then both go at 5 a second
    assert ends(link) == {first: 15.0, second: 20.0}


def test_who_meets_nobody_at_either_end_does_not_wait() -> None:
    link = Link(10.0)
    here, there = transfer((0.0, 100)), transfer((0.0, 100), sender="p1", receiver="d1")
    for one in (here, there):
        link.begin(one, 0.0)
    assert ends(link) == {here: 10.0, there: 10.0}


def test_a_link_waits_for_what_is_not_computed() -> None:
    link, late = Link(10.0), transfer((1.0, 10), (5.0, 10))
    link.begin(late, 0.0)
    assert ends(link) == {late: 6.0}
    assert late.busy_s == pytest.approx(2.0)


def test_nothing_to_send_is_there_as_soon_as_that_is_known() -> None:
    link, empty = Link(10.0), Transfer("p", "d")
    link.begin(empty, 1.0)
    assert link.advance(2.0) == []
    empty.has_all_pieces = True
    assert link.advance(2.0) == [empty]


@given(st.lists(pieces, min_size=1, max_size=5), st.sampled_from([0.5, 10.0, 1e9]))
def test_one_link_carries_as_much_as_a_queue_of_bytes(given: list[list[tuple[float, int]]], rate: float) -> None:
    link, transfers = Link(rate), [transfer(*one) for one in given]
    for one in transfers:
        link.begin(one, 0.0)
    done = ends(link)
    now_s = 0.0
    for ready_s, num_bytes in sorted(piece for one in given for piece in one):
        now_s = max(now_s, ready_s) + num_bytes / rate if num_bytes else now_s
    assert set(done) == set(transfers)
    assert max(done.values()) == pytest.approx(now_s)
    assert sum(one.num_bytes for one in transfers) == sum(n for one in given for _, n in one)
