"""Choice of the members that compute a request's prompt and decode it.

    members' reports   ──► MemberList ─── least loaded ──────────┐
    earlier routes     ──► PrefixDirectory ─ prefix holders ─┼─► candidates ─► cost of each way ─► cheapest: a Route
                                                             │   (prediction.py)
    rates of hand-overs ─► Links ────────────────────────────┘

The rules:

1.  Both members with a cached prefix and idle members are candidates, and the cost decides. A cached prefix saves
    c / r seconds of prefill, and a queue costs q / r. So a cached prefix attracts load only as long as it saves more
    than the queue costs.
2.  A hand-over has to pay: its cost must be less than the cost without one. The first includes hand_over_s and the
    part of the transfer that prefill does not hide; the second includes the tokens that the decode member's streams
    would have late. So a short remainder, a slow link, a busy prefill pool or an idle decode member all favour
    computing the prompt where it decodes.
3.  A placed request counts at once (`placed`), not only after the member's next report, so bursts spread.
4.  If no decode member accepts requests, the prefill member that is cheapest for prefill and decode takes the request.
5.  Of equal costs, the id that sorts first wins. So the same history gives the same routes.
6.  A member with an unmeasured prefill rate is assumed as fast as the fastest of its kind. So it is tried, and thereby
    measured. If no member of its kind was measured, assumed_prefill_tokens_per_s is used. A route's words say which
    of its figures are assumed.

Work of a decision: num_candidates least loaded members and as many holders of the prefix for each of prefill and
decode, of which the num_candidates cheapest form pairs. It does not grow with the number of members; a report costs a
binary search in their orders. Pools of up to num_candidates members are searched completely. In larger ones the cost
of a typical request selects the candidates. The choice is exact if members of a role differ in one figure of load, and
close to it otherwise; links that differ much can hide a better pair.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from twostroke.config.pools import RoutingConfig
from twostroke.pools.directory import PrefixDirectory
from twostroke.pools.links import Links
from twostroke.pools.member import Member
from twostroke.pools.member_list import MemberList, MembersByLoad
from twostroke.pools.no_handover import no_handover_reason
from twostroke.pools.prediction import (
    DecodeSide,
    PlacedLoad,
    PrefillSide,
    hand_over_cost_s,
    local_cost_s,
    num_blocks_needed,
    predicted_hand_over,
    predicted_local,
)
from twostroke.pools.route import Route, RoutePrediction, RouteReason, RouteRequest

REPORTS_EVERY_S = 0.2
"""Minimum seconds between two updates of a member's figures; requests sent to it count at once."""

Pair = tuple[PrefillSide, DecodeSide, float]
"""Prefill side, decode side, and seconds of transfer."""


