"""The members, ordered by the cost of a typical request.

The order gives the least loaded members without looking at all of them.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import replace

from twostroke.config.pools import RoutingConfig
from twostroke.pools.member import Member
from twostroke.pools.prediction import DecodeSide, MemberState, PlacedLoad, PrefillSide, local_cost_s
from twostroke.pools.route import RouteRequest

TYPICAL_REQUEST = RouteRequest(num_prompt_tokens=512, num_output_tokens=256)
"""Typical request that defines the order. Among equally fast members any request gives the same order."""


class MembersByLoad:
    """Member ids by rising load, ties by id. A change is a binary search and a shift of pointers."""

    def __init__(self) -> None:
        self._loads: dict[str, float] = {}
        self._sorted: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._sorted)

    def __contains__(self, member_id: object) -> bool:
        return member_id in self._loads

    def __iter__(self) -> Iterator[str]:
        return (member_id for _, member_id in self._sorted)

    def first(self, most: int) -> list[str]:
        """Return the ids of the least loaded members."""
        return [member_id for _, member_id in self._sorted[:most]]

    @property
    def least(self) -> float | None:
        """The smallest load; None without members."""
        return self._sorted[0][0] if self._sorted else None

    def put(self, member_id: str, load: float) -> None:
        """Add a member, or change its load."""
        if self._loads.get(member_id) == load:
            return
        self.remove(member_id)
        self._loads[member_id] = load
        bisect.insort(self._sorted, (load, member_id))

    def remove(self, member_id: str) -> None:
        """Remove a member; ignore an unknown one."""
        load = self._loads.pop(member_id, None)
        if load is not None:
            del self._sorted[bisect.bisect_left(self._sorted, (load, member_id))]

    def check_invariants(self) -> None:
        """Check that the list is sorted and has every member once."""
        assert self._sorted == sorted((load, member_id) for member_id, load in self._loads.items())


class MemberList:
    """The members, with the requests placed at each since its last report, in three orders."""

    def __init__(self, config: RoutingConfig) -> None:
        self._config = config
        self._states: dict[str, MemberState] = {}
        self._placed: dict[str, PlacedLoad] = {}
        self.for_prefill = MembersByLoad()
        """Members that compute prompts for others."""
        self.for_decode = MembersByLoad()
        """Members that decode, by the cost of decoding."""
        self.for_both = MembersByLoad()
        """Members that decode, by the cost of prefill and decode together."""
        self._rates: dict[str, MembersByLoad] = {}
        """Members with a measured prefill rate by kind, the fastest first."""
        self._unmeasured: dict[str, set[str]] = {}
        """Members without a measured prefill rate by kind; the fastest rate of the kind is assumed for them."""

    def __contains__(self, member_id: object) -> bool:
        return member_id in self._states

    def __len__(self) -> int:
        return len(self._states)

    def __getitem__(self, member_id: str) -> MemberState:
        """Return a member's state, including the requests placed there."""
        return self._states[member_id]

    @property
    def members(self) -> Iterator[Member]:
        """Last reports of all members."""
        return (state.member for state in self._states.values())

    def put(self, member: Member) -> None:
        """Add a member, or take its report, which includes the requests placed there before."""
        before = self._states.get(member.member_id)
        if before is not None and before.member.kind != member.kind:
            self._forget_rate(before.member)
        self._placed.pop(member.member_id, None)
        fastest = self._rate_of(member.kind)
        if member.kind:
            self._note_rate(member)
        self._update_orders(member, PlacedLoad())
        if self._rate_of(member.kind) != fastest:
            self._update_unmeasured(member.kind)

    def place(self, member_id: str, more: PlacedLoad) -> None:
        """Add a request to a member's load; ignore a member that has left."""
        state = self._states.get(member_id)
        if state is None:
            return
        before = self._placed.get(member_id, PlacedLoad())
        placed = replace(
            before,
            num_prompt_tokens=before.num_prompt_tokens + more.num_prompt_tokens,
            num_sequences=before.num_sequences + more.num_sequences,
            num_blocks=before.num_blocks + more.num_blocks,
        )
        self._placed[member_id] = placed
        self._update_orders(state.member, placed)

    def remove(self, member_id: str) -> None:
        """Remove a member."""
        left = self._states.pop(member_id, None)
        self._placed.pop(member_id, None)
        self._remove_from_orders(member_id)
        if left is not None:
            self._forget_rate(left.member)

    def _rate_of(self, kind: str) -> float | None:
        """Return the fastest measured prefill of a kind; None where none was measured."""
        least = self._rates[kind].least if kind in self._rates else None
        return None if least is None else -least

    def _note_rate(self, member: Member) -> None:
        """Record a report's measured prefill rate, or that it has none."""
        rates = self._rates.setdefault(member.kind, MembersByLoad())
        unmeasured = self._unmeasured.setdefault(member.kind, set())
        if member.prefill_tokens_per_s is None:
            rates.remove(member.member_id)
            unmeasured.add(member.member_id)
        else:
            rates.put(member.member_id, -member.prefill_tokens_per_s)
            unmeasured.discard(member.member_id)

    def _forget_rate(self, member: Member) -> None:
        """Forget a member's rate, because it has left or changed its kind."""
        kind = member.kind
        if kind not in self._rates:
            return
        self._rates[kind].remove(member.member_id)
        self._unmeasured[kind].discard(member.member_id)
        self._update_unmeasured(kind)
        if not len(self._rates[kind]) and not self._unmeasured[kind]:
            del self._rates[kind], self._unmeasured[kind]

    def _update_unmeasured(self, kind: str) -> None:
        """Recompute the members for which another member's rate is assumed."""
        for member_id in self._unmeasured.get(kind, ()):
            self._update_orders(self._states[member_id].member, self._placed.get(member_id, PlacedLoad()))

    def _update_orders(self, member: Member, placed: PlacedLoad) -> None:
        member_id, role = member.member_id, member.role
        state = self._states[member_id] = MemberState.of(member, placed, self._config, self._rate_of(member.kind))
        if not member.takes_requests:
            self._remove_from_orders(member_id)
            return
        here = PrefillSide.of(state, TYPICAL_REQUEST, 0)
        if role.prefills_for_others:
            late_s = here.late_tokens * self._config.late_token_s
            self.for_prefill.put(member_id, here.queue_s + here.prefill_s + late_s)
        else:
            self.for_prefill.remove(member_id)
        if role.decodes:
            decode = DecodeSide.of(state, TYPICAL_REQUEST, 0)
            self.for_decode.put(member_id, decode.slot_s + decode.decode_s + decode.tail_s)
            self.for_both.put(member_id, local_cost_s(here, decode, self._config))
        else:
            self.for_decode.remove(member_id)
            self.for_both.remove(member_id)

    def _remove_from_orders(self, member_id: str) -> None:
        for order in (self.for_prefill, self.for_decode, self.for_both):
            order.remove(member_id)

    def check_invariants(self) -> None:
        """Check that the orders contain exactly the members that accept requests."""
        ready = {m.member_id: m.role for m in self.members if m.takes_requests}
        assert set(self.for_prefill) == {i for i, role in ready.items() if role.prefills_for_others}
        assert set(self.for_decode) == set(self.for_both) == {i for i, role in ready.items() if role.decodes}
        for order in (self.for_prefill, self.for_decode, self.for_both, *self._rates.values()):
            order.check_invariants()
        named = [member for member in self.members if member.kind]
        measured = {member.member_id for member in named if member.prefill_tokens_per_s is not None}
        assert {i for rates in self._rates.values() for i in rates} == measured
        assert {i for ids in self._unmeasured.values() for i in ids} == {m.member_id for m in named} - measured
