"""Who computes a request's prompt, and who decodes it.

    what members report ──► Roster ─── the least loaded ──┐
    what was routed     ──► PrefixDirectory ─ who has its ┼─► candidates ─► cost of each way ─► the cheapest: a Route
                                              prefix      │   (prediction.py)
    rates of hand-overs ──► Links ────────────────────────┘

The rules:

1.  Warm or idle: both are candidates, and the cost decides. A warm member saves c / r seconds of prefill, a queue costs
    q / r: it is chosen while it saves more than its queue is longer.  A prefix draws load only as far as it pays.
2.  A hand-over has to pay:   cost handed over < cost alone.   The first holds the transfer that prefill does not hide
    and hand_over_s, the second the tokens that the decode member's streams would have late. So a short remainder, a
    slow link, a busy prefill pool and an idle decode member all speak for computing the prompt where it decodes.
3.  What was sent counts from when it was sent (`placed`), not from the member's next report: a burst spreads.
4.  No decode member takes requests: the prefill member that is cheapest for both strokes takes the request.
5.  Equal costs: the id that sorts first. The same history gives the same routes.
6.  A member whose prefill nobody has measured is assumed as fast as the fastest of its kind: so it is tried, and
    measured by that. Without one of its kind that was measured, assumed_prefill_tokens_per_s stands for it. A route's
    words say which of its figures are assumed.

Work of a decision: num_candidates least loaded and as many holders of the prefix for each stroke, of which the
num_candidates cheapest make pairs. It does not grow with the number of members; their orders cost a report a binary
search. Pools of up to num_candidates members are searched whole. In larger ones the order by what a middling request
would cost decides who is looked at: the choice is exact where those of a role differ in one figure of load, and near
elsewhere; links that differ much can hide a better pair.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from twostroke.config.pools import RoutingConfig
from twostroke.pools.directory import PrefixDirectory
from twostroke.pools.links import Links
from twostroke.pools.member import Member
from twostroke.pools.prediction import (
    DecodeSide,
    Placed,
    PrefillSide,
    hand_over_cost_s,
    local_cost_s,
    num_blocks_needed,
    predicted_hand_over,
    predicted_local,
)
from twostroke.pools.roster import MembersByLoad, Roster
from twostroke.pools.route import PredictedWay, Route, RouteReason, RouteRequest
from twostroke.pools.why_alone import why_alone

REPORTS_EVERY_S = 0.2
"""The router hears a member's figures so often at most; what was sent to it counts at once."""

Pair = tuple[PrefillSide, DecodeSide, float]
"""And the seconds of transfer."""


