"""Predicted costs of a request at each member: a few formulas over the members' reports. All times in seconds from now.

    N   prompt tokens            o   output tokens expected       B   tokens of a block, the larger one
    c   of N, probably cached    r   prefill tokens/s             K   KV bytes of a token      b   link bytes/s

Where the prompt is computed (p, or d itself):

    queue   = queued prompt tokens / r + silence          prefill = (N - c) / r
    late    = prefill x streams that decode there / TPOT target
              tokens of other streams that a prefill beside them delays, each by one target

Where it decodes (d), with one more stream:

    step    = step_s + seconds added by a stream          decode  = o x step
    slot    = max(queue,  streams that must end for a slot x o x step / slots,
                          streams that must end for the missing blocks x o x step / S)
              one of S streams ends every o / S steps, and frees its part of the used blocks

    alone       TTFT = slot + prefill
                cost = TTFT + late x late_token_s + decode

    handed over, layer by layer while p computes (so a max, not a sum); d fetches once it has blocks:

                transfer = (whole blocks of N, less c of d) x K / b
                TTFT     = queue + prefill                                            p sends the first token itself
                goes on  = max(TTFT, max(queue, slot) + transfer) + transfer / layers + (N mod B) / r of d
                                                                   └ the last layer    └ the block that is not whole
                exposed  = goes on - TTFT
                cost     = goes on + hand_over_s + late x late_token_s + decode

If nothing is cached and all members are idle, a request is computed where it decodes, unless that would delay streams.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from twostroke.config.pools import RoutingConfig
from twostroke.pools.member import Member
from twostroke.pools.route import RoutePrediction, RouteRequest


@dataclass(frozen=True, slots=True)
class PlacedLoad:
    """Load sent to a member since its last report, so that a burst counts before the member has received it."""

    num_prompt_tokens: int = 0
    num_sequences: int = 0
    num_blocks: int = 0


@dataclass(frozen=True, slots=True)
class MemberState:
    """State of a member for the formulas, computed once per report."""

    member: Member
    queue_s: float
    prefill_s_per_token: float
    is_rate_assumed: bool
    """Whether its prefill rate was not measured."""
    num_streams: int
    """Streams that decode or wait."""
    step_s: float
    """Seconds of a step with one more stream."""
    num_departures: int
    """Streams that have to end before a slot is free."""
    num_used_blocks: int
    late_tokens_per_s: float
    """Late tokens per second of prefill."""

    @classmethod
    def of(
        cls, member: Member, placed: PlacedLoad, config: RoutingConfig, rate_of_kind: float | None = None
    ) -> MemberState:
        """Return a member's state after the requests placed there.

        Args:
            member: its last report.
            placed: load sent to it since then.
            config: has the rate to assume where nothing was measured.
            rate_of_kind: measured prefill tokens/s of another member of its kind.
        """
        rate = member.prefill_tokens_per_s or rate_of_kind or config.assumed_prefill_tokens_per_s
        step_s, most = member.step_s, member.max_num_seqs
        added_s = step_s / most if member.step_s_per_sequence is None else member.step_s_per_sequence
        num_streams = member.num_running + member.num_waiting + placed.num_sequences
        num_delayed = min(most, num_streams) if member.role.decodes else 0
        return cls(
            member=member,
            queue_s=(member.num_queued_prompt_tokens + placed.num_prompt_tokens) / rate + member.silent_s,
            prefill_s_per_token=1 / rate,
            is_rate_assumed=member.prefill_tokens_per_s is None,
            num_streams=num_streams,
            step_s=step_s + added_s * (placed.num_sequences + 1),
            num_departures=max(0, num_streams + 1 - most),
            num_used_blocks=min(member.num_blocks, member.num_blocks - member.num_free_blocks + placed.num_blocks),
            late_tokens_per_s=num_delayed / config.tpot_target_s,
        )

    @property
    def assumed_tokens_per_s(self) -> float | None:
        """Assumed prefill rate; None: it was measured."""
        return 1 / self.prefill_s_per_token if self.is_rate_assumed else None


class PrefillSide(NamedTuple):
    """A request at a member that may compute its prompt. A tuple, as DecodeSide, because each decision creates many."""

    state: MemberState
    num_cached_tokens: int
    queue_s: float
    prefill_s: float
    late_tokens: float

    @classmethod
    def of(cls, state: MemberState, request: RouteRequest, num_cached_tokens: int) -> PrefillSide:
        """Return the figures; at least one token is computed, because the first output token needs its state."""
        num_cached_tokens = min(num_cached_tokens, request.num_prompt_tokens - 1)
        prefill_s = (request.num_prompt_tokens - num_cached_tokens) * state.prefill_s_per_token
        late_tokens = prefill_s * state.late_tokens_per_s
        return cls(state, num_cached_tokens, state.queue_s, prefill_s, late_tokens)


class DecodeSide(NamedTuple):
    """A request at a member that may decode it."""

    state: MemberState
    num_cached_tokens: int
    slot_s: float
    tail_s: float
    """Seconds to compute the last block, if it is not whole."""
    transfer_bytes: int
    decode_s: float

    @classmethod
    def of(cls, state: MemberState, request: RouteRequest, num_cached_tokens: int) -> DecodeSide:
        """Return the figures, without checking that the request fits (`num_blocks_needed`)."""
        member = state.member
        num_tail = request.num_prompt_tokens % max(member.block_size, request.block_size)
        num_missing_tokens = max(0, request.num_prompt_tokens - num_tail - num_cached_tokens)
        # cached blocks without other users count as free, so they save nothing here
        num_missing = num_blocks_needed(request, member) - (member.num_blocks - state.num_used_blocks)
        decode_s = request.num_output_tokens * state.step_s
        slot_s = max(state.queue_s, state.num_departures * decode_s / member.max_num_seqs)
        if num_missing > 0:  # streams that hold blocks have to end first; assume one if none is known
            num_streams = max(1, state.num_streams)
            num_ends = math.ceil(num_missing * num_streams / max(1, state.num_used_blocks))
            slot_s = max(slot_s, num_ends * decode_s / num_streams)
        return cls(
            state,
            num_cached_tokens,
            slot_s,
            num_tail * state.prefill_s_per_token,
            num_missing_tokens * member.kv_bytes_per_token,
            decode_s,
        )


def num_blocks_needed(request: RouteRequest, member: Member) -> int:
    """Return the KV blocks that the whole request needs at a member.

    >>> from twostroke.pools.member import Role
    >>> member = Member(member_id="d0", role=Role.DECODE, max_num_seqs=1, num_free_blocks=9, num_blocks=9,
    ...                 block_size=16, kv_bytes_per_token=1)
    >>> num_blocks_needed(RouteRequest(num_prompt_tokens=30, num_output_tokens=3), member)
    3
    """
    return -(-(request.num_prompt_tokens + request.num_output_tokens) // member.block_size)


def local_cost_s(here: PrefillSide, decode: DecodeSide, config: RoutingConfig) -> float:
    """Return the cost of prefill and decode at one member."""
    return decode.slot_s + here.prefill_s + here.late_tokens * config.late_token_s + decode.decode_s


def decode_start_s(prefill: PrefillSide, decode: DecodeSide, transfer_s: float) -> float:
    """Return the time until the second token of a handed-over request can be computed.

    A prompt of 1 s whose KV takes 1 s, in ten layers, does not take 2 s:

    >>> from twostroke.pools.member import Role
    >>> member = Member(member_id="m", role=Role.BOTH, max_num_seqs=1, num_free_blocks=9, num_blocks=9, block_size=10,
    ...                 kv_bytes_per_token=1, num_layers=10, prefill_tokens_per_s=10)
    >>> standing = MemberState.of(member, PlacedLoad(), RoutingConfig())
    >>> request = RouteRequest(num_prompt_tokens=10, num_output_tokens=1, block_size=10)
    >>> decode_start_s(PrefillSide.of(standing, request, 0), DecodeSide.of(standing, request, 0), transfer_s=1.0)
    1.1
    """
    fetched_s = max(prefill.queue_s, decode.slot_s) + transfer_s
    last_layer_s = transfer_s / prefill.state.member.num_layers
    return max(prefill.queue_s + prefill.prefill_s, fetched_s) + last_layer_s + decode.tail_s


def hand_over_cost_s(prefill: PrefillSide, decode: DecodeSide, transfer_s: float, config: RoutingConfig) -> float:
    """Return the cost of the prompt at one member and decode at another."""
    late_s = prefill.late_tokens * config.late_token_s
    return decode_start_s(prefill, decode, transfer_s) + config.hand_over_s + late_s + decode.decode_s


def predicted_local(here: PrefillSide, decode: DecodeSide, config: RoutingConfig) -> RoutePrediction:
    """Return the prediction with the figures of `local_cost_s`."""
    return RoutePrediction(
        prefill_id=None,
        decode_id=decode.state.member.member_id,
        num_cached_tokens=here.num_cached_tokens,
        queue_s=decode.slot_s,
        prefill_s=here.prefill_s,
        transfer_s=0.0,
        exposed_s=0.0,
        ttft_s=decode.slot_s + here.prefill_s,
        late_tokens=here.late_tokens,
        decode_s=decode.decode_s,
        cost_s=local_cost_s(here, decode, config),
        assumed_tokens_per_s=here.state.assumed_tokens_per_s,
    )


def predicted_hand_over(
    prefill: PrefillSide,
    decode: DecodeSide,
    transfer_s: float,
    config: RoutingConfig,
    assumed_bytes_per_s: float | None = None,
) -> RoutePrediction:
    """Return the prediction with the figures of `hand_over_cost_s`; the last argument is the link's rate if not
    measured."""
    ttft_s = prefill.queue_s + prefill.prefill_s
    return RoutePrediction(
        prefill_id=prefill.state.member.member_id,
        decode_id=decode.state.member.member_id,
        num_cached_tokens=prefill.num_cached_tokens,
        queue_s=prefill.queue_s,
        prefill_s=prefill.prefill_s,
        transfer_s=transfer_s,
        exposed_s=decode_start_s(prefill, decode, transfer_s) - ttft_s,
        ttft_s=ttft_s,
        late_tokens=prefill.late_tokens,
        decode_s=decode.decode_s,
        cost_s=hand_over_cost_s(prefill, decode, transfer_s, config),
        assumed_tokens_per_s=prefill.state.assumed_tokens_per_s,
        assumed_bytes_per_s=assumed_bytes_per_s,
    )
