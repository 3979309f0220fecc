from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import assume, given

import pool_cases
from pool_cases import CHAINS, REQUESTS, decode_member, members, prefill_member, router_of
from twostroke.pools.member import Member
from twostroke.pools.route import RouteReason, RouteRequest
from twostroke.pools.router import Router

HISTORIES = st.lists(st.tuples(st.integers(0, 9), CHAINS), max_size=12)
"""Who computed what."""

NOWHERE = {RouteReason.NO_DECODE_MEMBER, RouteReason.TOO_LARGE}


def told(router: Router, history: list[tuple[int, tuple[bytes, ...]]]) -> Router:
    for number, hashes in history:
        router.computed(f"m{number}", hashes)
    return router


@given(pool=members(10), history=HISTORIES, asked=st.lists(REQUESTS, min_size=1, max_size=6))
def test_routing_is_total_and_repeats_itself_and_goes_to_those_who_take_it(
    pool: list[Member], history: list[tuple[int, tuple[bytes, ...]]], asked: list[RouteRequest]
) -> None:
    one, other = (told(router_of(*pool, num_candidates=2), history) for _ in range(2))
    by_id = {member.member_id: member for member in pool}
    for request in asked:
        route = one.route(request)
        assert route == other.route(request) == one.route(request)  # a question changes nothing
        assert (route.decode_id is None) == (route.reason in NOWHERE) == (route.chosen is None)
        assert (route.prefill_id is not None) == (route.reason is RouteReason.HAND_OVER_PAYS)
        assert route.words
        if route.decode_id is not None:
            decode = by_id[route.decode_id]
            assert decode.takes_requests
            assert decode.role.decodes or route.reason is RouteReason.NO_DECODE_LEFT
            if route.reason is RouteReason.NO_DECODE_LEFT:
                assert not any(member.takes_requests and member.role.decodes for member in pool)
        if route.prefill_id is not None:
            prefill = by_id[route.prefill_id]
            assert prefill.takes_requests
            assert prefill.role.prefills_for_others
            assert request.may_be_handed_over
            assert prefill != decode
        if route.chosen is not None:
            figures = route.chosen
            assert 0 <= figures.num_cached_tokens < request.num_prompt_tokens
            assert min(figures.ttft_s, figures.exposed_s, figures.late_tokens) >= 0
        for router in (one, other):
            router.placed(request, route)
            router.check_invariants()


@given(
    pool=members(10),
    history=HISTORIES,
    request=REQUESTS,
    which=st.integers(0, 9),
    more=st.integers(1, 5000),
    num_candidates=st.integers(1, 4),
)
def test_more_in_its_queue_makes_no_member_more_attractive(
    pool: list[Member],
    history: list[tuple[int, tuple[bytes, ...]]],
    request: RouteRequest,
    which: int,
    more: int,
    num_candidates: int,
) -> None:
    assume(which < len(pool))
    router = told(router_of(*pool, num_candidates=num_candidates), history)
    name = f"m{which}"
    before = router.route(request)
    assume(name not in (before.prefill_id, before.decode_id))
    busier = replace(pool[which], num_queued_prompt_tokens=pool[which].num_queued_prompt_tokens + more)
    router.put(busier)
    after = router.route(request)
    assert name not in (after.prefill_id, after.decode_id)


@given(pool=members(4), history=HISTORIES, request=REQUESTS)
def test_small_pools_are_searched_whole(
    pool: list[Member], history: list[tuple[int, tuple[bytes, ...]]], request: RouteRequest
) -> None:
    route = told(router_of(*pool, num_candidates=4), history).route(request)
    assert route == told(router_of(*pool, num_candidates=100), history).route(request)


@given(
    queues=st.lists(st.integers(0, 3000), min_size=5, max_size=30),
    streams=st.lists(st.integers(0, 8), min_size=5, max_size=30),
    num_prompt_tokens=st.integers(1, 3000),
)
def test_large_pools_of_equals_lose_nothing_by_looking_at_a_few(
    queues: list[int], streams: list[int], num_prompt_tokens: int
) -> None:
    pool = [prefill_member(i, num_queued_prompt_tokens=queue) for i, queue in enumerate(queues)]
    pool += [decode_member(i, num_running=running) for i, running in enumerate(streams)]
    asked = pool_cases.request(num_prompt_tokens)
    few = router_of(*pool, num_candidates=2).route(asked).chosen
    all_of_them = router_of(*pool, num_candidates=100).route(asked).chosen
    assert few is not None
    assert all_of_them is not None
    assert few.cost_s == pytest.approx(all_of_them.cost_s)
