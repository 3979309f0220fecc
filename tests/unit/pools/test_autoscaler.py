from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import hypothesis.strategies as st
import pytest
from hypothesis import given

from twostroke.config.pools import ScalingConfig
from twostroke.errors import InvalidParameter
from twostroke.pools.autoscaler import (
    DecodeLoad,
    PrefillLoad,
    Replica,
    ScalingDecision,
    ScalingReason,
    ScalingState,
    scale_decode,
    scale_prefill,
)


def replicas(num: int) -> list[Replica]:
    return [Replica(f"m{i:03}", num_streams=(7 * i) % 5) for i in range(num)]


def prefill_load(num: int, tokens_per_s: float = 0.0, num_queued: int = 0) -> PrefillLoad:
    return PrefillLoad(
        replicas=replicas(num),
        num_queued_prompt_tokens=num_queued,
        prompt_tokens_per_s=tokens_per_s,
        prefill_tokens_per_s=1000.0,
    )


def decode_load(num: int, num_sequences: int = 0, num_used_blocks: int = 0) -> DecodeLoad:
    return DecodeLoad(
        replicas=replicas(num),
        num_sequences=num_sequences,
        num_used_blocks=num_used_blocks,
        num_blocks=1000,
        max_num_seqs=64,
        step_s=0.03,
        step_s_per_sequence=0.001,
    )


UP_TO_20 = ScalingConfig(max_replicas=20)
TOO_MANY = ScalingState(num_intervals_low=5, most_wanted=2)


def test_up_at_once_and_bounded() -> None:
    decision = scale_prefill(prefill_load(1, num_queued=6000), UP_TO_20, ScalingState())
    assert (decision.need, decision.num_wanted, decision.reason) == (12.0, 5, ScalingReason.UP)
    assert decision.drain == ()


def test_each_part_of_the_need_counts() -> None:
    found = [
        scale_prefill(prefill_load(4, tokens_per_s=4000.0), UP_TO_20, ScalingState()),
        scale_prefill(prefill_load(4, num_queued=2000), UP_TO_20, ScalingState()),
        scale_decode(decode_load(4, num_sequences=80), UP_TO_20, ScalingState()),  # 20 each keep the target
        scale_decode(decode_load(4, num_used_blocks=4000), UP_TO_20, ScalingState()),
    ]
    assert [(d.need, d.num_wanted) for d in found] == [(4.0, 5)] * 4
    words = ["arriving prompt tokens", "queued prompt tokens", "streams", "KV blocks"]
    assert [d.limited_by for d in found] == words


def test_down_after_a_hold_by_draining_who_has_the_fewest_streams() -> None:
    state, reasons = ScalingState(), list[ScalingReason]()
    for _ in range(UP_TO_20.hold_intervals):
        decision = scale_decode(decode_load(4, num_sequences=20), UP_TO_20, state)
        state = decision.state
        reasons.append(decision.reason)
    assert reasons == [ScalingReason.HOLDING] * 5 + [ScalingReason.DOWN]
    assert (decision.num_wanted, decision.drain) == (3, ("m000",))  # streams 0, 2, 4, 1
    assert state == ScalingState()


def test_one_busy_interval_ends_the_hold() -> None:
    decision = scale_prefill(prefill_load(4, tokens_per_s=3000.0), UP_TO_20, TOO_MANY)
    assert (decision.reason, decision.state) == (ScalingReason.STEADY, ScalingState())


def test_what_was_needed_while_it_was_held_stays() -> None:
    state = ScalingState()
    for tokens_per_s in (0.0, 0.0, 22_800.0, 0.0, 0.0, 0.0):  # 38 members are 60 % busy with it
        decision = scale_prefill(prefill_load(40, tokens_per_s), ScalingConfig(max_replicas=99), state)
        state = decision.state
    assert (decision.num_wanted, decision.reason) == (38, ScalingReason.DOWN)  # a tenth less would be 36


@pytest.mark.parametrize(
    ("num_now", "tokens_per_s", "num_wanted", "reason"),
    [
        (1, 0.0, 2, ScalingReason.BELOW_MIN),
        (7, 9e9, 4, ScalingReason.ABOVE_MAX),
        (4, 9e9, 4, ScalingReason.AT_MAX),
        (2, 0.0, 2, ScalingReason.STEADY),
        (0, 9000.0, 4, ScalingReason.UP),
    ],
)
def test_never_outside_its_bounds(num_now: int, tokens_per_s: float, num_wanted: int, reason: ScalingReason) -> None:
    config = ScalingConfig(min_replicas=2, max_replicas=4)
    decision = scale_prefill(prefill_load(num_now, tokens_per_s), config, TOO_MANY)
    assert (decision.num_wanted, decision.reason) == (num_wanted, reason)
    assert len(decision.drain) == max(0, num_now - num_wanted)


