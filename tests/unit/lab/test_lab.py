"""Experiments: what may be asked, what both sides are asked, and what is made of it."""

from __future__ import annotations

import asyncio
from dataclasses import fields, replace
from typing import Any

import pytest

from twostroke.errors import ClientError, InvalidParameter, UnknownParameter
from twostroke.lab.claims import StoryClaim, StoryFigures
from twostroke.lab.figures import Figures, Measured, Tokens, figures_of, measured, percentile
from twostroke.lab.lab import RUN_ORDER, Lab
from twostroke.lab.settings import SWITCHES, Side
from twostroke.lab.stories import BY_NAME, STORIES, Story
from twostroke.lab.workload import MAX_ARRIVALS_S, LabWorkload
from twostroke.outputs import CompletionOutput, DraftTally, RequestOutput, RequestTimes

FIGURES = Figures(
    duration_s=2.0,
    output_tokens_per_s=100.0,
    tokens_per_s_a_process=100.0,
    ttft_p50_ms=10.0,
    ttft_p99_ms=20.0,
    tpot_p50_ms=5.0,
    itl_p50_ms=5.0,
    itl_p99_ms=8.0,
    longest_gap_ms=9.0,
    e2e_p50_ms=50.0,
    most_running=3,
    num_preemptions=0,
    cached_share=0.5,
    tokens_per_pass=2.5,
    rejected_share=0.25,
    kv_capacity_tokens=1600,
)
TOKENS = Tokens(num_requests=6, num_equal=5, num_steady=6, num_runs=8)


def side(**changed: float) -> Measured:
    """Return three runs, which differ by a tenth."""
    middle = replace(FIGURES, **changed)
    return measured([scaled(middle, share) for share in (0.95, 1.0, 1.05)])


def scaled(figures: Figures, share: float) -> Figures:
    return replace(figures, **{field.name: getattr(figures, field.name) * share for field in fields(figures)})


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.name)
def test_a_story_can_run(story: Story) -> None:
    a, b = Side.of(story.a), Side.of(story.b)
    assert (a.engine, a.pools) != (b.engine, b.pools)
    requests = story.workload.requests()
    assert requests == story.workload.requests()
    assert requests[-1].arrival_s <= MAX_ARRIVALS_S
    assert story.to_dict()["workload"]["seed"] == story.workload.seed
    assert [claim.kind for claim in story.claims][-1] == "price"


REVERSE = "the opposite of what was expected"
CLAIMS = [
    pytest.param(story, claim, id=f"{story.name}-{claim.figure}")
    for story in STORIES
    for claim in story.claims
    if isinstance(claim, StoryClaim)
]


@pytest.mark.parametrize(("story", "claim"), CLAIMS)
def test_a_claim_is_told_as_it_came(story: Story, claim: StoryClaim) -> None:
    """With its figures in any case, and with the reason only where it came as was said."""
    before = getattr(FIGURES, claim.figure)
    index = story.claims.index(claim)

    def told(share: float) -> tuple[str, str, str]:
        """Return the sentence, and both reasons."""
        seen = StoryFigures(side(), side(**{claim.figure: share * before}), TOKENS)
        text = story.tell(seen.a, seen.b, TOKENS)[index].text
        assert text.startswith(f"{claim.what}: {seen['a.' + claim.figure]} and {seen['b.' + claim.figure]}")
        return text, claim.because.format(seen=seen), claim.unless.format(seen=seen)

    as_said, reverse = (told(3.0), told(0.3)) if claim.should_rise else (told(0.3), told(3.0))
    text, because, _ = as_said
    assert text.endswith(f" times as much. {because}")
    text, _, unless = reverse
    assert text.endswith(f": {'a gain here, not a price' if claim.kind == 'price' else REVERSE}. {unless}")
    text, because, unless = told(1.02)
    assert "the runs of both sides overlap, so the difference may be chance" in text
    assert because not in text, "a reason of what may be chance"
    assert unless not in text
    text, _, unless = told(1.0)
    assert text.endswith(f": no difference. {unless}")


