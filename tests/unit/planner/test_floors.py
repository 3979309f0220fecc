"""Floors by hand-derived numbers; predictions beside them; the frontier's shape."""

from __future__ import annotations

from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given

from factories import LLAMA_3_8B, uniform_shape
from twostroke.cost.price import cost_per_million_tokens
from twostroke.cost.step_cost import MachineLimits
from twostroke.cost.step_model import Curve, StepTimeModel
from twostroke.planner.devices import find_device
from twostroke.planner.floors import Predictor, chunks_of

H100 = find_device("H100-SXM")[1].limits("H100-SXM", "bfloat16")
ON_H100 = Predictor(LLAMA_3_8B, H100)


def test_a_token_alone_waits_for_the_weights_and_its_context() -> None:
    point = ON_H100.tpot(1, 1000)
    streamed = 2 * (LLAMA_3_8B.num_layer_parameters + LLAMA_3_8B.num_head_parameters)
    assert point.tpot_floor_s == pytest.approx((streamed + 131_072 * 1002) / 3.35e12)
    assert point.bound == "memory"
    assert point.tpot_predicted_s is None
    assert point.tokens_per_s_predicted is None
    assert point.tokens_per_s_ceiling == pytest.approx(1 / point.tpot_floor_s)


def test_a_prompt_is_the_sum_of_its_chunks() -> None:
    whole = ON_H100.ttft(4096, 4096)
    operations = 2 * LLAMA_3_8B.num_layer_parameters * 4096 + 4 * 32 * 32 * 128 * 4096 * 4097 // 2
    assert whole.floor_s == pytest.approx((operations + 2 * 4096 * 128256) / 989.4e12)
    assert whole.bound == "compute"
    small = ON_H100.ttft(4096, 64)
    assert small.bound == "memory"
    assert small.floor_s > 64 * 2 * LLAMA_3_8B.num_layer_parameters / 3.35e12 > whole.floor_s
    assert sum(share.num_scheduled_tokens for share in chunks_of(4097, 64)) == 4097


def test_measured_steps_predict_beside_the_floor() -> None:
    steps = StepTimeModel(layers=Curve((1, 512), (0.1, 1.123)), head=Curve((1,), (0.01,)), pair_s=0.0, seen_s=1e-6)
    predictor = Predictor(LLAMA_3_8B, H100, steps)
    point = predictor.tpot(3, 99, price_per_hour=3.6)
    assert point.tpot_predicted_s == pytest.approx(0.1 + 2 * (1.023 / 511) + 0.01 + 3 * 32 * 100 * 1e-6)
    assert point.tokens_per_s_predicted == pytest.approx(3 / point.tpot_predicted_s)
    assert point.cost_per_million_tokens == pytest.approx(1000 * point.tpot_predicted_s / 3)
    prompt = predictor.ttft(1024, 512)
    assert prompt.predicted_s == pytest.approx(2 * 1.123 + 0.01)
    assert prompt.tokens_per_s == pytest.approx(1024 / prompt.predicted_s)


def test_50_ms_a_token_are_20_tokens_a_second() -> None:
    """The plan prints both for one request and for many."""
    streamed = ON_H100.tpot(1, 1000).tpot_floor_s * H100.bytes_per_s
    slow = Predictor(LLAMA_3_8B, MachineLimits(1e18, streamed / 0.05)).tpot(1, 1000)
    assert (slow.tpot_floor_s, slow.tokens_per_s_ceiling) == (pytest.approx(0.05), pytest.approx(20.0))
    many = ON_H100.tpot(8, 1000)
    assert many.tokens_per_s_ceiling == pytest.approx(8 / many.tpot_floor_s)


def test_money() -> None:
    assert cost_per_million_tokens(2.0, 1000.0) == pytest.approx(2 / 3.6)
    assert [point.cost_per_million_tokens for point in ON_H100.frontier(2, 10)] == [None, None]


