"""Acceptance from two distributions: the closed forms against plain ones, and against what the sampler draws."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.spec.run import SpecOptions, run_spec
from benchmarks.spec.watched import overlap, probabilities
from twostroke import SamplingParams
from twostroke.config.load import LoadConfig
from twostroke.sampling.noise import NoiseStream
from twostroke.sampling.sampler import Sampler
from twostroke.sampling.state import SamplingState

NUM_TOKENS = 50
NUM_DRAWS = 4000


def weights(size: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, 20), min_size=size, max_size=size).filter(any)


@given(st.integers(1, 6).flatmap(lambda size: st.tuples(weights(size), weights(size))))
def test_both_shares_are_what_their_sums_say(both: tuple[list[int], list[int]]) -> None:
    p, q = ([Fraction(weight, sum(given)) for weight in given] for given in both)
    pairs = list(zip(p, q, strict=True))
    classical = sum(map(min, p, q), start=Fraction(0))
    coupled = sum(
        (1 / sum(max(py / px, qy / qx) for py, qy in pairs) for px, qx in pairs if px and qx), start=Fraction(0)
    )
    found = overlap(np.array(p, np.float64), np.array(q, np.float64))
    assert found.classical == pytest.approx(float(classical))
    assert found.coupled == pytest.approx(float(coupled))
    distance = sum((abs(px - qx) for px, qx in pairs), start=Fraction(0)) / 2
    assert found.at_least == pytest.approx(float((1 - distance) / (1 + distance)))
    assert found.at_least - 1e-12 <= found.coupled <= found.classical + 1e-12


def test_what_hardly_ever_comes_adds_nothing() -> None:
    p = probabilities(np.array([0.0, -740.0, 3.0, -np.inf]), 1.0)
    q = probabilities(np.array([3.0, -740.0, 0.0, 5.0]), 1.0)
    found = overlap(p, q)
    assert 0 < found.at_least <= found.coupled <= found.classical < 1
    assert overlap(p, p) == pytest.approx((1.0, 1.0))


@pytest.mark.parametrize("temperature", [0.8, 1.0])
@pytest.mark.parametrize("nearness", [0.0, 0.5, 0.9])
def test_drafts_drawn_with_the_targets_noise_stand_as_often_as_expected(temperature: float, nearness: float) -> None:
    target, other = np.random.default_rng(1).normal(0, 2, (2, NUM_TOKENS)).astype(np.float32)
    drafter = nearness * target + (1 - nearness) * other
    sampler = Sampler(NUM_TOKENS)
    rules = sampler.rules(SamplingParams(temperature=temperature))
    states = [SamplingState(rules, NoiseStream(seed), ()) for seed in range(NUM_DRAWS)]
    tokens, drafts = (
        sampler.draw(torch.from_numpy(logits).expand(NUM_DRAWS, -1).contiguous(), states)[0]
        for logits in (target, drafter)
    )
    measured = float((tokens == drafts).double().mean())
    p, q = probabilities(target, temperature), probabilities(drafter, temperature)
    found = overlap(p, q)
    assert found.classical == pytest.approx(1 - abs(p - q).sum() / 2)
    spread = 4 * (found.coupled * (1 - found.coupled) / NUM_DRAWS) ** 0.5
    assert measured == pytest.approx(found.coupled, abs=spread)
    assert found.at_least < measured < found.classical, "the bounds are further away than chance goes"


def test_temperature_0_leaves_the_first_of_the_largest() -> None:
    assert probabilities(np.array([1.0, 3.0, 3.0, -np.inf]), 0.0).tolist() == [0, 1, 0, 0]


def test_the_engines_own_drafts_are_compared_with_what_the_target_thought(tmp_path: Path) -> None:
    options = SpecOptions(
        methods="ngram,early_exit,draft_model,medusa,eagle",
        num_drafts="",
        batch_sizes="",
        temperatures="0,1",
        rounds=2,
        prompt_tokens=32,
        output_tokens=24,
        results=tmp_path,
    )
    rows = run_spec(options, LoadConfig(threads=1)).results["alpha"]
    methods = ("early_exit", "draft_model", "medusa", "eagle")
    assert [(row["method"], row["temperature"]) for row in rows] == [(m, t) for m in methods for t in (0, 1)]
    for row in rows:
        assert 20 <= row["num_drafts"] <= 2 * 22, "each pass but the last one looks at a draft"
        if row["temperature"] == 0:
            assert row["alpha"] == row["expected"] == row["at_least"] == row["classical"], row
        else:
            assert 0 < row["at_least"] < row["expected"] < row["classical"] < 1, row
            assert row["alpha"] == pytest.approx(row["expected"], abs=4 * 0.5 / row["num_drafts"] ** 0.5)