def test_a_pool_of_unknown_speed_stays_as_it_is() -> None:
    unknown = PrefillLoad(
        replicas=replicas(3), num_queued_prompt_tokens=10**6, prompt_tokens_per_s=1e6, prefill_tokens_per_s=None
    )
    decision = scale_prefill(unknown, UP_TO_20, TOO_MANY)
    assert (decision.num_wanted, decision.reason, decision.need) == (3, ScalingReason.NOT_MEASURED, None)


def test_bounds_that_would_grow_and_shrink_in_turn_are_refused() -> None:
    with pytest.raises(InvalidParameter, match=r"down_utilization=0\.8: must be less than up_utilization, 0\.8"):
        ScalingConfig(down_utilization=0.8)
    with pytest.raises(InvalidParameter, match="max_replicas=1: must be at least min_replicas, 2"):
        ScalingConfig(min_replicas=2)


CONFIGS = st.builds(
    lambda low, more, up, down, step, hold: ScalingConfig(
        min_replicas=low,
        max_replicas=low + more,
        up_utilization=up,
        down_utilization=up * down,
        max_step_up=step,
        hold_intervals=hold,
    ),
    st.integers(1, 5),
    st.integers(0, 60),
    st.floats(0.3, 1.0),
    st.floats(0.2, 0.99),
    st.integers(1, 10),
    st.integers(1, 5),
)


@given(
    config=CONFIGS,
    num_now=st.integers(0, 80),
    loads=st.lists(st.tuples(st.floats(0, 1e5), st.integers(0, 10**5)), min_size=1, max_size=20),
)
def test_any_load_stays_within_bounds(config: ScalingConfig, num_now: int, loads: list[tuple[float, int]]) -> None:
    state = ScalingState()
    for tokens_per_s, num_queued in loads:
        decision = scale_prefill(prefill_load(num_now, tokens_per_s, num_queued), config, state)
        low = min(num_now, config.min_replicas) if decision.reason is ScalingReason.UP else config.min_replicas
        assert low <= decision.num_wanted <= config.max_replicas
        assert decision.num_wanted - max(num_now, config.min_replicas) <= config.max_step_up
        assert len(decision.drain) == max(0, num_now - decision.num_wanted)
        state, num_now = decision.state, decision.num_wanted


def _run(config: ScalingConfig, num_now: int, num_sequences: int, num_blocks: int) -> Iterator[ScalingDecision]:
    state = ScalingState()
    for _ in range(400 * config.hold_intervals):
        decision = scale_decode(decode_load(num_now, num_sequences, num_blocks), config, state)
        state, num_now = decision.state, decision.num_wanted
        yield decision


@given(config=CONFIGS, num_now=st.integers(0, 80), num_sequences=st.integers(0, 500), num_blocks=st.integers(0, 30_000))
def test_a_load_that_stays_the_same_is_answered_once(
    config: ScalingConfig, num_now: int, num_sequences: int, num_blocks: int
) -> None:
    decisions = list(_run(config, num_now, num_sequences, num_blocks))
    sizes = [num_now, *(decision.num_wanted for decision in decisions)]
    changes = [after - before for before, after in itertools.pairwise(sizes) if after != before]
    assert all(change > 0 for change in changes) or all(change < 0 for change in changes)  # one way, never back
    assert len(set(sizes[-100:])) == 1
    need = decisions[-1].need
    assert need is not None
    fewest = min(config.max_replicas, math.ceil(need / config.up_utilization - 1e-9))
    most = max(config.min_replicas, 1, math.ceil(need / config.down_utilization - 1e-9))
    assert fewest <= sizes[-1] <= most


@pytest.mark.parametrize("tokens_per_s", [300.0, 2500.0, 9000.0, 13_000.0])
def test_a_queue_that_a_pool_works_off_settles(tokens_per_s: float) -> None:
    """The queue is the pool's own doing here: it grows while members are few, and is gone when they are enough."""
    state, num_now, queued = ScalingState(), 1, 0.0
    sizes: list[int] = []
    for _ in range(400):
        queued = max(0.0, queued + tokens_per_s - 1000.0 * num_now)
        decision = scale_prefill(prefill_load(num_now, tokens_per_s, int(queued)), UP_TO_20, state)
        state, num_now = decision.state, decision.num_wanted
        sizes.append(num_now)
    changes = [after - before for before, after in itertools.pairwise(sizes) if after != before]
    turns = sum((one > 0) != (other > 0) for one, other in itertools.pairwise(changes))
    assert turns <= 1  # it grows to empty the queue, and shrinks when the queue is empty
    assert len(set(sizes[-100:])) == 1
    assert math.ceil(tokens_per_s / 800) <= sizes[-1] <= math.ceil(tokens_per_s / 600)
