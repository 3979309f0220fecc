"""Number of members that a pool should have, and which to drain if there are too many. Each pool is scaled by itself.

    need, in members that are busy all the time
        prefill     max( arriving prompt tokens/s / r,     queued prompt tokens / (r x queue_share x TTFT target) )
                         └ to keep up                       └ to end the queue in time
        decode      max( streams / n,                      used KV blocks / blocks of a member )
                    n = (TPOT target - step_s) / step_s_per_sequence, 1 to max_num_seqs: streams that keep the target

                      up_utilization                     down_utilization
    members       ceil(need / 0.8)                       ceil(need / 0.6)
         ──────────────┼──────────────────────────────────────┼──────────────►
           too few     │            nothing changes           │   too many
           up at once, │                                      │   down after hold_intervals in a row, to the most that
           max_step_up │                                      │   was needed in them, a tenth of the pool at a time

The need does not depend on the current number of members, so a constant load leads to a constant size. The band
between the two limits prevents oscillation: every size that the autoscaler chooses lies within it. Members are never
stopped at once: they drain, those with the fewest streams first.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

from twostroke.config.checks import check_int, check_number
from twostroke.config.pools import ScalingConfig

_MOST = float(1 << 53)
_DRAIN_DIVISOR = 10
"""Reciprocal of the share of the pool that is drained at a time: a tenth."""


@dataclass(frozen=True, slots=True)
class Replica:
    """A member as the autoscaler sees it; draining members are left out."""

    member_id: str
    num_streams: int
    """Streams that decode, compute a prompt or wait there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillLoad:
    """Load of the prefill pool in the last interval.

    Raises:
        InvalidParameter: a count or a rate is not valid.
    """

    replicas: Sequence[Replica]
    """Members that do not drain, including those that start: otherwise more would be started until they are ready."""
    num_queued_prompt_tokens: int
    """Prompt tokens that are not cached and whose computation has not begun."""
    prompt_tokens_per_s: float
    """Rate of arriving prompt tokens that are not cached."""
    prefill_tokens_per_s: float | None
    """Prefill rate of one member, measured while it had work; None: not measured."""

    def __post_init__(self) -> None:
        """Check that all values are in range."""
        check_int("num_queued_prompt_tokens", self.num_queued_prompt_tokens, 0)
        check_number("prompt_tokens_per_s", self.prompt_tokens_per_s, 0, _MOST, "0 or more tokens a second")
        if self.prefill_tokens_per_s is not None:
            limit = "more than 0 tokens a second, or nothing while it is not measured"
            check_number("prefill_tokens_per_s", self.prefill_tokens_per_s, 0, _MOST, limit, low_open=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLoad:
    """Load of the decode pool in the last interval.

    Raises:
        InvalidParameter: a count or a time is not valid.
    """

    replicas: Sequence[Replica]
    """Members, as in PrefillLoad."""
    num_sequences: int
    """Running and waiting sequences in the whole pool."""
    num_used_blocks: int
    """Blocks in use in the whole pool, and those that waiting sequences will need."""
    num_blocks: int
    """Blocks of one member."""
    max_num_seqs: int
    """Slots of one member."""
    step_s: float | None
    """Seconds of a decode step without streams: intercept of the line through measured steps; None: not measured."""
    step_s_per_sequence: float = 0.0
    """Slope of that line."""

    def __post_init__(self) -> None:
        """Check that all values are in range."""
        for name in ("num_sequences", "num_used_blocks"):
            check_int(name, getattr(self, name), 0)
        for name in ("num_blocks", "max_num_seqs"):
            check_int(name, getattr(self, name), 1)
        for name in ("step_s", "step_s_per_sequence"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), 0, _MOST, "0 or more seconds")


class ScalingReason(enum.StrEnum):
    """Reason for the size that is wanted."""

    STEADY = "steady"
    UP = "up"
    AT_MAX = "at_max"
    """More than max_replicas would be needed."""
    HOLDING = "holding"
    """Fewer would be enough, but not for long enough yet."""
    DOWN = "down"
    BELOW_MIN = "below_min"
    """Members are missing: one has died, or the minimum was raised."""
    ABOVE_MAX = "above_max"
    NOT_MEASURED = "not_measured"
    """Speed not known yet: the size stays as it is."""


