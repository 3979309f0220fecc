"""Two pools in simulated time: to the second by hand, and what must hold whatever the load, the pools and the link."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from factories import uniform_layout
from tiers import examples
from twostroke.config.cache import CacheConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.cost.step_model import Curve, PredictsSteps, StepTimeModel
from twostroke.errors import InvalidParameter
from twostroke.event_codec import plain
from twostroke.events import EngineStarted
from twostroke.planner.replay import Predicted, predict
from twostroke.planner.show_replay import print_speed_and_what_ifs, what_if_json
from twostroke.request import Arrival, FinishReason
from twostroke.scheduler.replay import layout_of
from twostroke.simulation.pools import PoolSimulation, SimulatedPools
from twostroke.simulation.requests import RecordedRun, SimulatedRequest
from twostroke.simulation.settings import WhatIf
from twostroke.simulation.simulate import simulate

SECOND = StepTimeModel(layers=Curve((1,), (1.0,)), head=Curve((1,), (0.0,)), pair_s=0.0, seen_s=0.0)
"""Every step takes one."""
STEP_TIMES = StepTimeModel(
    layers=Curve((1, 16, 512), (0.020, 0.022, 0.420)), head=Curve((1, 64), (0.002, 0.006)), pair_s=5e-8, seen_s=1e-7
)
BLOCK = 4
BLOCK_BYTES = 128
"""Of two layers, one head of two float32."""
EAGER = 1e-4
"""A TPOT target for which anything is handed over that would stand in somebody's way."""


def started(
    num_blocks: int = 64, windows: Sequence[int | None] = (None, None), max_model_len: int = 64, **given: object
) -> EngineStarted:
    layout = uniform_layout(windows, block_size=BLOCK, num_kv_heads=1, head_dim=2, kv_format="f32")
    cache = CacheConfig(block_size=BLOCK, num_kv_blocks=num_blocks)
    return EngineStarted(
        0.0,
        "simulated",
        plain(SchedulerConfig(**{"max_num_batched_tokens": 8} | given)),
        plain(cache),
        plain(layout),
        num_blocks,
        max_model_len,
        "none",
    )


def request(name: str, num_prompt: int, num_outputs: int, at_s: float = 0.0, shared: int = 0) -> SimulatedRequest:
    """Return a request whose first `shared` blocks are the same for all."""
    own = num_prompt // BLOCK - shared
    names = [b"%d" % i for i in range(shared)] + [b"%s %d" % (name.encode(), i) for i in range(own)]
    arrival = Arrival(name, at_s, num_prompt, num_outputs, block_hashes=tuple(names))
    return SimulatedRequest(arrival, num_outputs)


def token_times(
    requests: Sequence[SimulatedRequest],
    pools: SimulatedPools,
    engine: EngineStarted | None = None,
    step_times: PredictsSteps = SECOND,
) -> tuple[dict[str, list[float]], PoolSimulation]:
    simulation = PoolSimulation(engine or started(), step_times, pools)
    run = simulation.run(requests)
    return {r.request_id: r.times.token_times_s for r in run.requests}, simulation


def one_and_one(link_bytes_per_s: float) -> SimulatedPools:
    return SimulatedPools(prefill=1, decode=1, link_bytes_per_s=link_bytes_per_s, tpot_target_s=EAGER)


@pytest.mark.parametrize(
    ("link", "second_s"),
    [
        # b's prompt is computed from 1.5 to 2.5. Its import begins with the step at 2; the first layer is there by then
        # and takes 0.05 s, as the second does from 2.5 on: all is there for the step that begins at 3
        (2560.0, 4.0),
        (1e18, 4.0),
        # 256 bytes from 2.0 on take until 10.53: the step that begins at 11
        (30.0, 12.0),
    ],
)
def test_a_hand_over_beside_somebody_who_decodes_to_the_second(link: float, second_s: float) -> None:
    requests = [request("a", 1, 20), request("b", 8, 3, at_s=1.5)]
    times, simulation = token_times(requests, one_and_one(link))
    assert times == {"a": [float(i) for i in range(1, 21)], "b": pytest.approx([2.5, second_s, second_s + 1])}
    moved = simulation.hand_overs
    assert (moved.num_requests, moved.num_fetched, moved.num_bytes) == (1, 1, 2 * BLOCK_BYTES)


