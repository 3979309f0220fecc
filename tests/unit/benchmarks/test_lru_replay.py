"""The replay that predicts hits, against the plainest cache there is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.reproduce.r10_prefix_cache import PrefixCacheReplay
from oracle.naive_prefix_cache import NaivePrefixCache
from twostroke.measure.workload import TraceSpec, WorkloadRequest, workload_of_trace
from twostroke.simulation.trace import TraceEntry

OUTPUT = 1
PROMPTS = st.lists(
    st.tuples(st.lists(st.integers(2, 3), min_size=1, max_size=14).map(tuple), st.integers(1, 9)),
    min_size=1,
    max_size=30,
)


@given(prompts=PROMPTS, num_blocks=st.integers(12, 40), block_size=st.sampled_from([2, 4]))
def test_replay_is_the_naive_cache(
    prompts: list[tuple[tuple[int, ...], int]], num_blocks: int, block_size: int
) -> None:
    replay = PrefixCacheReplay(num_blocks, block_size, OUTPUT)
    naive = NaivePrefixCache(num_blocks, block_size)
    for prompt, num_output in prompts:
        request = WorkloadRequest(prompt, num_output)
        assert replay.run(request) == naive.run(list(prompt), [OUTPUT] * num_output)


def test_a_whole_prompt_in_the_cache_still_computes_its_last_block() -> None:
    replay = PrefixCacheReplay(None, 4)
    request = WorkloadRequest(tuple(range(2, 14)), 1)  # 3 full blocks
    assert [replay.run(request) for _ in range(3)] == [0, 2, 2]


@pytest.mark.parametrize(("num_blocks", "hits"), [(4, [0, 0, 0]), (5, [0, 0, 1]), (None, [0, 0, 2])])
def test_what_was_used_longest_ago_goes_first_and_heads_go_last(num_blocks: int | None, hits: list[int]) -> None:
    entries = [
        TraceEntry(0.0, 1536, 1, (0, 1, 2)),
        TraceEntry(0.0, 2048, 1, (3, 4, 5, 6)),
        TraceEntry(0.0, 1536, 1, (0, 1, 2)),
    ]
    replay = PrefixCacheReplay(num_blocks, 8)
    assert [replay.run(r) for r in workload_of_trace(entries, TraceSpec()).requests] == hits
