from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from factories import make_arrival
from twostroke.config.scheduler import SchedulerConfig
from twostroke.request import Request
from twostroke.scheduler.policy import DELAY_FACTOR, RequestQueue, make_policy

ARRIVALS = st.tuples(st.integers(-3, 3), st.floats(0, 1000))


def test_first_come_first_served_looks_at_time_then_at_the_order_of_arrival() -> None:
    key = make_policy(SchedulerConfig())
    assert key(make_arrival(arrival_time_s=1.0, priority=9), 5) < key(make_arrival(arrival_time_s=2.0), 0)
    assert key(make_arrival(arrival_time_s=1.0), 0) < key(make_arrival(arrival_time_s=1.0), 1)


@given(one=ARRIVALS, other=ARRIVALS, ageing_s=st.floats(0.1, 100))
def test_nobody_is_overtaken_by_one_that_comes_later_than_the_bound(
    one: tuple[int, float], other: tuple[int, float], ageing_s: float
) -> None:
    key = make_policy(SchedulerConfig(policy="priority", ageing_s=ageing_s))
    (priority, time_s), (other_priority, other_time_s) = one, other
    head_start_s = (priority - other_priority) * ageing_s
    is_overtaken = key(make_arrival(priority=other_priority, arrival_time_s=other_time_s), 1) < key(
        make_arrival(priority=priority, arrival_time_s=time_s), 0
    )
    if other_time_s > time_s + head_start_s + 1e-6:
        assert not is_overtaken
    if other_time_s < time_s + head_start_s - 1e-6:
        assert is_overtaken


@given(
    one=st.tuples(st.integers(1, 5000), st.floats(0, 100)),
    other=st.tuples(st.integers(1, 5000), st.floats(0, 100)),
    limit_s=st.floats(0.01, 5),
)
def test_who_cannot_keep_the_ttft_limit_is_overtaken_within_a_bound(
    one: tuple[int, float], other: tuple[int, float], limit_s: float
) -> None:
    key = make_policy(SchedulerConfig(ttft_slo=limit_s), lambda num_tokens: num_tokens * 1e-3)
    (length, time_s), (other_length, other_time_s) = one, other
    is_overtaken = key(make_arrival(num_prompt_tokens=other_length, arrival_time_s=other_time_s), 1) < key(
        make_arrival(num_prompt_tokens=length, arrival_time_s=time_s), 0
    )
    late_s = DELAY_FACTOR * length * 1e-3 - limit_s if length * 1e-3 > limit_s else 0.0
    if other_time_s > time_s + late_s + 1e-6:
        assert not is_overtaken
    if other_length * 1e-3 <= limit_s and other_time_s < time_s + late_s - 1e-6:
        assert is_overtaken


def test_a_prompt_whose_kv_was_fetched_gives_way_to_nobody() -> None:
    """The prompt was prefilled elsewhere, and has nothing to compute here."""
    key = make_policy(SchedulerConfig(ttft_slo=0.3), lambda num_tokens: num_tokens * 1e-3)
    assert key(make_arrival(num_prompt_tokens=20_000, arrival_time_s=1.0, import_id=7), 0) == (1.0, 0)


@given(keys=st.lists(st.tuples(st.sampled_from([0.0, 1.0, 2.0]), st.integers(0, 99)), unique=True), data=st.data())
def test_a_queue_is_a_sorted_list(keys: list[tuple[float, int]], data: st.DataObject) -> None:
    queue = RequestQueue()
    requests = {key: Request(make_arrival(f"r{key}"), key) for key in keys}
    for request in requests.values():
        queue.add(request)
    removed = data.draw(st.sets(st.sampled_from(keys))) if keys else set[tuple[float, int]]()
    for key in removed:
        queue.remove(requests[key])
    left = sorted(set(keys) - removed)
    queue.check_invariants()
    assert list(queue) == [requests[key] for key in left]
    assert len(queue) == len(left)
    if left:
        assert (queue.first, queue.last) == (requests[left[0]], requests[left[-1]])