@pytest.mark.parametrize(
    ("link", "there_s"),
    [
        (2560.0, 2.55),  # the last layer, behind the prompt
        (1e18, 2.5),
        (30.0, 2.0 + 256 / 30),
    ],
)
def test_who_decodes_goes_on_as_soon_as_the_bytes_are_there(link: float, there_s: float) -> None:
    requests = [request("a", 1, 2), request("b", 8, 3, at_s=1.5)]
    times, _ = token_times(requests, one_and_one(link))
    assert times == {"a": [1.0, 2.0], "b": pytest.approx([2.5, there_s + 1, there_s + 2])}


def test_what_the_taker_has_does_not_travel() -> None:
    requests = [request("a", 1, 40), request("b", 16, 3, at_s=1.5, shared=3), request("c", 19, 3, at_s=20.5, shared=3)]
    times, simulation = token_times(requests, one_and_one(1e9))
    assert simulation.hand_overs.num_fetched == 2
    assert simulation.hand_overs.num_bytes == (4 + 1) * BLOCK_BYTES
    # c finds 12 of its tokens where its prompt is computed, and computes the other 7 in one step
    assert times["c"][0] == 21.5


def test_without_a_prefill_pool_requests_are_shared_out() -> None:
    requests = [request(str(i), 8, 5) for i in range(4)]
    alone = simulate(started(max_num_seqs=1), requests, SECOND)
    times, simulation = token_times(requests, SimulatedPools(decode=4), started(max_num_seqs=1))
    assert set(map(tuple, times.values())) == {(1.0, 2.0, 3.0, 4.0, 5.0)}
    assert max(r.times.token_times_s[-1] for r in alone.requests) == 20.0
    assert simulation.hand_overs.num_requests == 0


def test_a_first_token_that_is_the_last_goes_nowhere() -> None:
    requests = [request("a", 1, 20), request("b", 8, 1, at_s=1.5)]
    times, simulation = token_times(requests, one_and_one(30.0))
    assert times["b"] == [2.5]
    assert simulation.hand_overs.num_requests == 0


def test_who_stops_at_its_first_token_gives_everything_back() -> None:
    stops = request("b", 8, 1, at_s=1.5)
    stops = SimulatedRequest(Arrival("b", 1.5, 8, 9, block_hashes=stops.arrival.block_hashes), 1, FinishReason.STOP)
    times, simulation = token_times([request("a", 1, 20), stops], one_and_one(30.0))
    assert times["b"] == [2.5]
    simulation.check_invariants(is_over=True)


@pytest.mark.parametrize("after_s", [0.2, 0.7, 1.5, 4.0, 9.2])
def test_a_caller_that_goes_gives_everything_back(after_s: float) -> None:
    gone = request("b", 8, 9, at_s=1.5)
    gone = SimulatedRequest(gone.arrival, 0, FinishReason.ABORT, ended_after_s=after_s)
    times, simulation = token_times([request("a", 1, 20), gone], one_and_one(30.0))
    assert times["a"] == [float(i) for i in range(1, 21)]
    simulation.check_invariants(is_over=True)


def test_a_prefix_without_room_is_computed_where_it_decodes() -> None:
    """Blocks for the longest request alone: nothing may be held beside it."""
    engine = started(num_blocks=16)
    times, simulation = token_times([request("a", 1, 20), request("b", 8, 3, at_s=1.5)], one_and_one(1e9), engine)
    assert simulation.hand_overs.num_requests == 1
    assert simulation.hand_overs.num_fetched == 0
    # as in service, its import waits for room as long as anybody else runs: until a's last token at 20. Then its 9
    # tokens are computed, 8 and 1 in steps of 8
    assert times["b"] == [2.5, 22.0, 23.0]
    simulation.check_invariants(is_over=True)


workloads = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 20), st.integers(0, 60), st.integers(0, 9)), min_size=1, max_size=14
)