def test_a_price_of_one_side_is_told_where_it_is_paid() -> None:
    speculation, prefix = BY_NAME["speculation"], BY_NAME["prefix"]
    assert "Of the draft tokens 25 (23.8 to 26.2) % were rejected" in speculation.tell(side(), side(), TOKENS)[-1].text
    assert "No draft token was rejected" in speculation.tell(side(), side(rejected_share=0.0), TOKENS)[-1].text
    assert "too small to see here" not in prefix.tell(side(), side(ttft_p99_ms=90.0), TOKENS)[-1].text
    assert "too small to see here" in prefix.tell(side(), side(ttft_p99_ms=10.0), TOKENS)[-1].text
    assert "5 of 6 are the same" in BY_NAME["kv-format"].tell(side(), side(), TOKENS)[-1].text


def test_what_was_not_measured_is_not_made_up() -> None:
    nobody = measured([replace(FIGURES, itl_p99_ms=None)])
    assert "not measured" in BY_NAME["pools"].tell(nobody, nobody, TOKENS)[1].text


def test_tokens_are_compared_over_all_runs() -> None:
    one, other = ((1, 2), (3,)), ((1, 2), (4,))
    assert Tokens.of([one, one], [one, one]) == Tokens(2, 2, 2, 4)
    assert Tokens.of([one, one], [other, other]) == Tokens(2, 1, 2, 4)
    unsteady = Tokens.of([one, one], [one, other])
    assert unsteady == Tokens(2, 1, 1, 4)
    assert "equal for all 2 requests, in all 4 runs" in Tokens.of([one, one], [one, one]).told(may_differ=False)
    assert "bug" in Tokens.of([one, one], [other, other]).told(may_differ=False)
    assert "bug" not in Tokens.of([one, one], [other, other]).told(may_differ=True)
    assert "bug" in unsteady.told(may_differ=True)


def test_both_sides_take_turns_in_a_row_that_favours_neither() -> None:
    places = {name: [place for place, at in enumerate(RUN_ORDER) if at == name] for name in "ab"}
    assert len(places["a"]) == len(places["b"]) >= 2
    assert sum(places["a"]) == sum(places["b"])


def test_with_drafts_there_is_no_percentile_of_gaps() -> None:
    def figures(drafts: DraftTally | None) -> Figures:
        times = RequestTimes(0.0, 0.0, [0.125, 0.125, 0.125, 0.15625], drafts=drafts)
        answer = CompletionOutput(0, "", (1, 2, 3, 4), None, None, None, None, 0)
        output = RequestOutput("r", "", (1,), None, [answer], finished=True, times=[times])
        return figures_of([output], 0.0, num_processes=1, most_running=1, kv_capacity_tokens=8)

    without = figures(None)
    assert (without.itl_p50_ms, without.itl_p99_ms, without.rejected_share) == (0.0, 31.25, None)
    drafted = figures(DraftTally(2, 4, 1, 8, [1, 1]))
    assert (drafted.itl_p50_ms, drafted.itl_p99_ms, drafted.rejected_share) == (None, None, 0.75)
    assert (drafted.tpot_p50_ms, drafted.longest_gap_ms) == (31.25 / 3, 31.25)


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


def test_contiguous_memory_switches_the_prefix_cache_off_and_says_so() -> None:
    side = Side.of({"kv_reservation": "contiguous"})
    assert not side.engine.cache.enable_prefix_caching
    assert side.given == {"kv_reservation": "contiguous", "enable_prefix_caching": False}
    with pytest.raises(InvalidParameter, match=r"enable_prefix_caching.*needs kv_reservation"):
        Side.of({"kv_reservation": "contiguous", "enable_prefix_caching": True})


def test_one_that_is_stopped_before_it_has_begun_leaves_room_for_the_next() -> None:
    async def main() -> None:
        lab = Lab()
        for _ in range(2):
            assert lab.start({"story": "batching"})["state"] == "running"
            assert await lab.stop()
            assert lab.status()["state"] == "stopped"
            assert not await lab.stop()

    asyncio.run(main())


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(number) for number in range(1, 101)]
    assert [percentile(values, share) for share in (0.0, 0.5, 0.99, 1.0)] == [1.0, 50.0, 99.0, 100.0]


def test_long_prompts_come_where_they_should() -> None:
    requests = LabWorkload(num_requests=6, every_nth_is_long=3, long_words=400, prompt_words=5).requests()
    assert [len(asked.prompt) > 2000 for asked in requests] == [False, False, True] * 2
