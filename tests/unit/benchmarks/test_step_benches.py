"""Occupancy, step time over content and the price of paging: their arithmetic, and each benchmark on a tiny model."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.alternating import alternate
from benchmarks.claim import Claim, ReproduceOptions, Reproduction
from benchmarks.reproduce import occupancy
from benchmarks.reproduce import prices as paging_price
from benchmarks.reproduce import step_times as step_content
from benchmarks.reproduce.prices import PagedCase, TableWatch
from benchmarks.reproduce.run import reproduce
from twostroke.batch import BlockTableUpdate, Limit, ScheduledBatch, ScheduledRequest, Stroke
from twostroke.measure.workload import Lengths


def run(name: str, tmp_path: Path, **changes: Any) -> Reproduction:
    options = ReproduceOptions(results=tmp_path, threads=1, **changes)
    (found,) = reproduce([name], options, Console(quiet=True))
    assert [claim for claim in found.claims if claim.holds is False] == []
    return found


def measured(claims: list[Claim]) -> dict[str, float]:
    return {claim.what: claim.measured for claim in claims}


# ---------------------------------------------------------------------- occupancy


def test_the_series_are_a_saw_tooth_and_a_plateau(tmp_path: Path) -> None:
    found = run("occupancy", tmp_path, with_model=False)
    static, continuous = (found.details["slots_by_step"][mode] for mode in ("static", "continuous"))
    assert static[0] == continuous[0] == occupancy.SLOTS
    assert occupancy.num_teeth(static) == occupancy.GROUPS - 1
    assert occupancy.num_teeth(continuous) == 0
    assert sum(static) == sum(continuous)  # the same tokens
    assert len(static) > 1.5 * len(continuous)
    assert (tmp_path / "occupancy-small.png").read_bytes().startswith(b"\x89PNG")


def test_the_series_on_a_model_are_the_counted_ones(
    random_models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(occupancy, "GROUPS", 2)
    monkeypatch.setattr(occupancy, "LENGTHS", Lengths.exponential(12))
    found = run("occupancy", tmp_path, model=str(random_models["llama"]))
    for mode, series in found.details["slots_over_time"].items():
        assert series["num_seqs"] == found.details["slots_by_step"][mode]
        assert series["end_s"] == sorted(series["end_s"])


def test_a_series_that_differs_is_counted() -> None:
    assert occupancy._num_differing([4, 3, 1], [4, 3, 1]) == 0
    assert occupancy._num_differing([4, 3, 1], [4, 2, 1, 1]) == 2


# ---------------------------------------------------------------------- content


def _rounds(seed: int, noise: float, **factors: float) -> dict[str, list[float]]:
    """Times of 100 rounds: the machine's speed changes by up to four times between rounds, by `noise` within one."""
    dice = random.Random(seed)
    speeds = [dice.uniform(1.0, 4.0) for _ in range(100)]
    return {
        content: [1e-3 * speed * factor * (1 + dice.gauss(0.0, noise)) for speed in speeds]
        for content, factor in factors.items()
    }


def _content_claims(of_batch: dict[str, list[float]], *, full: bool = True) -> list[Claim]:
    chance = step_content.spread_by_chance(of_batch, seed=0)
    return list(step_content.claims_of({8: of_batch}, {8: chance}, full=full))


def test_contents_are_compared_by_their_medians() -> None:
    of_batch = {"a": [1.0, 2.0, 3.0], "b": [1.0, 2.0, 3.0], "c": [1.02, 2.04, 9.0]}
    found = measured(_content_claims(of_batch))
    assert found["step ms, batch 8, c"] == pytest.approx(2040)
    assert found["batch 8: between the contents, share"] == pytest.approx(0.02)
    assert found["batch 8: between the rounds of one content, middle half, share"] == pytest.approx(1.0)


@pytest.mark.parametrize("seed", range(5))
def test_a_difference_of_contents_is_told_from_a_machine_whose_speed_changes(seed: int) -> None:
    """Runs of one content differ by much more than the contents do."""
    alike = _content_claims(_rounds(seed, 0.1, a=1.0, b=1.0, c=1.0, d=1.0))
    assert [claim.holds for claim in alike if claim.holds is not None] == [True]
    other = _content_claims(_rounds(seed, 0.1, a=1.0, b=1.0, c=1.0, d=1.15))
    assert [claim.holds for claim in other if claim.holds is not None] == [False]
    found = measured(other)
    assert (
        found["batch 8: between the contents, share"]
        > found["batch 8: between the contents by chance alone, 95th percentile"]
    )
    assert found["batch 8: between the rounds of one content, middle half, share"] > 0.3


def test_nothing_is_judged_on_a_machine_too_noisy_to_tell() -> None:
    claims = _content_claims(_rounds(0, 0.6, a=1.0, b=1.0, c=1.0, d=1.0))
    assert measured(claims)["batch 8: between the contents by chance alone, 95th percentile"] > step_content.GOAL_SPREAD
    assert all(claim.holds is None for claim in claims)


