"""Lender and borrower over every transport, with their real threads: what arrives, and what is never believed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from lent_kv import DIGEST, EPOCH, NUM_ENTRIES, PLAIN, UNLIKE, UNTOUCHED, WINDOWED, Clock, Pools, layers_of_pages
from twostroke.kv_cache.layout import KVLayout

MakePools = Callable[..., Pools]


@pytest.mark.parametrize("layout", [PLAIN, WINDOWED, UNLIKE], ids=["plain", "windowed", "unlike"])
def test_a_prompt_goes_over(layout: KVLayout, make_pools: MakePools) -> None:
    lent = make_pools(layout)
    borrowing = lent.borrowing()
    lent.lend(1)
    fetched = borrowing.fetch(lent.source(1))
    assert (fetched.problem, fetched.drift) == ("", "")
    assert fetched.num_bytes == borrowing.num_bytes_missing
    assert fetched.num_bytes == NUM_ENTRIES * layout.block_size * layout.bytes_per_token
    borrowing.check(lent.blocks, lent.rows)
    assert lent.over.get(timeout=60) == 1
    assert lent.lender.num_leases == 0


@pytest.mark.parametrize(
    ("layout", "first_missing"),
    [(PLAIN, (3,)), (PLAIN, (5,)), (WINDOWED, (0, 4)), (WINDOWED, (2, 4)), (WINDOWED, (2, 6))],
)
def test_what_is_there_or_out_of_sight_is_not_moved(
    layout: KVLayout, first_missing: tuple[int, ...], make_pools: MakePools
) -> None:
    lent = make_pools(layout)
    borrowing = lent.borrowing()
    borrowing.missing_from(*first_missing)
    lent.lend(1)
    fetched = borrowing.fetch(lent.source(1))
    assert fetched.problem == ""
    assert fetched.num_bytes == borrowing.num_bytes_missing
    borrowing.check(lent.blocks, lent.rows)


@pytest.mark.parametrize("layout", [PLAIN, WINDOWED, UNLIKE], ids=["plain", "windowed", "unlike"])
def test_layers_go_over_as_they_are_computed(layout: KVLayout, make_pools: MakePools) -> None:
    """A cached beginning, then two steps; the borrower asks before any of it is there."""
    lent = make_pools(layout)
    borrowing = lent.borrowing()
    borrowing.missing_from(*[1] * len(layout.groups))
    final = lent.blocks.copy()
    written, computed = (pool.reshape(-1) for pool in (lent.blocks, final))
    for group_id, row in enumerate(lent.rows):
        written[layers_of_pages(layout, group_id, row[2:])] = 0
    borrowing.begin(lent.source(1))
    lent.lender.grant(1, NUM_ENTRIES)
    lent.lender.begin_part(1, lent.rows, 2, is_computed=True)
    num_layers = sum(len(group.layer_ids) for group in layout.groups)
    for begin, end in ((2, 5), (5, NUM_ENTRIES)):
        lent.lender.begin_part(1, lent.rows, end, is_computed=False)
        for layer_id in range(num_layers):
            for group_id, (row, group) in enumerate(zip(lent.rows, layout.groups, strict=True)):
                if layer_id in group.layer_ids:
                    places = layers_of_pages(layout, group_id, row[begin:end])
                    places = places[group.layer_ids.index(layer_id) :: len(group.layer_ids)]
                    written[places] = computed[places]
            lent.lender.layer_ready([1], layer_id + 1)
    lent.lender.complete(1, DIGEST)
    fetched = borrowing.end()
    assert fetched.problem == ""
    assert fetched.first_byte_s == fetched.last_byte_s == 1.0
    assert fetched.num_bytes == borrowing.num_bytes_missing
    borrowing.check(final, lent.rows)


def test_another_process_at_the_address_is_told_apart(make_pools: MakePools) -> None:
    lent = make_pools()
    lent.lend(1)
    borrowing = lent.borrowing()
    fetched = borrowing.fetch(lent.source(1, epoch=EPOCH + 1))
    assert "the process that granted this lease is gone" in fetched.problem
    assert (borrowing.blocks == UNTOUCHED).all()
    assert lent.lender.num_leases == 1


def test_an_unknown_lease_is_waited_for_and_refused(make_pools: MakePools, clock: Clock) -> None:
    lent = make_pools(timeout_s=0.01)
    fetched = lent.borrowing().fetch(lent.source(9))
    assert "lease 9 is over, or was never granted here" in fetched.problem


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"identity": {"model": "other"}}, "models differ: model is m here and other there"),
        ({"layout": {"block_size": "8"}}, "block layouts differ: "),
        ({"numerics": {"kernels": "other"}}, "numerics differ: kernels is k here and other there"),
    ],
)
def test_other_geometry_is_refused(changed: dict[str, dict[str, str]], said: str, make_pools: MakePools) -> None:
    lent = make_pools()
    lent.lend(1)
    borrowing = lent.borrowing(msgspec.structs.replace(lent.geometry, **changed))
    assert said in borrowing.fetch(lent.source(1)).problem
    assert (borrowing.blocks == UNTOUCHED).all()
    assert lent.lender.num_leases == 1


def test_other_numerics_are_taken_where_that_is_allowed_and_said(make_pools: MakePools) -> None:
    lent = make_pools()
    lent.lend(1)
    geometry = msgspec.structs.replace(lent.geometry, numerics={"kernels": "other"})
    borrowing = lent.borrowing(geometry, allows_drift=True)
    fetched = borrowing.fetch(lent.source(1))
    assert (fetched.problem, fetched.drift) == ("", "kernels is other here and k there")
    borrowing.check(lent.blocks, lent.rows)


def test_a_lease_that_dies_is_not_believed(make_pools: MakePools) -> None:
    lent = make_pools()
    borrowing = lent.borrowing()
    lent.lender.grant(1, NUM_ENTRIES)
    lent.lender.begin_part(1, lent.rows, 3, is_computed=True)
    borrowing.begin(lent.source(1))
    lent.lender.invalidate(1, "its request was ended")
    assert (
        borrowing.end().problem
    )  # one of two errors: killed before or after the request arrived (test_protocol.py tests each)
    assert lent.over.get(timeout=60) == 1


def test_a_lender_that_stops_says_so(make_pools: MakePools) -> None:
    lent = make_pools()
    borrowing = lent.borrowing()
    lent.lender.grant(1, NUM_ENTRIES)
    lent.lender.begin_part(1, lent.rows, 3, is_computed=True)
    borrowing.begin(lent.source(1))
    lent.lender.close()
    assert borrowing.end().problem
    # the lender has gone
    assert borrowing.fetch(lent.source(1)).problem


def test_a_borrower_gives_up_and_another_one_gets_it(make_pools: MakePools) -> None:
    lent = make_pools()
    first, second = (lent.borrowing(seed=seed) for seed in (0, 1))
    lent.lender.grant(1, NUM_ENTRIES)
    lent.lender.begin_part(1, lent.rows, 3, is_computed=True)
    first.begin(lent.source(1))()
    assert first.end().problem == "it was given up"
    lent.lender.begin_part(1, lent.rows, NUM_ENTRIES, is_computed=True)
    lent.lender.complete(1, DIGEST)
    assert lent.lender.num_leases == 1
    assert second.fetch(lent.source(1)).problem == ""
    second.check(lent.blocks, lent.rows)
    assert lent.over.get(timeout=60) == 1


def test_what_was_fetched_is_not_fetched_again(make_pools: MakePools) -> None:
    lent = make_pools()
    lent.lend(1)
    first, second = (lent.borrowing(seed=seed) for seed in (0, 1))
    assert first.fetch(lent.source(1)).problem == ""
    assert "lease 1 is over" in second.fetch(lent.source(1)).problem
    assert lent.over.get(timeout=60) == 1
    assert lent.over.empty()


def test_several_prompts_go_over_at_once(make_pools: MakePools) -> None:
    lent = make_pools()
    borrowings = [lent.borrowing(seed=seed) for seed in range(8)]
    for lease_id, borrowing in enumerate(borrowings):
        borrowing.begin(lent.source(lease_id))
    for lease_id in range(len(borrowings)):
        lent.lend(lease_id)
    for borrowing in borrowings:
        assert borrowing.end().problem == ""
        borrowing.check(lent.blocks, lent.rows)


def test_another_prompt_is_not_believed(make_pools: MakePools) -> None:
    lent = make_pools()
    lent.lend(1)
    fetched = lent.borrowing().fetch(lent.source(1), b"another")
    assert f"{DIGEST.hex()}; {b'another'.hex()} was asked for" in fetched.problem
    assert lent.lender.num_leases == 1


def test_another_length_is_refused(make_pools: MakePools) -> None:
    lent = make_pools()
    lent.lend(1)
    borrowing = lent.borrowing()
    borrowing.into = replace(borrowing.into, num_tokens=4 * PLAIN.block_size, rows=(borrowing.into.rows[0][:4],))
    assert "lease 1 is of 6 blocks; 4 were asked for" in borrowing.fetch(lent.source(1)).problem


def test_nobody_came_in_time(make_pools: MakePools, clock: Clock) -> None:
    lent = make_pools()
    lent.lend(1)
    clock.now_s = 11
    lent.lender.layer_ready([], 0)  # wakes the reaper
    assert lent.over.get(timeout=60) == 1
    assert "lease 1 is over" in lent.borrowing().fetch(lent.source(1)).problem