@given(st.integers(1, 300), st.integers(1, 20_000), st.floats(1e9, 1e16), st.floats(1e9, 1e14))
def test_the_frontier_trades_time_for_rate(most: int, context: int, flops: float, rate: float) -> None:
    points = Predictor(LLAMA_3_8B, MachineLimits(flops, rate)).frontier(most, context)
    assert points[0].batch == 1
    assert points[-1].batch == most
    for before, after in pairwise(points):
        assert after.tpot_floor_s >= before.tpot_floor_s
        assert after.tokens_per_s_ceiling >= before.tokens_per_s_ceiling * (1 - 1e-9)


@given(st.integers(1, 64), st.integers(1, 20_000))
def test_intensity_rises_with_the_drafts_that_are_verified(batch: int, context: int) -> None:
    """The sums by hand: weights are read once, and each request's K and V once, whatever k is."""
    points = ON_H100.verification(batch, context, 8)
    assert [point.num_drafts for point in points] == list(range(9))
    layers = LLAMA_3_8B.num_layer_parameters
    for k, point in enumerate(points):
        rows = batch * (k + 1)
        pairs = batch * sum(context + i for i in range(1, k + 2))
        operations = 2 * (layers + LLAMA_3_8B.num_head_parameters) * rows + 4 * 32 * 128 * 32 * pairs
        num_bytes = 2 * (layers + LLAMA_3_8B.num_head_parameters) + 131_072 * batch * (context + 2 * (k + 1))
        assert point.intensity == pytest.approx(operations / num_bytes)
        assert point.bound == ("compute" if operations / num_bytes >= H100.balance else "memory")
        assert point.floor_s == pytest.approx(max(operations / H100.flops_per_s, num_bytes / H100.bytes_per_s))
        assert point.least_tpot_s == pytest.approx(point.floor_s / (k + 1))
    assert all(after.intensity > before.intensity for before, after in pairwise(points))


def test_verification_goes_from_memory_to_compute() -> None:
    """A batch of 64 waits for its weights without drafts, and for arithmetic with eight drafts each."""
    bounds = [point.bound for point in ON_H100.verification(64, 1024, 8)]
    assert bounds[0] == "memory"
    assert bounds == sorted(bounds, reverse=True), "never back"
    alone = [point.bound for point in ON_H100.verification(1, 1024, 8)]
    assert set(alone) == {"memory"}
    assert [point.bound for point in ON_H100.verification(256, 128, 8)][-1] == "compute"


@pytest.mark.parametrize(("name", "tokens_per_s"), [("A100-80", 2039e9), ("H100-SXM", 3350e9), ("H200", 4800e9)])
def test_a_larger_card_is_faster_for_one_stream_by_its_bandwidth_alone(name: str, tokens_per_s: float) -> None:
    """Three times the arithmetic or twice the memory changes nothing for one request."""
    limits = find_device(name)[1].limits(name, "bfloat16")
    point = Predictor(LLAMA_3_8B, limits).tpot(1, 1024)
    base = ON_H100.tpot(1, 1024)
    assert point.tpot_floor_s * tokens_per_s == pytest.approx(base.tpot_floor_s * 3350e9)
    assert Predictor(LLAMA_3_8B, MachineLimits(10 * limits.flops_per_s, limits.bytes_per_s)).tpot(1, 1024) == point


def test_the_floor_of_a_large_model_is_its_weights_over_the_bandwidth_of_all_ranks() -> None:
    """Llama-3-70B in bfloat16 has 139 GB of matrices, without the embedding table, of which a step reads one row."""
    shape = uniform_shape(
        hidden_size=8192,
        intermediate_size=28672,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=128256,
        windows=(None,) * 80,
        bytes_per_weight=2,
    )
    for ranks in (1, 2, 4):
        limits = MachineLimits(ranks * 989.4e12, ranks * 3.35e12)
        assert Predictor(shape, limits).tpot(1, 1).tpot_floor_s == pytest.approx(139.0e9 / 3.35e12 / ranks, rel=2e-3)