def test_a_small_run_judges_nothing() -> None:
    assert all(claim.holds is None for claim in _content_claims({"a": [1.0, 1.0], "b": [1.06, 1.06]}, full=False))


def test_each_content_is_first_in_as_many_rounds_as_any_other() -> None:
    order: list[str] = []
    alternate(3, "abc", lambda way, _: order.append(way), rotates=True)
    assert "".join(order) == "abcbcacab"


def test_every_content_is_run_at_one_length(
    random_models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_content, "CONTEXT", 64)
    options = ReproduceOptions(model=str(random_models["llama"]))
    for content in step_content.CONTENTS:
        prompts = step_content._prompts(content, options)
        assert [len(prompt) for prompt in prompts] == [64] * 8
        assert len({token for prompt in prompts for token in prompt}) > 10 or "token" in content
    found = run("step-content", tmp_path, model=str(random_models["llama"]))
    assert {content: len(of) for content, of in found.details["step_ms"]["8"].items()} == dict.fromkeys(
        step_content.CONTENTS, 2
    )
    assert not run("step-content", tmp_path, with_model=False).claims


# ---------------------------------------------------------------------- paging


def batch_of(**updates: tuple[int, tuple[int, ...]]) -> ScheduledBatch:
    requests = tuple(
        ScheduledRequest(
            request_id, Stroke.DECODE, 0, 1, 0, True, (BlockTableUpdate(start, block_ids), BlockTableUpdate(0, (0, 9)))
        )
        for request_id, (start, block_ids) in updates.items()
    )
    return ScheduledBatch(0, requests, Limit.NONE)


def test_neighbours_that_lie_apart_are_counted() -> None:
    """Only the first KV group counts. A row that is partly replaced counts in its present form."""
    watch = TableWatch()
    watch(batch_of(a=(0, (3, 4, 9)), b=(0, (7,))))
    watch(batch_of(a=(2, (5, 6)), b=(1, ())))
    assert watch.tables == {"a": [3, 4, 5, 6], "b": [7]}
    watch(batch_of(b=(1, (2,))))
    assert watch.take_share_apart() == 1 / 4
    assert watch.take_share_apart() == 0.0


def test_the_price_is_the_median_of_ratios_side_by_side() -> None:
    times = {"scattered": [1.1, 9.9, 2.2], "in order": [1.0, 9.0, 2.0], "contiguous": [1.0, 3.3, 1.1]}
    faster = {layout: [value / 2 for value in of] for layout, of in times.items()}
    case = PagedCase(times, faster | {"scattered": times["scattered"]}, {"scattered": 0.9, "in order": 0.0})
    assert case.price("in order") == pytest.approx(1.1)
    assert case.price("contiguous") == pytest.approx(2.0)
    assert case.price("contiguous", operators_only=True) == pytest.approx(4.0)
    found = measured(list(paging_price.claims_of({(2, 32): case}, full=True)))
    assert found["2 x 32: step, scattered / contiguous"] == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("times_as_long", "full", "holds"), [(1.09, True, True), (1.11, True, False), (9, False, None)]
)
def test_a_step_over_scattered_blocks_is_at_most_a_tenth_longer(
    times_as_long: float, full: bool, holds: bool | None
) -> None:
    times = {"scattered": [times_as_long], "in order": [1.0], "contiguous": [1.0]}
    claims = paging_price.claims_of({(2, 32): PagedCase(times, times, {"scattered": 0.9, "in order": 0.0})}, full=full)
    (price,) = [claim for claim in claims if claim.what == "2 x 32: step, scattered / contiguous"]
    assert price.holds is holds


def test_blocks_that_are_not_scattered_fail_the_claim() -> None:
    times = {layout: [1.0] for layout in paging_price.LAYOUTS}
    claims = paging_price.claims_of({(1, 32): PagedCase(times, times, {"scattered": 0.2, "in order": 0.1})}, full=True)
    assert [claim.what for claim in claims if claim.holds is False] == [
        "1 x 32: scattered blocks that lie apart, share",
        "1 x 32: blocks in order that lie apart, share",
    ]


def test_the_layouts_are_what_their_names_say(random_models: dict[str, Path], tmp_path: Path) -> None:
    found = run("paging-price", tmp_path, model=str(random_models["llama"]))
    for case in found.details.values():
        assert case["neighbouring_blocks_apart"]["scattered"] >= 0.5
        assert case["neighbouring_blocks_apart"]["in order"] == 0.0
        assert {layout: len(of) for layout, of in case["step_ms"].items()} == dict.fromkeys(paging_price.LAYOUTS, 2)
    assert (tmp_path / f"paging-price-{random_models['llama'].name}-small.png").is_file()
    assert not run("paging-price", tmp_path, with_model=False).claims
