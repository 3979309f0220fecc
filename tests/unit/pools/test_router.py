"""Each rule by an example."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pool_cases import chain, decode_member, member, prefill_member, request, router_of
from twostroke.errors import InvalidParameter
from twostroke.pools.member import Role, Transport
from twostroke.pools.route import Route, RouteReason, RouteRequest

BUSY = {"num_running": 6}


def test_a_long_prompt_beside_streams_is_handed_over() -> None:
    route = router_of(prefill_member(0), decode_member(0, **BUSY)).route(request(800))
    assert (route.prefill_id, route.decode_id, route.reason) == ("p0", "d0", RouteReason.HAND_OVER_PAYS)
    assert route.chosen is route.hand_over
    assert route.local is not None
    assert route.local.late_tokens == pytest.approx(0.8 * 6 / 0.05)


FAST = {"prefill_tokens_per_s": 10_000.0}
MANY = {"num_running": 60, "max_num_seqs": 64}
LARGE = {"kv_bytes_per_token": 100_000_000}
STAYING: list[tuple[RouteReason, dict[str, Any], dict[str, Any], RouteRequest, str]] = [
    (RouteReason.NO_FULL_BLOCK, {}, BUSY, request(15), "shorter than one KV block"),
    (RouteReason.NO_FULL_BLOCK, {"block_size": 64}, BUSY, request(63, block_size=64), "shorter than one KV block"),
    (RouteReason.NOT_ALLOWED, {}, BUSY, request(800, may_be_handed_over=False), "cannot be handed over with its KV"),
    (RouteReason.NO_PREFILL_MEMBER, {"is_draining": True}, BUSY, request(800), "no prefill member is ready"),
    (RouteReason.NO_PREFILL_MEMBER, {"is_ready": False}, BUSY, request(800), "no prefill member is ready"),
    (RouteReason.PROMPT_TOO_LARGE, {"num_blocks": 40, "num_free_blocks": 40}, BUSY, request(800), "KV memory for the"),
    (RouteReason.KV_DOES_NOT_FIT, {"block_size": 24}, BUSY, request(800), "whose KV the decode members can take"),
    (RouteReason.KV_DOES_NOT_FIT, LARGE, BUSY, request(800), "whose KV the decode members can take"),
    (RouteReason.SHORT_REMAINDER, FAST, FAST, request(16), "sooner than a hand-over is arranged"),
    (RouteReason.PREFILL_BUSY, {"num_queued_prompt_tokens": 20_000}, BUSY, request(800), "queue is too long"),
    (
        RouteReason.PREFILL_BUSY,
        FAST | {"num_queued_prompt_tokens": 20_000},
        FAST | MANY,
        request(48),
        "queue is too long",
    ),
    (RouteReason.SLOW_LINK, LARGE, BUSY | LARGE, request(800), "the link is assumed too slow"),
    (
        RouteReason.SLOW_LINK,
        LARGE | {"num_queued_prompt_tokens": 1300},
        BUSY | LARGE,
        request(800),
        "the link is assumed too slow",
    ),
    (RouteReason.MORE_IS_CACHED, {}, BUSY, request(800, chain("warm", 40)), "more of the prompt is cached"),
    (RouteReason.SLOW_PREFILL, {"prefill_tokens_per_s": 100.0}, BUSY, request(800), "computes prompts more slowly"),
    (RouteReason.LOCAL_IS_CHEAPER, {}, {}, request(800), "the decode member has time"),
]
"""Each reason for computing a prompt where it decodes: the prefill member, the decode member, the request, words."""


@pytest.mark.parametrize(("reason", "prefill", "decode", "asked", "words"), STAYING)
def test_a_prompt_stays_for_the_reason_that_is_told(
    reason: RouteReason, prefill: dict[str, Any], decode: dict[str, Any], asked: RouteRequest, words: str
) -> None:
    router = router_of(prefill_member(0, **prefill), decode_member(0, **decode))
    router.computed("d0", chain("warm", 40))
    route = router.route(asked)
    assert (route.prefill_id, route.decode_id, route.reason) == (None, "d0", reason)
    assert route.words.startswith("d0 computes the prompt itself: ")
    assert words in route.words


def test_every_reason_has_a_situation() -> None:
    """Reasons of requests that are handed over, or cannot be routed, have tests of their own below."""
    others = {
        RouteReason.HAND_OVER_PAYS,
        RouteReason.NO_DECODE_LEFT,
        RouteReason.NO_DECODE_MEMBER,
        RouteReason.TOO_LARGE,
    }
    assert {reason for reason, *_ in STAYING} == set(RouteReason) - others


@pytest.mark.parametrize(
    ("reason", "mended"),
    [
        (RouteReason.PREFILL_BUSY, {"num_queued_prompt_tokens": 0}),
        (RouteReason.SLOW_PREFILL, {"prefill_tokens_per_s": 1000.0}),
        (RouteReason.PROMPT_TOO_LARGE, {"num_blocks": 4000, "num_free_blocks": 4000}),
        (RouteReason.KV_DOES_NOT_FIT, {"block_size": 16, "kv_bytes_per_token": 100_000}),
        (RouteReason.NO_PREFILL_MEMBER, {"is_draining": False, "is_ready": True}),
    ],
)
def test_without_the_reason_the_prompt_is_handed_over(reason: RouteReason, mended: dict[str, Any]) -> None:
    for why, prefill, decode, asked, _ in STAYING:
        if why is reason:
            router = router_of(prefill_member(0, **(prefill | mended)), decode_member(0, **decode))
            assert router.route(asked).reason is RouteReason.HAND_OVER_PAYS


def test_what_does_not_travel_stays() -> None:
    router = router_of(prefill_member(0), decode_member(0, **BUSY))
    assert router.route(request(800, may_be_handed_over=False)).reason is RouteReason.NOT_ALLOWED


def test_a_remainder_is_short_when_the_rest_is_cached_where_it_decodes() -> None:
    router = router_of(prefill_member(0), decode_member(0, **BUSY))
    hashes = chain("turn", 50)
    assert router.route(request(804, hashes)).prefill_id == "p0"
    router.computed("d0", hashes)
    assert router.route(request(804, hashes)).reason is RouteReason.SHORT_REMAINDER
    router.evicted("d0", hashes)
    assert router.route(request(804, hashes)).prefill_id == "p0"


def test_a_measured_link_counts_instead_of_the_assumed_one() -> None:
    router = router_of(prefill_member(0), prefill_member(1), decode_member(0, **BUSY))
    assert router.route(request(800)).prefill_id == "p0"
    router.link_measured("p0", "d0", 1e7)
    assert router.route(request(800)).prefill_id == "p1"
    router.link_measured("p1", "d0", 1e7)
    assert router.route(request(800)).reason is RouteReason.SLOW_LINK
    router.put(prefill_member(1, epoch=1))  # another process: nothing was measured with it
    assert router.route(request(800)).prefill_id == "p1"
    with pytest.raises(InvalidParameter, match="bytes_per_s=0"):
        router.link_measured("p0", "d0", 0)


@pytest.mark.parametrize("transport", list(Transport))
def test_a_transfer_is_hidden_by_the_prefill_but_for_its_end(transport: Transport) -> None:
    router = router_of(prefill_member(0, transport=transport), decode_member(0, **BUSY, transport=transport))
    figures = router.route(request(800)).hand_over
    assert figures is not None
    transfer_s = 800 * 100_000 / transport.assumed_bytes_per_s
    assert figures.transfer_s == pytest.approx(transfer_s)
    assert transfer_s < figures.prefill_s == pytest.approx(0.8)
    assert figures.exposed_s == pytest.approx(transfer_s / 28)  # the last of 28 layers; 800 tokens are whole blocks


def test_a_prefix_draws_load_only_as_far_as_it_pays() -> None:
    hashes = chain("system", 40)  # 640 tokens, 0.64 s of prefill
    for num_queued, chosen in ((600, "p1"), (700, "p0")):
        router = router_of(
            prefill_member(0), prefill_member(1, num_queued_prompt_tokens=num_queued), decode_member(0, **BUSY)
        )
        router.computed("p1", hashes)
        assert router.route(request(800, hashes)).prefill_id == chosen


def test_a_warm_member_is_found_among_many_that_have_less_to_do() -> None:
    hashes = chain("system", 40)
    pool = [prefill_member(i, num_queued_prompt_tokens=0 if i < 19 else 100) for i in range(20)]
    pool += [decode_member(i, num_running=5 if i < 19 else 6) for i in range(20)]
    router = router_of(*pool, num_candidates=2)
    router.computed("p19", hashes)
    assert router.route(request(800, hashes)).prefill_id == "p19"
    router.computed("d19", hashes)
    assert router.route(request(800, hashes, may_be_handed_over=False)).decode_id == "d19"


def test_a_burst_spreads_before_anybody_reports() -> None:
    router = router_of(*(prefill_member(i) for i in range(4)), *(decode_member(i, **BUSY) for i in range(4)))
    pairs: list[tuple[str | None, str | None]] = []
    for i in range(4):
        asked = request(800, chain(str(i), 50))
        route = router.route(asked)
        router.placed(asked, route)
        router.check_invariants()
        pairs.append((route.prefill_id, route.decode_id))
    assert pairs == [(f"p{i}", f"d{i}") for i in range(4)]


def test_what_was_placed_is_believed_to_be_cached_until_the_process_is_another() -> None:
    router = router_of(prefill_member(0), prefill_member(1), decode_member(0, **BUSY))
    asked = request(800, chain("a", 50))
    router.placed(asked, router.route(asked))
    for epoch, num_cached_tokens in ((0, 799), (1, 0)):
        router.put(prefill_member(0, epoch=epoch))
        router.put(decode_member(0, **BUSY, epoch=epoch))
        figures = router.route(asked).hand_over
        assert figures is not None
        assert (figures.prefill_id, figures.num_cached_tokens) == ("p0", num_cached_tokens)


def test_a_full_member_is_passed_over_for_one_with_a_slot() -> None:
    full, free = decode_member(0, num_running=8), decode_member(1, num_running=7)
    assert router_of(full, free).route(request(10)).decode_id == "d1"


def test_a_member_without_blocks_is_passed_over_for_one_with_some() -> None:
    full, free = decode_member(0, num_running=1, num_free_blocks=3), decode_member(1, num_running=7)
    assert router_of(full, free).route(request(80)).decode_id == "d1"


def test_both_strokes_at_one_member() -> None:
    route = router_of(member("a", Role.BOTH)).route(request(800))
    assert (route.prefill_id, route.decode_id) == (None, "a")
    assert route.reason is RouteReason.NO_PREFILL_MEMBER


def test_a_request_that_fits_only_into_the_least_attractive_finds_it() -> None:
    small = [decode_member(i, num_blocks=10, num_free_blocks=10) for i in range(20)]
    route = router_of(*small, decode_member(99, num_running=8)).route(request(800))
    assert route.decode_id == "d99"


def test_nobody_to_decode() -> None:
    router = router_of(decode_member(0, is_ready=False), decode_member(1, is_draining=True))
    route = router.route(request())
    assert (route.decode_id, route.reason, route.chosen) == (None, RouteReason.NO_DECODE_MEMBER, None)
    assert route.words == (
        "none of 2 members that decode takes requests (1 drain, 1 are not ready), and no prefill member has room for "
        "it. Ask again when one is ready, or add one to the decode pool."
    )
    router.placed(request(), route)  # nothing was sent


def test_a_prefill_member_decodes_while_no_decode_member_takes_requests() -> None:
    busy, idle = prefill_member(0, num_queued_prompt_tokens=5000), prefill_member(1)
    gone = decode_member(0, is_ready=False)
    router = router_of(busy, idle, gone)
    route = router.route(request())
    assert (route.prefill_id, route.decode_id, route.reason) == (None, "p1", RouteReason.NO_DECODE_LEFT)
    assert route.chosen is route.local
    assert "p1 computes the prompt itself: no decode member takes requests" in route.words
    router.placed(request(), route)
    router.put(decode_member(0))
    assert router.route(request()).decode_id == "d0", "as soon as it is back"


def test_nobody_stands_in_who_has_no_room() -> None:
    small = prefill_member(0, num_blocks=10, num_free_blocks=10)
    gone = decode_member(0, is_ready=False)
    assert router_of(small, gone).route(request(800)).reason is RouteReason.NO_DECODE_MEMBER
    assert router_of(small, prefill_member(9), gone).route(request(800)).decode_id == "p9"


@pytest.mark.parametrize("silent_s", [2.0, 14.0])
def test_a_member_that_reports_nothing_any_more_is_passed_over(silent_s: float) -> None:
    """The member looks idle, because its last report was that of an idle member."""
    busy = decode_member(1, num_running=6, num_queued_prompt_tokens=500)
    assert router_of(decode_member(0), busy).route(request()).decode_id == "d0"
    assert router_of(decode_member(0, silent_s=silent_s), busy).route(request()).decode_id == "d1"
    assert router_of(decode_member(0, silent_s=silent_s)).route(request()).decode_id == "d0", "there is no other worker"


def test_a_request_too_large_for_everybody() -> None:
    route = router_of(decode_member(0, num_blocks=10, num_free_blocks=10)).route(request(800))
    assert route.reason is RouteReason.TOO_LARGE
    assert "may need 900 tokens of KV; the largest member that decodes, d0, has 160." in route.words


def test_hashes_of_blocks_that_are_no_whole_ones_of_a_member_name_nothing() -> None:
    router = router_of(decode_member(0, **BUSY))
    hashes = chain("a", 25)
    router.computed("d0", hashes)
    for block_size, num_cached_tokens in ((16, 400), (32, 800), (24, 0)):
        local = router.route(request(801, hashes, block_size=block_size)).local
        assert local is not None
        assert local.num_cached_tokens == num_cached_tokens


def test_every_so_many_th_hash_is_enough() -> None:
    router = router_of(decode_member(0), hash_stride=4)
    router.computed("d0", chain("a", 10))
    local = router.route(request(801, chain("a", 10))).local
    assert local is not None
    assert local.num_cached_tokens == 8 * 16


def test_a_member_that_has_left_is_no_choice_and_may_be_told_of() -> None:
    router = router_of(decode_member(0), decode_member(1))
    asked = request(10)
    route = router.route(asked)
    router.remove("d0")
    router.placed(asked, route)
    router.computed("d0", chain("a", 3))
    assert router.route(asked).decode_id == "d1"
    assert len(router) == 1
    router.check_invariants()


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_free_blocks", 5000), ("step_s", float("nan")), ("prefill_tokens_per_s", 0.0), ("num_running", -1)],
)
def test_a_figure_that_cannot_be_is_refused(field: str, value: float) -> None:
    with pytest.raises(InvalidParameter, match=field):
        member("a", **{field: value})


def test_a_request_with_more_names_than_blocks_is_refused() -> None:
    with pytest.raises(InvalidParameter, match=r"block_hashes=3: must be at most 2 hashes"):
        RouteRequest(num_prompt_tokens=47, num_output_tokens=1, block_hashes=chain("a", 3))


def test_a_route_can_be_written_and_read_again() -> None:
    router = router_of(prefill_member(0), decode_member(0, **BUSY))
    for asked in (request(800), request(4), request(10**6)):
        route = router.route(asked)
        assert msgspec.json.decode(msgspec.json.encode(route), type=Route) == route


def test_words_of_a_hand_over() -> None:
    route = Route(prefill_id="p0", decode_id="d0", reason=RouteReason.HAND_OVER_PAYS, hand_over=None, local=None)
    assert route.words == "p0 computes the prompt for d0: the hand-over is predicted to pay"


OTHER_FORMAT = {"numerics": "int8", "kv_bytes_per_token": 50_000}


def test_kv_of_another_format_is_handed_over_and_its_bytes_are_the_givers() -> None:
    alike = router_of(prefill_member(0), decode_member(0, **BUSY)).route(request(800))
    converted = router_of(prefill_member(0, **OTHER_FORMAT), decode_member(0, **BUSY)).route(request(800))
    assert (alike.prefill_id, converted.prefill_id) == ("p0", "p0")
    assert alike.hand_over is not None
    assert converted.hand_over is not None
    assert converted.hand_over.transfer_s == pytest.approx(alike.hand_over.transfer_s / 2)


@pytest.mark.parametrize("is_alike", [True, False])
def test_kv_of_other_numerics_is_not_taken_for_a_members_own(is_alike: bool) -> None:
    """Converted KV has hashes of its own: a request that runs where it decodes does not find it."""
    router = router_of(prefill_member(0, **({} if is_alike else OTHER_FORMAT)), decode_member(0, **BUSY))
    asked = request(804, chain("turn", 50))
    route = router.route(asked)
    assert route.prefill_id == "p0"
    router.placed(asked, route)
    again = router.route(asked)
    assert again.local is not None
    assert (again.local.num_cached_tokens > 0) is is_alike


KIND = {"kind": "cpu bf16, 1 thread"}
UNMEASURED = {"prefill_tokens_per_s": None}
MEASURED = {"prefill_tokens_per_s": 3000.0}
"""Faster than assumed_prefill_tokens_per_s."""


def test_a_member_that_nobody_measured_is_assumed_as_fast_as_one_of_its_kind() -> None:
    """Assumed slower than its like, it would get no prompt, and so never be measured."""
    prefill, busy = prefill_member(0, **UNMEASURED, **KIND), decode_member(0, **MEASURED, **KIND, num_running=2)
    route = router_of(prefill, busy).route(request(800))
    assert (route.prefill_id, route.reason) == ("p0", RouteReason.HAND_OVER_PAYS)
    assert route.hand_over is not None
    assert route.hand_over.prefill_s == pytest.approx(800 / 3000)
    assert "assumed, as not measured yet: 3,000 prompt tokens/s of p0)" in route.words


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_rate_of_another_of_its_kind_stands_whoever_comes_first(order: tuple[int, int]) -> None:
    pool = [decode_member(0, **UNMEASURED, **KIND), decode_member(1, **MEASURED, **KIND, is_ready=False)]
    router = router_of(*(pool[i] for i in order))

    def prefill_s() -> float:
        local = router.route(request(800)).local
        assert local is not None
        router.check_invariants()
        return local.prefill_s

    assert prefill_s() == pytest.approx(800 / 3000)
    router.put(decode_member(1, prefill_tokens_per_s=4000.0, **KIND, is_ready=False))
    assert prefill_s() == pytest.approx(800 / 4000)
    router.put(decode_member(1, prefill_tokens_per_s=4000.0, kind="another", is_ready=False))
    assert prefill_s() == pytest.approx(800 / 1000)
    router.put(decode_member(1, prefill_tokens_per_s=4000.0, **KIND, is_ready=False))
    router.remove("d1")
    assert prefill_s() == pytest.approx(800 / 1000)
    router.put(decode_member(0, prefill_tokens_per_s=500.0, **KIND))
    assert prefill_s() == pytest.approx(800 / 500)


@pytest.mark.parametrize("kinds", [("cpu", "cuda"), ("", "")])
def test_a_rate_of_another_kind_is_not_assumed_and_a_guess_is_called_one(kinds: tuple[str, str]) -> None:
    prefill = prefill_member(0, **UNMEASURED, kind=kinds[0])
    route = router_of(prefill, decode_member(0, **MEASURED, kind=kinds[1], num_running=2)).route(request(800))
    assert (route.prefill_id, route.reason) == (None, RouteReason.SLOW_PREFILL)
    assert "the prefill member is assumed to compute prompts more slowly (predicted cost" in route.words
    assert route.words.endswith(" handed over; assumed, as not measured yet: 1,000 prompt tokens/s of p0)")


def test_a_measured_prefill_that_is_slower_than_an_assumed_one_is_no_fact_either() -> None:
    slow = prefill_member(0, prefill_tokens_per_s=100.0)
    route = router_of(slow, decode_member(0, **UNMEASURED, **BUSY)).route(request(800))
    assert route.reason is RouteReason.SLOW_PREFILL
    assert "is assumed to compute prompts more slowly" in route.words
    assert route.words.endswith("assumed, as not measured yet: 1,000 prompt tokens/s of d0)")


def test_a_link_that_nobody_measured_is_called_assumed() -> None:
    router = router_of(prefill_member(0, **LARGE), decode_member(0, **BUSY, **LARGE))
    words = router.route(request(800)).words
    assert "the link is assumed too slow for so much KV" in words
    assert "assumed, as not measured yet: 3 GB/s of the link)" in words
    router.link_measured("p0", "d0", 3e9)
    words = router.route(request(800)).words
    assert "the link is too slow for so much KV" in words
    assert "assumed" not in words


def test_a_burst_spreads_over_members_that_nobody_measured() -> None:
    """The case of README's one prefill and two decode workers: one is measured, the others get prompts, too."""
    router = router_of(
        prefill_member(0, **UNMEASURED, **KIND),
        decode_member(0, **MEASURED, **KIND),
        decode_member(1, **UNMEASURED, **KIND),
    )
    computes: set[str | None] = set()
    for i in range(8):
        asked = request(800, chain(str(i), 50))
        route = router.route(asked)
        router.placed(asked, route)
        computes.add(route.prefill_id or route.decode_id)
    router.check_invariants()
    assert computes == {"p0", "d0", "d1"}
