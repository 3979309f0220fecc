"""When an engine measures the shares of experts, and of which tokens."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from twostroke.batch import Limit, ScheduledBatch, ScheduledRequest, Stroke
from twostroke.config.experts import ExpertsSpec
from twostroke.config.layer_spec import KVSpec, LayerSpec
from twostroke.cost.expert_shares import ExpertShare, ExpertShares
from twostroke.engine.expert_use import FIRST_TOKENS, MOST_TOKENS, ExpertUse, measured_shares

PREFILL, DECODE = Stroke.PREFILL, Stroke.DECODE


def layer(num_experts: int, num_chosen: int) -> LayerSpec:
    experts = ExpertsSpec(num_experts=num_experts, num_chosen=num_chosen, intermediate_size=64) if num_experts else None
    return LayerSpec(
        num_heads=1, kv=KVSpec(num_kv_heads=1, head_dim=8), rope=None, intermediate_size=64, experts=experts
    )


class Served:
    """Steps of an engine with one layer of four experts, two of which each token chooses."""

    def __init__(self) -> None:
        """Begin with counts of passes before the first request, which are of no token."""
        self.counts = np.array([9, 9, 9, 9])
        self.use = ExpertUse([layer(0, 0), layer(4, 2)], lambda: self.counts.copy())
        self.num_tokens = 0
        self.found: list[tuple[int, ExpertShares]] = []

    def step(self, stroke: Stroke, num_tokens: int, experts: tuple[int, int]) -> None:
        asked = ScheduledRequest("a", stroke, 0, num_tokens, 0, True, ())
        shares = self.use.measured_before(ScheduledBatch(step=1, requests=(asked,), limited_by=Limit.NONE))
        if shares is not None:
            self.found.append((self.num_tokens, shares[0]))
        self.counts[list(experts)] += num_tokens
        self.num_tokens += num_tokens


def shares_of(*shares: float) -> ExpertShares:
    return tuple(ExpertShare(1, share) for share in shares)


def test_measurements_double_and_then_come_at_intervals() -> None:
    served = Served()
    for _ in range(8 * MOST_TOKENS // 32):
        served.step(DECODE, 32, (0, 1))
    times = [num_tokens for num_tokens, _ in served.found]
    assert times[:5] == [FIRST_TOKENS * 2**i for i in range(5)]
    assert {later - earlier for earlier, later in pairwise(times[4:])} == {MOST_TOKENS}
    assert all(shares == (ExpertShare(2, 1.0),) for _, shares in served.found)


def test_a_load_that_changes_is_followed() -> None:
    served = Served()
    for _ in range(8 * MOST_TOKENS // 32):
        served.step(DECODE, 32, (0, 1))
    for _ in range(8 * MOST_TOKENS // 32):
        served.step(DECODE, 32, (2, 3))
    served.step(DECODE, 32, (2, 3))
    shares = served.found[-1][1]
    assert [num for num, _ in shares] == [2, 2]
    assert shares[0].share > 0.99
    assert shares[1].share < 0.01


def test_decoded_tokens_count_alone_as_soon_as_there_are_enough() -> None:
    served = Served()
    for _ in range(FIRST_TOKENS // 64):
        served.step(PREFILL, 96, (2, 3))
        served.step(DECODE, 32, (0, 1))
    served.step(DECODE, 32, (0, 1))
    assert [shares for _, shares in served.found] == [(ExpertShare(2, 0.75), ExpertShare(2, 0.25))] * len(served.found)
    for _ in range(FIRST_TOKENS // 32):
        served.step(PREFILL, 96, (2, 3))
        served.step(DECODE, 32, (0, 1))
    assert served.found[-1][1] == (ExpertShare(2, 1.0),)


@pytest.mark.parametrize("counts", [[4, 0, 2, 2], [0, 0, 0, 0]])
def test_an_expert_that_no_token_chose_has_no_share(counts: list[int]) -> None:
    """A layer without tokens has equal shares."""
    (found,) = measured_shares([layer(4, 2)], np.array(counts))
    assert found == ((*shares_of(1.0), ExpertShare(2, 0.5)) if any(counts) else (ExpertShare(4, 0.5),))


def test_kinds_of_experts_are_apart_and_layers_alike_together() -> None:
    layers = [layer(2, 1), layer(4, 2), layer(0, 0), layer(2, 1)]
    found = measured_shares(layers, np.array([3, 1, 1, 1, 1, 1, 1, 3]))
    assert found == ((ExpertShare(2, 0.75), ExpertShare(2, 0.25)), (ExpertShare(4, 0.5),))


def test_groups_keep_the_expectation() -> None:
    """The error is below a thousandth for thousands of experts with shares of any size."""
    rng: Any = np.random.default_rng(0)
    counts: NDArray[np.int64] = (1000 * rng.lognormal(0, 1.5, (48, 128))).astype(np.int64)
    (found,) = measured_shares([layer(128, 8)] * 48, counts.flatten())
    assert len(found) < 128
    exact = 8 * counts / counts.sum(1, keepdims=True)
    for num_tokens in (1, 2, 8, 64, 512):
        expected = float((1 - (1 - np.minimum(exact, 1)) ** num_tokens).sum())
        hits = sum(num * (1 - (1 - share) ** num_tokens) for num, share in found)
        assert hits == pytest.approx(expected, rel=1e-3 if num_tokens > 1 else 2e-2)
