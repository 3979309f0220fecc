"""Experiments: what may be asked, what both sides are asked, and what is made of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from twostroke.errors import ClientError, InvalidParameter, UnknownParameter
from twostroke.lab.figures import Figures, percentile
from twostroke.lab.lab import Lab
from twostroke.lab.settings import SWITCHES, Side
from twostroke.lab.stories import STORIES
from twostroke.lab.workload import MAX_ARRIVALS_S, LabWorkload

FIGURES = Figures(
    duration_s=2.0,
    output_tokens_per_s=100.0,
    ttft_p50_ms=10.0,
    ttft_p99_ms=20.0,
    tpot_p50_ms=None,
    itl_p50_ms=None,
    itl_p99_ms=None,
    longest_gap_ms=None,
    e2e_p50_ms=50.0,
    most_running=3,
    num_preemptions=0,
    cached_share=0.5,
    tokens_per_pass=None,
    kv_capacity_tokens=1600,
)


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.name)
def test_a_story_can_run_and_be_told_whatever_it_measures(story: Any) -> None:
    a, b = Side.of(story.a), Side.of(story.b)
    assert (a.engine, a.pools) != (b.engine, b.pools)
    assert hasattr(FIGURES, story.figure)
    assert len(story.explain(FIGURES, FIGURES)) > 300
    requests = story.workload.requests()
    assert requests == story.workload.requests()
    assert requests[-1].arrival_s <= MAX_ARRIVALS_S
    assert story.to_dict()["workload"]["seed"] == story.workload.seed


@pytest.mark.parametrize("switch", SWITCHES, ids=lambda switch: switch.name)
def test_every_value_of_every_switch_makes_a_side(switch: Any) -> None:
    for value in switch.values or (switch.most,):
        Side.of({switch.name: value})
    with pytest.raises(InvalidParameter, match=switch.name):
        Side.of({switch.name: "nothing of the kind"})
    with pytest.raises(InvalidParameter, match=switch.name):
        Side.of({switch.name: 0})


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"story": "no such"}, "batching, chunking"),
        ({"story": 3}, "must be one of"),
        ({"story": "pools", "a": {}}, "brings its own settings"),
        ({"stories": "pools"}, "stories"),
        ({"a": []}, "must be an object"),
        ({"a": {"max_tokens": 3}}, "max_tokens"),
        ({"a": {"batching": True}}, "must be one of"),
        ({"workload": {"num_requests": 1000}}, "num_requests"),
        ({"workload": {"num_requests": 60, "rate": 1}}, "within 30 s"),
        ({"workload": {"min_output": 50, "max_output": 20}}, "min_output"),
        ({"workload": {"rate": float("nan")}}, "rate"),
        ({"workload": {"prompts": "poems"}}, "prompts"),
        ({"workload": {"words": 3}}, "words"),
    ],
    ids=str,
)
def test_what_cannot_be_run_is_refused_in_words(asked: dict[str, Any], told: str) -> None:
    async def begin() -> None:
        lab = Lab()
        try:
            lab.start(asked)
        finally:
            await lab.stop()

    with pytest.raises((ClientError, InvalidParameter, UnknownParameter), match=told):
        asyncio.run(begin())


def test_contiguous_memory_switches_the_prefix_cache_off() -> None:
    assert not Side.of({"kv_reservation": "contiguous"}).engine.cache.enable_prefix_caching


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(number) for number in range(1, 101)]
    assert [percentile(values, share) for share in (0.0, 0.5, 0.99, 1.0)] == [1.0, 50.0, 99.0, 100.0]


def test_long_prompts_come_where_they_should() -> None:
    requests = LabWorkload(num_requests=6, every_nth_is_long=3, long_words=400, prompt_words=5).requests()
    assert [len(asked.prompt) > 2000 for asked in requests] == [False, False, True] * 2