@settings(deadline=None, max_examples=examples(150))
@given(
    workload=workloads,
    prefill=st.integers(0, 3),
    decode=st.integers(1, 3),
    link=st.sampled_from([8.0, 300.0, 1e4, 1e12]),
    eager=st.booleans(),
    num_blocks=st.sampled_from([32, 40, 90]),
    budget=st.sampled_from([4, 8, 64]),
    windows=st.sampled_from([(None, None), (None, 6), (6, 6)]),
    gone=st.sets(st.integers(0, 13), max_size=3),
    slots=st.integers(1, 6),
)
def test_everybody_ends_with_its_tokens(
    workload: list[tuple[int, int, int, int]],
    prefill: int,
    decode: int,
    link: float,
    eager: bool,
    num_blocks: int,
    budget: int,
    windows: tuple[int | None, ...],
    gone: set[int],
    slots: int,
) -> None:
    requests = [
        request(str(i), prompt, outputs, at_s / 2, min(shared, prompt // BLOCK))
        for i, (prompt, outputs, at_s, shared) in enumerate(workload)
    ]
    requests = [
        SimulatedRequest(one.arrival, 0, FinishReason.ABORT, ended_after_s=7.25) if i in gone else one
        for i, one in enumerate(requests)
    ]
    target = EAGER if eager else 0.05
    pools = SimulatedPools(
        prefill=prefill, decode=decode, link_bytes_per_s=link if prefill else None, tpot_target_s=target
    )
    engine = started(num_blocks=num_blocks, windows=windows, max_num_batched_tokens=budget, max_num_seqs=slots)
    times, simulation = token_times(requests, pools, engine)
    for one in requests:
        if one.ended_after_s is None:
            assert len(times[one.arrival.request_id]) == one.num_outputs
        made = times.get(one.arrival.request_id, [])
        assert made == sorted(made)
        assert all(time_s > one.arrival.arrival_time_s for time_s in made)
    simulation.check_invariants(is_over=True)
    layout = layout_of(engine.layout)
    most = sum(one.arrival.num_prompt_tokens // BLOCK * len(layout.groups) for one in requests)
    assert simulation.hand_overs.num_bytes % layout.bytes_per_block == 0
    assert simulation.hand_overs.num_bytes <= most * layout.bytes_per_block


@settings(deadline=None, max_examples=examples(60))
@given(
    workload=workloads,
    num_blocks=st.sampled_from([16, 40]),
    budget=st.sampled_from([4, 64]),
    slots=st.integers(1, 6),
    gone=st.sets(st.integers(0, 13), max_size=3),
)
def test_a_pool_of_one_is_the_one_engine(
    workload: list[tuple[int, int, int, int]], num_blocks: int, budget: int, slots: int, gone: set[int]
) -> None:
    requests = [
        request(str(i), prompt, outputs, at_s / 2, min(shared, prompt // BLOCK))
        for i, (prompt, outputs, at_s, shared) in enumerate(workload)
    ]
    requests = [
        SimulatedRequest(one.arrival, 0, FinishReason.ABORT, ended_after_s=7.25) if i in gone else one
        for i, one in enumerate(requests)
    ]
    engine = started(num_blocks=num_blocks, max_num_batched_tokens=budget, max_num_seqs=slots)
    alone = simulate(engine, requests, STEP_TIMES)
    pool = PoolSimulation(engine, STEP_TIMES, SimulatedPools(decode=1)).run(requests)
    assert pool.requests == alone.requests
    assert pool.steps == alone.steps


@settings(deadline=None, max_examples=examples(30))
@given(st.lists(st.integers(2, 15), min_size=1, max_size=8), st.sampled_from([50.0, 1e9]))
def test_bytes_are_those_of_the_whole_blocks(prompts: list[int], link: float) -> None:
    """Nothing is shared: what was fetched of each is its whole blocks."""
    requests = [request("a", 1, 60)] + [request(str(n), BLOCK * n + 1, 2, 3.5 + n) for n in set(prompts)]
    engine = started(num_blocks=400, max_num_batched_tokens=64)
    _, simulation = token_times(requests, one_and_one(link), engine)
    moved = simulation.hand_overs
    if moved.num_fetched == moved.num_requests == len(set(prompts)):
        assert moved.num_bytes == sum(set(prompts)) * BLOCK_BYTES
    else:
        assert link == 50.0


def beside_prompts() -> list[SimulatedRequest]:
    streams = [request(f"stream {i}", 3, 50) for i in range(4)]
    return streams + [request(f"prompt {i}", 48, 2, 0.3 + 0.4 * i) for i in range(3)]


def test_nobody_waits_for_a_prompt_that_is_computed_elsewhere() -> None:
    """Streams beside prompts: their steps are those without prompts, and one process's are not."""
    engine = started(num_blocks=400, max_num_batched_tokens=512)
    recording = RecordedRun(engine, tuple(beside_prompts()), 0)
    pools = WhatIf.read(["prefill=1", "decode=1", "link_bytes_per_s=1e9"])
    together = predict(recording, STEP_TIMES, WhatIf())
    apart = predict(recording, STEP_TIMES, pools)
    assert apart.hand_overs is not None
    assert apart.hand_overs.num_fetched == 3

    def longest(predicted: Predicted) -> float:
        return max(gap for r in predicted.run.requests if r.request_id.startswith("stream") for gap in r.times.itl_s)

    # a handed-over prompt of 48 tokens is scheduled as one token: after its last whole block there is only the first
    # output token. So the longest step is that of all seven requests
    alone = [request(f"stream {i}", 3, 50) for i in range(7)]
    without = predict(RecordedRun(engine, tuple(alone), 0), STEP_TIMES, WhatIf())
    assert longest(apart) <= longest(without) * 1.01
    assert longest(together) > 1.5 * longest(apart)


def test_what_is_assumed_and_what_moved_is_said() -> None:
    recording = RecordedRun(started(num_blocks=400, max_num_batched_tokens=512), tuple(beside_prompts()), 0)
    words = ["prefill=1", "decode=1", "link_bytes_per_s=1e9"]
    slower = predict(recording, STEP_TIMES, WhatIf.read([*words, "step_time_factor=2"]))
    apart = predict(recording, STEP_TIMES, WhatIf.read(words))
    said: list[str] = []
    print_speed_and_what_ifs(said.append, predict(recording, STEP_TIMES, WhatIf()), [apart, slower])
    num_bytes = 3 * 48 // BLOCK * BLOCK_BYTES
    assert said[2] == (
        "  each process on a machine of its own, as fast as the one process above; 3 of 7 prompts were handed over, "
        f"{num_bytes:,} bytes"
    )
    assert "with steps 2 times as long as above" in said[4]
    assert what_if_json(apart)["hand_overs"] == {"num_requests": 3, "num_fetched": 3, "num_bytes": num_bytes}
    assert "hand_overs" not in what_if_json(predict(recording, STEP_TIMES, WhatIf()))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["prefill=1"], "needs decode processes"),
        (["prefill=1", "decode=1"], "link_bytes_per_s=1.25e9"),
        (["decode=2", "link_bytes_per_s=1e9"], "is for a prefill pool"),
        (["link_bytes_per_s=1e9"], "is for a prefill pool"),
        (["prefill=1", "decode=1", "link_bytes_per_s=0"], "more than 0 bytes a second"),
        (["prefill=1", "decode=1", "link_bytes_per_s=fast"], "more than 0 bytes a second"),
        (["prefill=1.5", "decode=1", "link_bytes_per_s=1e9"], "whole number"),
        (["decode=65"], "whole number"),
        (["tpot_target_s=0.1"], "needs more than one process"),
        (["prefill=1", "decode=1", "link_bytes_per_s=1e9", "enable_prefix_caching=false"], "through the prefix cache"),
    ],
)
def test_pools_that_cannot_be_are_refused(words: list[str], message: str) -> None:
    recording = RecordedRun(started(), (request("a", 4, 2),), 0)
    with pytest.raises(InvalidParameter, match=message):
        predict(recording, SECOND, WhatIf.read(words))