class Router:
    """Knows the members, and answers where a request goes. `route` asks and changes nothing; the rest tells.

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
        self._roster = Roster(config)
        self._links = Links(config.max_links)
        self._prefixes = PrefixDirectory(max_holders=2 * config.num_candidates)

    def __len__(self) -> int:
        """Members, ready or not."""
        return len(self._roster)

    def put(self, member: Member) -> None:
        """A member has joined, or reports. Another epoch than before: its cache is empty, its links are new."""
        if member.member_id in self._roster and self._roster[member.member_id].member.epoch != member.epoch:
            self.remove(member.member_id)
        self._roster.put(member)
        most = min(self._config.max_hashes, member.num_blocks // self._config.hash_stride)
        self._prefixes.open(member.member_id, max(1, most))

    def remove(self, member_id: str) -> None:
        """It has left; what was known of it is forgotten."""
        self._roster.remove(member_id)
        self._prefixes.close(member_id)
        self._links.forget(member_id)

    def placed(self, request: RouteRequest, route: Route) -> None:
        """The request was sent as `route` says: who was chosen has that much more to do until it reports, and is
        believed to have the prompt's blocks."""
        chosen = route.chosen
        if chosen is None:
            return
        num_tokens = request.num_prompt_tokens - chosen.num_cached_tokens
        decode_id, prefill_id = chosen.decode_id, chosen.prefill_id
        if decode_id in self._roster:
            member = self._roster[decode_id].member
            num_blocks = num_blocks_needed(request, member)
            self._roster.place(decode_id, Placed(0 if prefill_id else num_tokens, 1, num_blocks))
            if prefill_id is None or self._computes_alike(prefill_id, decode_id):
                self._remember(decode_id, request)
        if prefill_id is not None and prefill_id in self._roster:
            self._roster.place(prefill_id, Placed(num_tokens))
            self._remember(prefill_id, request)

    def _computes_alike(self, prefill_id: str, decode_id: str) -> bool:
        """Return whether two members' numerics are equal, so that KV from a hand-over is found by later requests."""
        giver, taker = (self._roster[i].member if i in self._roster else None for i in (prefill_id, decode_id))
        return giver is not None and taker is not None and giver.numerics == taker.numerics

    def computed(self, member_id: str, block_hashes: Sequence[bytes]) -> None:
        """A member has these blocks of a chain, from its start on: what it says of its own cache."""
        self._prefixes.add(member_id, self._strided(block_hashes))

    def evicted(self, member_id: str, block_hashes: Iterable[bytes]) -> None:
        """A member has these blocks no longer; hashes that are not remembered are passed over."""
        self._prefixes.drop(member_id, block_hashes)

    def reset(self, member_id: str) -> None:
        """A member's prefix cache is empty."""
        self._prefixes.reset(member_id)

    def link_measured(self, prefill_id: str, decode_id: str, bytes_per_s: float) -> None:
        """A hand-over between the two went that fast.

        Raises:
            InvalidParameter: no rate above 0.
        """
        self._links.measured(prefill_id, decode_id, bytes_per_s)

    def route(self, request: RouteRequest) -> Route:
        """Where the request goes, by what is known now."""
        keys = self._strided(request.block_hashes)
        decodes = self._decode_sides(request, keys)
        if not decodes:
            return self._stand_in(request, keys) or self._nowhere(request)
        alone = [(PrefillSide.of(side.standing, request, side.num_cached_tokens), side) for side in decodes]
        local = predicted_local(*min(alone, key=self._local_key), self._config)
        if not request.may_be_handed_over:
            return self._local_route(local, None, RouteReason.NOT_ALLOWED)
        if not request.has_full_block:
            return self._local_route(local, None, RouteReason.NO_FULL_BLOCK)
        pair = self._best_pair(request, keys, decodes)
        if pair is None:
            return self._local_route(local, None, self._why_no_pair(request, local.decode_id))
        giver, taker = (side.standing.member for side in pair[:2])
        handed = predicted_hand_over(*pair, self._config, self._links.assumed_bytes_per_s(giver, taker))
        if handed.cost_s < local.cost_s:
            reason = RouteReason.HAND_OVER_PAYS
            return Route(
                prefill_id=handed.prefill_id, decode_id=handed.decode_id, reason=reason, hand_over=handed, local=local
            )
        return self._local_route(local, handed, why_alone(request, pair, local, self._config))

    def _stand_in(self, request: RouteRequest, keys: Sequence[bytes]) -> Route | None:
        """Return a route to a prefill member that also decodes.

        None if a decode member takes requests, or no prefill member has room.
        """
        order = self._roster.for_prefill
        if len(self._roster.for_decode) or not len(order):
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
        """Candidates that the request fits into; if none of the candidates, then all that it fits into."""
        most, roster = self._config.num_candidates, self._roster
        nearest = dict.fromkeys(roster.for_decode.first(most) + roster.for_both.first(most))
        nearest.update(dict.fromkeys(self._holders(keys, roster.for_decode)))
        sides = [self._decode_side(i, request, keys) for i in nearest if self._fits(i, request)]
        if not sides and len(roster.for_decode) > len(nearest):
            sides = [self._decode_side(i, request, keys) for i in roster.for_decode if self._fits(i, request)]
        return sides

    def _best_pair(self, request: RouteRequest, keys: Sequence[bytes], decodes: Sequence[DecodeSide]) -> Pair | None:
        most, order = self._config.num_candidates, self._roster.for_prefill
        ids = dict.fromkeys([*order.first(most), *self._holders(keys, order)])
        prefills = [self._prefill_side(i, request, keys) for i in ids if self._holds_prompt(i, request)]
        prefills.sort(key=self._prefill_key)
        nearest = sorted(decodes, key=self._decode_key)[: 2 * most]
        least_s = min(side.decode_s for side in nearest) + self._config.hand_over_s
        best: Pair | None = None
        best_key = (math.inf, "", "")
        for prefill in prefills[: 2 * most]:
            giver = prefill.standing.member
            if self._prefill_key(prefill)[0] + least_s > best_key[0]:
                break  # nobody who comes now has a cheaper pair: a transfer and a tail cost no less than nothing
            for decode in nearest:
                taker = decode.standing.member
                if giver.member_id == taker.member_id or not _kv_fits(giver, taker):
                    continue
                transfer_s = _transfer_bytes(giver, decode) / self._links.bytes_per_s(giver, taker)
                cost_s = hand_over_cost_s(prefill, decode, transfer_s, self._config)
                key = (cost_s, giver.member_id, taker.member_id)
                if key < best_key:
                    best, best_key = (prefill, decode, transfer_s), key
        return best

    def _why_no_pair(self, request: RouteRequest, decode_id: str) -> RouteReason:
        """Return why no prefill member can compute the prompt for a decode member."""
        ready = [member_id for member_id in self._roster.for_prefill if member_id != decode_id]
        if not ready:
            return RouteReason.NO_PREFILL_MEMBER
        if not any(self._holds_prompt(member_id, request) for member_id in ready):
            return RouteReason.PROMPT_TOO_LARGE
        return RouteReason.KV_DOES_NOT_FIT

    def _nowhere(self, request: RouteRequest) -> Route:
        members = list(self._roster.members)
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

    def _local_route(self, local: PredictedWay, handed: PredictedWay | None, reason: RouteReason) -> Route:
        return Route(prefill_id=None, decode_id=local.decode_id, reason=reason, hand_over=handed, local=local)

    def _holders(self, keys: Sequence[bytes], order: MembersByLoad) -> list[str]:
        """Who is believed to have the prefix and takes this stroke."""
        most = self._config.num_candidates
        found = self._prefixes.holders(keys, 2 * most) if keys else []
        return [member_id for member_id in found if member_id in order][:most]

    def _fits(self, member_id: str, request: RouteRequest) -> bool:
        member = self._roster[member_id].member
        return num_blocks_needed(request, member) <= member.num_blocks

    def _holds_prompt(self, member_id: str, request: RouteRequest) -> bool:
        member = self._roster[member_id].member
        return request.num_prompt_tokens < member.num_blocks * member.block_size

    def _prefill_side(self, member_id: str, request: RouteRequest, keys: Sequence[bytes]) -> PrefillSide:
        return PrefillSide.of(self._roster[member_id], request, self._num_cached_tokens(member_id, request, keys))

    def _decode_side(self, member_id: str, request: RouteRequest, keys: Sequence[bytes]) -> DecodeSide:
        return DecodeSide.of(self._roster[member_id], request, self._num_cached_tokens(member_id, request, keys))

    def _num_cached_tokens(self, member_id: str, request: RouteRequest, keys: Sequence[bytes]) -> int:
        if request.block_size % self._roster[member_id].member.block_size:
            return 0
        return self._prefixes.depth(member_id, keys) * self._config.hash_stride * request.block_size

    def _strided(self, block_hashes: Sequence[bytes]) -> Sequence[bytes]:
        stride = self._config.hash_stride
        return block_hashes[stride - 1 :: stride]

    def _remember(self, member_id: str, request: RouteRequest) -> None:
        if request.block_size % self._roster[member_id].member.block_size == 0:
            self._prefixes.add(member_id, self._strided(request.block_hashes))

    def _local_key(self, way: tuple[PrefillSide, DecodeSide]) -> tuple[float, str]:
        return local_cost_s(*way, self._config), way[1].standing.member.member_id

    def _prefill_key(self, side: PrefillSide) -> tuple[float, str]:
        cost_s = side.queue_s + side.prefill_s + side.late_tokens * self._config.late_token_s
        return cost_s, side.standing.member.member_id

    def _decode_key(self, side: DecodeSide) -> tuple[float, str]:
        member = side.standing.member
        travel_s = side.transfer_bytes / member.transport.assumed_bytes_per_s
        return side.slot_s + travel_s + side.tail_s + side.decode_s, member.member_id

    def check_invariants(self) -> None:
        """Of all parts."""
        self._roster.check_invariants()
        self._prefixes.check_invariants()


def _kv_fits(giver: Member, taker: Member) -> bool:
    """Blocks that can be made of each other; the transport itself compares everything else when it connects."""
    small, large = sorted((giver.block_size, taker.block_size))
    is_converted = giver.numerics != taker.numerics
    return large % small == 0 and (is_converted or giver.kv_bytes_per_token == taker.kv_bytes_per_token)


def _transfer_bytes(giver: Member, decode: DecodeSide) -> float:
    """Return the bytes that travel, in the lender's format."""
    taker = decode.standing.member
    if giver.kv_bytes_per_token == taker.kv_bytes_per_token:
        return decode.transfer_bytes
    return decode.transfer_bytes * giver.kv_bytes_per_token / taker.kv_bytes_per_token