class Router:
    """The members' state, and the choice of routes. `route` only reads the state; the other methods update it.

    >>> from twostroke.pools.member import Role
    >>> router = Router(RoutingConfig())
    >>> for name, role in (("p0", Role.PREFILL), ("d0", Role.DECODE)):
    ...     router.put(Member(member_id=name, role=role, max_num_seqs=8, num_running=4, num_free_blocks=900,
    ...                       num_blocks=1000, block_size=16, kv_bytes_per_token=100_000, num_layers=28,
    ...                       prefill_tokens_per_s=1000.0, step_s=0.05))
    >>> router.route(RouteRequest(num_prompt_tokens=800, num_output_tokens=100)).words.partition(" (")[0]
    'p0 computes the prompt for d0: the hand-over is predicted to pay'
    >>> router.route(RouteRequest(num_prompt_tokens=5, num_output_tokens=100)).words.partition(" (")[0]
    'd0 computes the prompt itself: the prompt is shorter than one KV block, and only whole blocks are handed over'
    """

    def __init__(self, config: RoutingConfig) -> None:
        self._config = config
        self._members = MemberList(config)
        self._links = Links(config.max_links)
        self._prefixes = PrefixDirectory(max_holders=2 * config.num_candidates)

    def __len__(self) -> int:
        """Return the number of members, ready or not."""
        return len(self._members)

    def put(self, member: Member) -> None:
        """Add a member, or take its report. If its epoch has changed, its cache is empty and its links are unknown."""
        if member.member_id in self._members and self._members[member.member_id].member.epoch != member.epoch:
            self.remove(member.member_id)
        self._members.put(member)
        most = min(self._config.max_hashes, member.num_blocks // self._config.hash_stride)
        self._prefixes.open(member.member_id, max(1, most))

    def remove(self, member_id: str) -> None:
        """Remove a member, and forget everything about it."""
        self._members.remove(member_id)
        self._prefixes.close(member_id)
        self._links.forget(member_id)

    def placed(self, request: RouteRequest, route: Route) -> None:
        """Record that the request was sent along a route.

        The chosen members have that much more work until they report, and probably have the prompt's blocks.
        """
        chosen = route.chosen
        if chosen is None:
            return
        num_tokens = request.num_prompt_tokens - chosen.num_cached_tokens
        decode_id, prefill_id = chosen.decode_id, chosen.prefill_id
        if decode_id in self._members:
            member = self._members[decode_id].member
            num_blocks = num_blocks_needed(request, member)
            self._members.place(decode_id, PlacedLoad(0 if prefill_id else num_tokens, 1, num_blocks))
            if prefill_id is None or self._has_same_numerics(prefill_id, decode_id):
                self._remember(decode_id, request)
        if prefill_id is not None and prefill_id in self._members:
            self._members.place(prefill_id, PlacedLoad(num_tokens))
            self._remember(prefill_id, request)

    def _has_same_numerics(self, prefill_id: str, decode_id: str) -> bool:
        """Return whether two members' numerics are equal, so that KV from a hand-over is found by later requests."""
        prefill_member, decode_member = (
            self._members[i].member if i in self._members else None for i in (prefill_id, decode_id)
        )
        return (
            prefill_member is not None
            and decode_member is not None
            and prefill_member.numerics == decode_member.numerics
        )

    def computed(self, member_id: str, block_hashes: Sequence[bytes]) -> None:
        """Record a member's report that it has these blocks of a chain, from the start on."""
        self._prefixes.add(member_id, self._strided(block_hashes))

    def evicted(self, member_id: str, block_hashes: Iterable[bytes]) -> None:
        """Record that a member has evicted these blocks; ignore unknown hashes."""
        self._prefixes.drop(member_id, block_hashes)

    def reset(self, member_id: str) -> None:
        """Record that a member's prefix cache is empty."""
        self._prefixes.reset(member_id)

    def link_measured(self, prefill_id: str, decode_id: str, bytes_per_s: float) -> None:
        """Record the rate of a hand-over between two members.

        Raises:
            InvalidParameter: the rate is not above 0.
        """
        self._links.measured(prefill_id, decode_id, bytes_per_s)

    def route(self, request: RouteRequest) -> Route:
        """Return the route of a request, from the current state."""
        keys = self._strided(request.block_hashes)
        decodes = self._decode_sides(request, keys)
        if not decodes:
            return self._route_to_prefill(request, keys) or self._unroutable(request)
        alone = [(PrefillSide.of(side.state, request, side.num_cached_tokens), side) for side in decodes]
        local = predicted_local(*min(alone, key=self._local_key), self._config)
        if not request.may_be_handed_over:
            return self._local_route(local, None, RouteReason.NOT_ALLOWED)
        if not request.has_full_block:
            return self._local_route(local, None, RouteReason.NO_FULL_BLOCK)
        pair = self._best_pair(request, keys, decodes)
        if pair is None:
            return self._local_route(local, None, self._no_pair_reason(request, local.decode_id))
        prefill_member, decode_member = (side.state.member for side in pair[:2])
        handed = predicted_hand_over(
            *pair, self._config, self._links.assumed_bytes_per_s(prefill_member, decode_member)
        )
        if handed.cost_s < local.cost_s:
            reason = RouteReason.HAND_OVER_PAYS
            return Route(
                prefill_id=handed.prefill_id, decode_id=handed.decode_id, reason=reason, hand_over=handed, local=local
            )
        return self._local_route(local, handed, no_handover_reason(request, pair, local, self._config))

    def _route_to_prefill(self, request: RouteRequest, keys: Sequence[bytes]) -> Route | None:
        """Return a route to a prefill member that also decodes.

        None if a decode member takes requests, or no prefill member has room.
        """
        order = self._members.for_prefill
        if len(self._members.for_decode) or not len(order):
            return None
        ids = dict.fromkeys([*order.first(self._config.num_candidates), *self._holders(keys, order)])
        ways = [
            (self._prefill_side(i, request, keys), self._decode_side(i, request, keys))
            for i in (ids if any(self._fits(i, request) for i in ids) else order)
            if self._fits(i, request)
        ]
        if not ways:
            return None
        local = predicted_local(*min(ways, key=self._local_key), self._config)
        return self._local_route(local, None, RouteReason.NO_DECODE_LEFT)

    def _decode_sides(self, request: RouteRequest, keys: Sequence[bytes]) -> list[DecodeSide]:
        """Return the candidates with room for the request; if none has, all decode members with room."""
        most, members = self._config.num_candidates, self._members
        nearest = dict.fromkeys(members.for_decode.first(most) + members.for_both.first(most))
        nearest.update(dict.fromkeys(self._holders(keys, members.for_decode)))
        sides = [self._decode_side(i, request, keys) for i in nearest if self._fits(i, request)]
        if not sides and len(members.for_decode) > len(nearest):
            sides = [self._decode_side(i, request, keys) for i in members.for_decode if self._fits(i, request)]
        return sides

    def _best_pair(self, request: RouteRequest, keys: Sequence[bytes], decodes: Sequence[DecodeSide]) -> Pair | None:
        most, order = self._config.num_candidates, self._members.for_prefill
        ids = dict.fromkeys([*order.first(most), *self._holders(keys, order)])
        prefills = [self._prefill_side(i, request, keys) for i in ids if self._holds_prompt(i, request)]
        prefills.sort(key=self._prefill_key)
        nearest = sorted(decodes, key=self._decode_key)[: 2 * most]
        least_s = min(side.decode_s for side in nearest) + self._config.hand_over_s
        best: Pair | None = None
        best_key = (math.inf, "", "")
        for prefill in prefills[: 2 * most]:
            prefill_member = prefill.state.member
            if self._prefill_key(prefill)[0] + least_s > best_key[0]:
                break  # later ones cost more: transfer and tail are at least 0
            for decode in nearest:
                decode_member = decode.state.member
                if prefill_member.member_id == decode_member.member_id or not _kv_fits(prefill_member, decode_member):
                    continue
                transfer_s = _transfer_bytes(prefill_member, decode) / self._links.bytes_per_s(
                    prefill_member, decode_member
                )
                cost_s = hand_over_cost_s(prefill, decode, transfer_s, self._config)
                key = (cost_s, prefill_member.member_id, decode_member.member_id)
                if key < best_key:
                    best, best_key = (prefill, decode, transfer_s), key
        return best

    def _no_pair_reason(self, request: RouteRequest, decode_id: str) -> RouteReason:
        """Return why no prefill member can compute the prompt for a decode member."""
        ready = [member_id for member_id in self._members.for_prefill if member_id != decode_id]
        if not ready:
            return RouteReason.NO_PREFILL_MEMBER
        if not any(self._holds_prompt(member_id, request) for member_id in ready):
            return RouteReason.PROMPT_TOO_LARGE
        return RouteReason.KV_DOES_NOT_FIT

    def _unroutable(self, request: RouteRequest) -> Route:
        members = list(self._members.members)
        decoding = [member for member in members if member.role.decodes]
        ready = [member for member in decoding if member.takes_requests]
        if ready:
            reason = RouteReason.TOO_LARGE
            largest = max(ready, key=lambda member: member.num_blocks * member.block_size)
            detail = (
                f"the request may need {request.num_prompt_tokens + request.num_output_tokens} tokens of KV; the "
                f"largest member that decodes, {largest.member_id}, has {largest.num_blocks * largest.block_size}. "
                "Shorten it, lower max_tokens, or give the decode pool more KV memory (--kv-cache-memory)."
            )
        else:
            reason = RouteReason.NO_DECODE_MEMBER
            num_draining = sum(member.is_draining for member in decoding)
            detail = (
                f"none of {len(decoding)} members that decode takes requests ({num_draining} drain, "
                f"{len(decoding) - num_draining} are not ready), and no prefill member has room for it. Ask again when "
                "one is ready, or add one to the decode pool."
            )
        return Route(prefill_id=None, decode_id=None, reason=reason, hand_over=None, local=None, detail=detail)

    def _local_route(self, local: RoutePrediction, handed: RoutePrediction | None, reason: RouteReason) -> Route:
        return Route(prefill_id=None, decode_id=local.decode_id, reason=reason, hand_over=handed, local=local)

    def _holders(self, keys: Sequence[bytes], order: MembersByLoad) -> list[str]:
        """Return the members of an order that probably have the prefix."""
        most = self._config.num_candidates
        found = self._prefixes.holders(keys, 2 * most) if keys else []
        return [member_id for member_id in found if member_id in order][:most]

    def _fits(self, member_id: str, request: RouteRequest) -> bool:
        member = self._members[member_id].member
        return num_blocks_needed(request, member) <= member.num_blocks

    def _holds_prompt(self, member_id: str, request: RouteRequest) -> bool:
        member = self._members[member_id].member
        return request.num_prompt_tokens < member.num_blocks * member.block_size

    def _prefill_side(self, member_id: str, request: RouteRequest, keys: Sequence[bytes]) -> PrefillSide:
        return PrefillSide.of(self._members[member_id], request, self._num_cached_tokens(member_id, request, keys))

    def _decode_side(self, member_id: str, request: RouteRequest, keys: Sequence[bytes]) -> DecodeSide:
        return DecodeSide.of(self._members[member_id], request, self._num_cached_tokens(member_id, request, keys))

    def _num_cached_tokens(self, member_id: str, request: RouteRequest, keys: Sequence[bytes]) -> int:
        if request.block_size % self._members[member_id].member.block_size:
            return 0
        return self._prefixes.depth(member_id, keys) * self._config.hash_stride * request.block_size

    def _strided(self, block_hashes: Sequence[bytes]) -> Sequence[bytes]:
        stride = self._config.hash_stride
        return block_hashes[stride - 1 :: stride]

    def _remember(self, member_id: str, request: RouteRequest) -> None:
        if request.block_size % self._members[member_id].member.block_size == 0:
            self._prefixes.add(member_id, self._strided(request.block_hashes))

    def _local_key(self, way: tuple[PrefillSide, DecodeSide]) -> tuple[float, str]:
        return local_cost_s(*way, self._config), way[1].state.member.member_id

    def _prefill_key(self, side: PrefillSide) -> tuple[float, str]:
        cost_s = side.queue_s + side.prefill_s + side.late_tokens * self._config.late_token_s
        return cost_s, side.state.member.member_id

    def _decode_key(self, side: DecodeSide) -> tuple[float, str]:
        member = side.state.member
        travel_s = side.transfer_bytes / member.transport.assumed_bytes_per_s
        return side.slot_s + travel_s + side.tail_s + side.decode_s, member.member_id

    def check_invariants(self) -> None:
        """Check the invariants of all parts."""
        self._members.check_invariants()
        self._prefixes.check_invariants()


def _kv_fits(prefill_member: Member, decode_member: Member) -> bool:
    """Return whether one member's blocks can be converted into the other's; the transport compares everything else when
    it connects."""
    small, large = sorted((prefill_member.block_size, decode_member.block_size))
    is_converted = prefill_member.numerics != decode_member.numerics
    return large % small == 0 and (
        is_converted or prefill_member.kv_bytes_per_token == decode_member.kv_bytes_per_token
    )


def _transfer_bytes(prefill_member: Member, decode: DecodeSide) -> float:
    """Return the bytes to transfer, in the lender's format."""
    decode_member = decode.state.member
    if prefill_member.kv_bytes_per_token == decode_member.kv_bytes_per_token:
        return decode.transfer_bytes
    return decode.transfer_bytes * prefill_member.kv_bytes_per_token / decode_member.kv_bytes_per_token