@dataclass(frozen=True, slots=True)
class ScalingState:
    """State that a pool keeps between intervals; initially ScalingState()."""

    num_intervals_low: int = 0
    """Number of intervals in a row in which fewer members would have been enough."""
    most_wanted: int = 0
    """Largest size needed in these intervals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingDecision:
    """Decision about the size of one pool."""

    num_wanted: int
    drain: tuple[str, ...]
    """Members to drain now, the one with the fewest streams first."""
    reason: ScalingReason
    need: float | None
    """Members that would be busy all the time; None where not measured."""
    limited_by: str
    """Part of the need that is largest, in words."""
    state: ScalingState
    """State to pass in the next interval."""

    @property
    def words(self) -> str:
        """Reason in words.

        >>> ScalingDecision(num_wanted=8, drain=(), reason=ScalingReason.UP, need=6.0,
        ...                 limited_by="queued prompt tokens", state=ScalingState()).words
        'up: queued prompt tokens keep 6.0 members busy'
        """
        reason = self.reason.replace("_", " ")
        return reason if self.need is None else f"{reason}: {self.limited_by} keep {self.need:.1f} members busy"


def streams_within_target(step_s: float, step_s_per_sequence: float, tpot_target_s: float, max_num_seqs: int) -> int:
    """Return the number of streams of one member whose step still meets the target.

    If not even one stream meets the target, more members do not help, and the target is ignored.

    >>> streams_within_target(step_s=0.030, step_s_per_sequence=0.001, tpot_target_s=0.050, max_num_seqs=64)
    20
    >>> streams_within_target(step_s=0.060, step_s_per_sequence=0.001, tpot_target_s=0.050, max_num_seqs=64)
    64
    """
    if step_s + step_s_per_sequence > tpot_target_s or step_s_per_sequence <= 0:
        return max_num_seqs
    # compensate rounding: 20 x 0.001 is slightly more than 0.05 - 0.03
    streams = min(float(max_num_seqs), (tpot_target_s - step_s) / step_s_per_sequence + 1e-9)
    return max(1, math.floor(streams))


def scale_prefill(load: PrefillLoad, config: ScalingConfig, state: ScalingState) -> ScalingDecision:
    """Decide the size of the prefill pool for an interval.

    If 3,000 tokens wait, a member prefills 1,000 a second, and half a second may be waited, 6 members are busy, and
    8 are
    wanted.

    >>> load = PrefillLoad(replicas=[Replica("p0", 3)], num_queued_prompt_tokens=3000, prompt_tokens_per_s=500.0,
    ...                    prefill_tokens_per_s=1000.0)
    >>> decision = scale_prefill(load, ScalingConfig(max_replicas=16, max_step_up=16), ScalingState())
    >>> decision.num_wanted, decision.need, decision.limited_by
    (8, 6.0, 'queued prompt tokens')
    """
    rate = load.prefill_tokens_per_s
    if rate is None:
        return _resize(load.replicas, config, state, None, "")
    arriving = load.prompt_tokens_per_s / rate
    queued = load.num_queued_prompt_tokens / (rate * config.queue_share * config.ttft_target_s)
    limited_by = "queued prompt tokens" if queued > arriving else "arriving prompt tokens"
    return _resize(load.replicas, config, state, max(arriving, queued), limited_by)


def scale_decode(load: DecodeLoad, config: ScalingConfig, state: ScalingState) -> ScalingDecision:
    """Decide the size of the decode pool for an interval."""
    if load.step_s is None:
        return _resize(load.replicas, config, state, None, "")
    most = streams_within_target(load.step_s, load.step_s_per_sequence, config.tpot_target_s, load.max_num_seqs)
    streams, blocks = load.num_sequences / most, load.num_used_blocks / load.num_blocks
    limited_by = "KV blocks" if blocks > streams else "streams"
    return _resize(load.replicas, config, state, max(streams, blocks), limited_by)


def _resize(
    replicas: Sequence[Replica], config: ScalingConfig, state: ScalingState, need: float | None, limited_by: str
) -> ScalingDecision:
    num_now = len(replicas)
    num_wanted, reason, state = _wanted(num_now, config, state, need)
    by_streams = sorted(replicas, key=lambda replica: (replica.num_streams, replica.member_id))
    drain = tuple(replica.member_id for replica in by_streams[: max(0, num_now - num_wanted)])
    return ScalingDecision(
        num_wanted=num_wanted, drain=drain, reason=reason, need=need, limited_by=limited_by, state=state
    )


def _wanted(
    num_now: int, config: ScalingConfig, state: ScalingState, need: float | None
) -> tuple[int, ScalingReason, ScalingState]:
    low, high = config.min_replicas, config.max_replicas
    if num_now < low and (need is None or need <= low * config.up_utilization):
        return low, ScalingReason.BELOW_MIN, ScalingState()
    if num_now > high:
        return high, ScalingReason.ABOVE_MAX, ScalingState()
    if need is None:
        return num_now, ScalingReason.NOT_MEASURED, ScalingState()
    too_few, enough = _members(need / config.up_utilization), _members(need / config.down_utilization)
    if num_now < too_few:
        if num_now == high:
            return high, ScalingReason.AT_MAX, ScalingState()
        num_wanted = max(low, min(too_few, num_now + config.max_step_up, high))
        return num_wanted, ScalingReason.UP, ScalingState()
    enough = max(enough, low)
    if num_now <= enough:
        return num_now, ScalingReason.STEADY, ScalingState()
    state = ScalingState(state.num_intervals_low + 1, max(state.most_wanted, enough))
    if state.num_intervals_low < config.hold_intervals:
        return num_now, ScalingReason.HOLDING, state
    # most_wanted is below num_now: an interval that needed more would have ended the hold
    num_wanted = max(state.most_wanted, num_now - max(1, num_now // _DRAIN_DIVISOR))
    return num_wanted, ScalingReason.DOWN, ScalingState()


def _members(exact: float) -> int:
    """Round up to whole members, at least one; ignore rounding errors above a whole number."""
    return max(1, math.ceil(exact - 1e-9))
